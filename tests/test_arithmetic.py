"""Loops of `arithmetic.py` against `lax.scan`: the same numbers, however XLA sees their counters.

Separate because everything that runs in tiles rests on them.
Read next: `engine/test_platform.py`, which looks at the launches that XLA makes of a step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from deepinfer_jax.arithmetic import map_tiles, map_used_tiles, scan_counted, scan_rows

ROWS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)


def add_up(carry: jax.Array, row: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    return carry + row.sum(), {"so far": carry * row, "row": row}


def test_rows_are_scanned_as_lax_does() -> None:
    start = jnp.float32(0.5)
    expected = lax.scan(add_up, start, ROWS)
    found = jax.jit(lambda start, rows: scan_rows(add_up, start, rows))(start, ROWS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_tree_of_rows_and_no_carry() -> None:
    rows = {"numbers": ROWS, "flags": ROWS > 0}
    _, found = scan_rows(lambda _, row: (None, jnp.where(row["flags"], row["numbers"], 0)), None, rows)
    np.testing.assert_array_equal(found, np.maximum(ROWS, 0))


def test_numbers_are_counted() -> None:
    carry, numbers = scan_counted(lambda carry, number: (carry + number, number), jnp.int32(0), 5)
    assert int(carry) == 10 and numbers.tolist() == [0, 1, 2, 3, 4] and numbers.dtype == jnp.int32


def test_a_step_is_traced_once() -> None:
    traces = []

    def step(carry: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        traces.append(number)
        return carry + 1, carry

    jax.jit(lambda: scan_counted(step, jnp.float32(0), 4))()
    assert len(traces) == 1


def test_loops_have_gradients() -> None:
    def loss(scan: Any, rows: jax.Array) -> jax.Array:
        carry, results = scan(add_up, jnp.float32(0.5), rows)
        return carry + (results["so far"] ** 2).sum()

    found = jax.grad(lambda rows: loss(scan_rows, rows))(jnp.asarray(ROWS))
    expected = jax.grad(lambda rows: loss(lax.scan, rows))(jnp.asarray(ROWS))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("tile", [1, 3, 7, 8])
def test_tiles_give_each_row_its_own_result(tile: int) -> None:
    is_used = np.asarray([True, False, False, False, True, True, False])
    np.testing.assert_array_equal(map_tiles(lambda rows: 2 * rows, ROWS, tile), 2 * ROWS)
    found = map_used_tiles(lambda rows: 2 * rows, ROWS, is_used, tile)
    np.testing.assert_array_equal(np.asarray(found)[is_used], 2 * ROWS[is_used])
