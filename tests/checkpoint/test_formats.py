from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.arrays import Storage
from deepinfer_jax.checkpoint import formats
from deepinfer_jax.checkpoint.errors import CheckpointError
from deepinfer_jax.checkpoint.formats import (
    check_quantized,
    dequantize,
    quantize,
    scale_bytes,
    scale_values,
)

STORAGES = (Storage.FP8_BLOCK, Storage.FP8_ROW, Storage.MXFP4)
MAXIMUM = {Storage.FP8_BLOCK: 448.0, Storage.FP8_ROW: 448.0, Storage.MXFP4: 6.0}
BLOCK_ROWS = {Storage.FP8_BLOCK: 32, Storage.FP8_ROW: 1, Storage.MXFP4: 1}

each_storage = pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.name)


def unit_scales(storage: Storage, rows: int, columns: int) -> np.ndarray:
    return np.full((-(-rows // BLOCK_ROWS[storage]), -(-columns // 32)), 127, np.uint8)


def elementwise_scales(storage: Storage, scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    i, j = np.indices(shape)
    return np.ldexp(1.0, scales[i // BLOCK_ROWS[storage], j // 32].astype(int) - 127)


def random_matrix(seed: int, rows: int, columns: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.normal(size=(rows, columns)) * 2.0 ** random.integers(-20, 20, (rows, 1))
    values[random.random((rows, columns)) < 0.1] = 0.0
    return values.astype(np.float32)


@pytest.mark.parametrize("byte", [0, 1, 120, 126, 127, 128, 254])
def test_bc50_scale_byte_is_a_power_of_two(byte: int) -> None:
    value = scale_values(np.array([byte], np.uint8))
    assert value.dtype == np.float32
    assert float(value[0]) == 2.0 ** (byte - 127)


def test_bc50_three_storages_of_a_scale_agree() -> None:
    expected = np.arange(255, dtype=np.uint8).reshape(5, 51)
    for stored in (expected, expected.view(ml_dtypes.float8_e8m0fnu), scale_values(expected)):
        np.testing.assert_array_equal(scale_bytes(stored, "scales"), expected)


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu])
def test_bc50_nan_scale_is_refused_by_name(dtype) -> None:
    with pytest.raises(CheckpointError, match=r"a\.scale: 1 of 2 scales are byte 255"):
        scale_bytes(np.array([127, 255], np.uint8).view(dtype), "a.scale")


@pytest.mark.parametrize("value", [0.0, -0.5, 3.0, np.nan, np.inf, 2.0**-128])
def test_bc50_float32_scale_that_e8m0_lacks_is_refused(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"a\.scale: float32 scale .* expected a finite power of two"):
        scale_bytes(np.array([1.0, value], np.float32), "a.scale")


def test_scale_of_another_dtype_is_refused() -> None:
    with pytest.raises(CheckpointError, match="dtype int8"):
        scale_bytes(np.array([1], np.int8), "a.scale")


def test_bc54_low_nibble_is_the_even_element() -> None:
    values = dequantize(Storage.MXFP4, np.array([[0x21]], np.int8), np.array([[127]], np.uint8), "w")
    np.testing.assert_array_equal(values, [[0.5, 1.0]])


def test_every_mxfp4_byte_is_two_codes_of_the_table() -> None:
    payload = np.arange(256, dtype=np.uint8).reshape(16, 16)
    values = dequantize(Storage.MXFP4, payload, unit_scales(Storage.MXFP4, 16, 32), "w")
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(16, 32)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_every_e4m3_code_has_its_value() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8).reshape(2, 127)
    values = dequantize(Storage.FP8_ROW, codes, unit_scales(Storage.FP8_ROW, 2, 127), "w")
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    np.testing.assert_array_equal(values, np.where(codes >> 7, -magnitude, magnitude))


@each_storage
def test_scales_apply_to_their_own_group_with_ragged_ends(storage: Storage) -> None:
    random = np.random.default_rng(0)
    rows, columns = 37, 70
    scales = random.integers(100, 140, unit_scales(storage, rows, columns).shape).astype(np.uint8)
    width = columns // 2 if storage is Storage.MXFP4 else columns
    payload = random.integers(0, 0x7F, (rows, width)).astype(np.uint8)
    plain = dequantize(storage, payload, unit_scales(storage, rows, columns), "w")
    expected = plain * elementwise_scales(storage, scales, plain.shape)
    np.testing.assert_array_equal(dequantize(storage, payload, scales, "w"), expected)


# Both ways refuse the same: with the values and from the bytes alone.
each_check = pytest.mark.parametrize("check", [dequantize, check_quantized])


@each_check
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_payload_is_refused_by_name(check: Callable, code: int) -> None:
    payload = np.array([[0, code]], np.uint8)
    with pytest.raises(CheckpointError, match=r"w: 1 of 2 values are NaN"):
        check(Storage.FP8_BLOCK, payload, unit_scales(Storage.FP8_BLOCK, 1, 2), "w")


@each_check
@pytest.mark.parametrize(
    ("storage", "largest_code", "scale"), [(Storage.MXFP4, 0x77, 253), (Storage.FP8_ROW, 0x7E, 247)]
)
def test_product_beyond_float32_is_refused(
    check: Callable, storage: Storage, largest_code: int, scale: int
) -> None:
    payload = np.array([[largest_code]], np.uint8)
    with pytest.raises(CheckpointError, match="overflow float32"):
        check(storage, payload, np.array([[scale]], np.uint8), "w")
    check(storage, payload, np.array([[scale - 1]], np.uint8), "w")


@each_check
def test_largest_scale_is_accepted_under_small_codes(check: Callable) -> None:
    check(Storage.MXFP4, np.array([[0x33]], np.uint8), np.array([[254]], np.uint8), "w")


def test_values_are_computed_only_if_a_byte_is_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "dequantize", lambda *arguments: pytest.fail("values were computed"))
    for storage in STORAGES:
        columns = 32 if storage is Storage.MXFP4 else 64
        scales = np.full_like(unit_scales(storage, 64, 64), 246)
        check_quantized(storage, np.full((64, columns), 0x7E, np.uint8), scales, "w")


@each_check
def test_scales_of_another_grouping_are_refused(check: Callable) -> None:
    payload = np.zeros((64, 64), np.uint8)
    with pytest.raises(CheckpointError, match=r"scales have shape \(2, 2\), expected \(64, 2\)"):
        check(Storage.FP8_ROW, payload, unit_scales(Storage.FP8_BLOCK, 64, 64), "w")


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (-0.25, -0.0)],
)
def test_mxfp4_ties_go_to_the_even_code(value: float, rounded: float) -> None:
    # The six makes the scale one.
    payload, scales = quantize(Storage.MXFP4, np.array([[value, 6.0]], np.float32), "w")
    got = dequantize(Storage.MXFP4, payload, scales.view(np.uint8), "w")
    assert got[0, 0] == rounded and np.signbit(got[0, 0]) == np.signbit(rounded)


@each_storage
def test_zero_group_has_scale_one_and_keeps_signs(storage: Storage) -> None:
    values = np.zeros((2, 64), np.float32)
    values[0, 3], values[0, 40] = -0.0, 1.0
    payload, scales = quantize(storage, values, "w")
    assert (scales.view(np.uint8)[:, 0] == 127).all()
    back = dequantize(storage, payload, scales.view(np.uint8), "w")
    np.testing.assert_array_equal(back, values)
    np.testing.assert_array_equal(np.signbit(back), np.signbit(values))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_not_quantised(value: float) -> None:
    with pytest.raises(CheckpointError, match="w: holds NaN or infinity"):
        quantize(Storage.FP8_ROW, np.array([[value]], np.float32), "w")


def test_odd_number_of_mxfp4_columns_is_refused() -> None:
    with pytest.raises(CheckpointError, match="even columns"):
        quantize(Storage.MXFP4, np.ones((1, 3), np.float32), "w")


sizes = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40).map(lambda half: 2 * half)
)


@each_storage
@settings(max_examples=15)
@given(size=sizes)
def test_quantised_values_are_nearest_under_the_smallest_scale(
    storage: Storage, size: tuple[int, int, int]
) -> None:
    values = random_matrix(*size)
    payload, scales = quantize(storage, values, "w")
    back = dequantize(storage, payload, scales.view(np.uint8), "w")
    spread = elementwise_scales(storage, scales.view(np.uint8), values.shape)
    assert (np.abs(values) <= MAXIMUM[storage] * spread).all()
    # Nearest: no other code of the grid, positive or negative, is closer.
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    if storage is not Storage.MXFP4:
        codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    grid = codes.astype(np.float64)
    grid = grid[np.isfinite(grid)]
    nearest = np.abs((values / spread)[..., None] - grid).min(axis=-1)
    np.testing.assert_array_equal(np.abs(values / spread - back / spread), nearest)
    # Smallest: half the scale would saturate somewhere in each group that is not zero.
    groups = np.zeros(scales.shape)
    i, j = np.indices(values.shape)
    np.maximum.at(groups, (i // BLOCK_ROWS[storage], j // 32), np.abs(values) / spread)
    assert ((groups > MAXIMUM[storage] / 2) | (groups == 0)).all()


@each_storage
@settings(max_examples=15)
@given(size=sizes)
def test_values_return_exactly_and_canonical_bytes_too(storage: Storage, size: tuple[int, int, int]) -> None:
    payload, scales = quantize(storage, random_matrix(*size), "w")
    values = dequantize(storage, payload, scales.view(np.uint8), "w")
    np.testing.assert_array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float32), values)
    canonical = quantize(storage, values, "w")
    again = dequantize(storage, canonical[0], canonical[1].view(np.uint8), "w")
    np.testing.assert_array_equal(again.view(np.uint32), values.view(np.uint32))
    twice = quantize(storage, again.astype(ml_dtypes.bfloat16), "w")
    for first, second in zip(canonical, twice, strict=True):
        np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))
