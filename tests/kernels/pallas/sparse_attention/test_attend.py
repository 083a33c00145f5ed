"""Attention over gathered keys: edges of visibility."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import attend
from deepinfer_jax.testing.references import attention
from deepinfer_jax.testing.tolerances import assert_close

ROWS, HEADS, KEYS, CHANNELS = 4, 3, 6, 32

SINKS = {"with_sink": np.array([-1.0, 0.5, 2.0]), "without_sink": np.full(HEADS, -1e30)}
each_sink = pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)

jitted_attend = jax.jit(attend)


def draw(seed: int = 14) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys, and visibility with at least one key in every row."""
    random = np.random.default_rng(seed)
    q = random.normal(size=(ROWS, HEADS, CHANNELS)).astype(np.float32)
    keys = random.normal(size=(ROWS, KEYS, CHANNELS)).astype(np.float32) * 2
    is_visible = random.random((ROWS, KEYS)) < 0.5
    is_visible[:, 1] = True
    return q, keys, is_visible


def run(q, keys, is_visible, sink) -> np.ndarray:
    return np.asarray(jitted_attend(*map(jnp.asarray, (q, keys, is_visible, sink.astype(np.float32)))))


@each_sink
def test_attention_equals_a_loop(sink) -> None:
    q, keys, is_visible = draw()
    expected = attention(q, keys, is_visible, sink)
    assert_close(run(q, keys, is_visible, sink), expected, "operation_float32")


@each_sink
def test_bc09_row_that_sees_nothing_gives_zero_and_leaves_the_others(sink) -> None:
    q, keys, is_visible = draw()
    expected = run(q, keys, is_visible, sink)
    is_visible[2] = False
    expected = np.where(np.arange(ROWS)[:, None, None] == 2, 0, expected)
    np.testing.assert_array_equal(run(q, keys, is_visible, sink), expected)


@each_sink
def test_bc09_no_keys_at_all_give_zero(sink) -> None:
    q, keys, is_visible = draw()
    np.testing.assert_array_equal(run(q, keys[:, :0], is_visible[:, :0], sink), np.zeros_like(q))


@each_sink
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30], ids=str)
def test_bc09_invisible_keys_may_hold_anything(sink, garbage: float) -> None:
    q, keys, is_visible = draw()
    expected = run(q, keys, is_visible, sink)
    keys[~is_visible] = garbage
    np.testing.assert_array_equal(run(q, keys, is_visible, sink), expected)


def test_large_scores_do_not_overflow() -> None:
    q, keys, is_visible = draw()
    assert np.isfinite(run(q * 1e3, keys * 1e3, is_visible, SINKS["with_sink"])).all()
