"""Every implementation of quantising rows over its cases; for the bytes see `../../test_row_format.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import ImplementationError, RowFormat, pack_rows, round_rows, unpack_rows
from deepinfer_jax.kernels.pallas.quantize_rows.api import (
    PACK_IMPLEMENTATIONS,
    ROUND_IMPLEMENTATIONS,
    UNPACK_IMPLEMENTATIONS,
)
from deepinfer_jax.kernels.pallas.quantize_rows.cases import CASES, RowsCase
from deepinfer_jax.testing.battery import call_op, tiny_cases

each_case = pytest.mark.parametrize("case", tiny_cases(CASES), ids=lambda case: case.name)


def bits(values: np.ndarray) -> np.ndarray:
    """Compare as float32 bits, so that the sign of zero counts."""
    return np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@each_case
@pytest.mark.parametrize("name", PACK_IMPLEMENTATIONS)
def test_packing_and_unpacking_is_rounding(case: RowsCase, key: jax.Array, name: str) -> None:
    assert PACK_IMPLEMENTATIONS.keys() == UNPACK_IMPLEMENTATIONS.keys() == ROUND_IMPLEMENTATIONS.keys()
    (values,), keywords = case.arguments(key)
    packed = call_op(pack_rows, {"values": values}, keywords, name)
    assert packed.shape == (case.rows, case.row_format.width(case.channels))
    dtype = {"dtype": values.dtype}
    unpacked = call_op(unpack_rows, {"packed": jnp.asarray(packed)}, keywords | dtype, name)
    rounded = call_op(round_rows, {"values": values}, keywords, name)
    np.testing.assert_array_equal(bits(unpacked), bits(rounded))


@pytest.mark.parametrize("op", [pack_rows, round_rows])
def test_an_unknown_implementation_is_refused(op) -> None:
    with pytest.raises(
        ImplementationError, match="quantize_rows: got implementation 'mosaic', which does not"
    ):
        op(jnp.zeros((2, 32)), RowFormat.FP8, implementation="mosaic")


def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="FP8 row: got 33 channels, expected a multiple of 32"):
        pack_rows(jnp.zeros((2, 33)), RowFormat.FP8)
    with pytest.raises(ValueError, match="quantize_rows: packed"):
        unpack_rows(jnp.zeros((2, 33)), RowFormat.FP8, jnp.float32)
