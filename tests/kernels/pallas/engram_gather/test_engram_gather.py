"""The Engram gather: every implementation on every case against a loop over columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.arrays import QuantArray, Storage
from deepinfer_jax.kernels import ImplementationError, engram_gather
from deepinfer_jax.kernels.pallas.engram_gather.api import IMPLEMENTATIONS
from deepinfer_jax.kernels.pallas.engram_gather.cases import CASES, GatherCase
from deepinfer_jax.testing.battery import call_op, named_operands, tiny_cases


def values(table) -> np.ndarray:
    """Decode with ml_dtypes casts."""
    if not isinstance(table, QuantArray):
        return np.asarray(table)
    scales = np.asarray(table.scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return np.asarray(table.payload).astype(np.float32) * np.repeat(scales, 32, axis=1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", tiny_cases(CASES), ids=lambda case: case.name)
def test_case_equals_the_loop(case: GatherCase, implementation: str, key) -> None:
    arguments = case.arguments(key)
    table, rows = arguments.positional
    operands = named_operands(engram_gather, arguments)
    found = call_op(engram_gather, operands, arguments.keywords, implementation)
    decoded = values(table)
    expected = np.stack([np.concatenate([decoded[row] for row in token]) for token in np.asarray(rows)])
    assert found.dtype == case.dtype
    np.testing.assert_array_equal(found, expected.astype(found.dtype))


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


TABLE, ROWS = CASES[0].arguments(jax.random.key(0)).positional


@pytest.mark.parametrize(
    ("table", "rows", "dtype", "message"),
    [
        (jnp.zeros(3), ROWS, jnp.float32, r"table: got shape \(3,\), expected \[table_rows, width\]"),
        (TABLE, ROWS[0], jnp.float32, r"rows: got shape \(6,\), expected \[R, C\]"),
        (TABLE, ROWS.astype(jnp.float32), jnp.float32, "rows: got dtype float32, expected int32"),
        (TABLE, ROWS, jnp.int32, "dtype: got int32, expected float32 or bfloat16"),
        (TABLE.replace(storage=Storage.FP8_BLOCK), ROWS, jnp.float32, "table: got storage FP8_BLOCK"),
    ],
    ids=["table", "rows", "rows_dtype", "dtype", "storage"],
)
def test_operands_that_do_not_fit_are_refused(table, rows, dtype, message: str) -> None:
    with pytest.raises(ValueError, match=f"engram_gather: {message}"):
        engram_gather(table, rows, dtype)


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ImplementationError, match="engram_gather: got implementation 'cuda'"):
        engram_gather(TABLE, ROWS, jnp.float32, implementation="cuda")
