"""Cache rows, byte for byte: against a plain NumPy encoder, the golden file and the published sizes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.kernels import (
    CACHE_FORMATS,
    RowFormat,
    pack_rows,
    round_rows,
    unpack_rows,
)

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "quantizers.npz")
GOLDEN_NAMES = {
    RowFormat.FP8: "fp8_e8m0_g32",
    RowFormat.FP4_BLOCK: "fp4_e8m0_g32",
    RowFormat.FP4_SCALED: "fp4_e4m3_g16",
}

each_packed = pytest.mark.parametrize("row_format", GOLDEN_NAMES, ids=lambda row_format: row_format.name)
each_format = pytest.mark.parametrize("row_format", RowFormat, ids=lambda row_format: row_format.name)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])

pack = jax.jit(pack_rows, static_argnums=1)
unpack = jax.jit(unpack_rows, static_argnums=(1, 2))


def assert_same_bits(found, expected) -> None:
    """Compare as float32 bits, so that the sign of zero counts."""
    found, expected = (np.ascontiguousarray(np.asarray(array, np.float32)) for array in (found, expected))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def ceil_exponent(value: np.float32) -> int:
    mantissa, exponent = np.frexp(value)
    return int(exponent) - (mantissa == 0.5)


def encode_row(row: np.ndarray, row_format: RowFormat) -> np.ndarray:
    """Encode one row group by group, with divisions and casts, as the specification words it."""
    data, scales = [], []
    for group in row.astype(np.float32).reshape(-1, row_format.group):
        amax = np.abs(group).max()
        if row_format is RowFormat.FP8:
            exponent = ceil_exponent(max(amax, np.float32(1e-4)) * np.float32(1 / 448))
            scaled = np.clip(group / np.float32(2.0**exponent), -448, 448)
            data.append(scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
            scales.append(exponent + 127)
            continue
        if row_format is RowFormat.FP4_BLOCK:
            exponent = ceil_exponent(max(amax, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
            scale, byte = np.float32(2.0**exponent), exponent + 127
        else:
            raw = min(max(amax, np.float32(6 * 2.0**-9)) / np.float32(6), np.float32(448))
            code = np.array([raw], np.float32).astype(ml_dtypes.float8_e4m3fn)
            scale, byte = code.astype(np.float32)[0], code.view(np.uint8)[0]
        codes = np.clip(group / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        data.append(codes[0::2] | codes[1::2] << 4)
        scales.append(byte)
    return np.concatenate([*data, np.array(scales, np.uint8)])


def edge_rows() -> np.ndarray:
    """Zeros of both signs, ties, groups at the scale floors, saturation: 96 channels each."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32)
    e4m3_ties = np.array([17, 19, 2.0**-10, 3 * 2.0**-10, 15.5 * 2.0**-7, 448, 440, 424], np.float32)
    signs = np.tile(np.array([1, -1], np.float32), 48)
    base = [np.tile(ties, 12) * signs, np.tile(np.roll(ties, 1), 12), np.tile(e4m3_ties, 12) * signs]
    powers = [2.0**-20, 2.0**-9, 0.4375, 1.0, 8.0, 448.0, 1e4]
    rows = [row * np.float32(power) for row in base for power in powers]
    zeros = [np.zeros(96), -np.zeros(96), np.where(np.arange(96) % 3 == 0, -0.0, 0.0)]
    floors = [np.full(96, 1e-4), np.full(96, -1e-6), np.full(96, 6 * 2.0**-9), np.full(96, 2.0**-11)]
    return np.stack([*rows, *zeros, *floors]).astype(ml_dtypes.bfloat16).astype(np.float32)


def random_rows() -> np.ndarray:
    random = np.random.default_rng(3)
    rows = random.normal(size=(64, 96)) * 2.0 ** random.integers(-24, 10, (64, 1))
    rows[random.random(rows.shape) < 0.1] = -0.0
    return rows.astype(ml_dtypes.bfloat16).astype(np.float32)


@each_packed
@pytest.mark.parametrize("rows", [edge_rows(), random_rows(), GOLDEN["x"]], ids=["edges", "random", "golden"])
def test_bytes_of_a_row(row_format: RowFormat, rows: np.ndarray) -> None:
    found = pack(jnp.asarray(rows), row_format)
    assert found.dtype == jnp.uint8
    expected = np.stack([encode_row(row, row_format) for row in rows])
    np.testing.assert_array_equal(np.asarray(found), expected)


@each_packed
@each_dtype
def test_golden_comes_back_bit_for_bit(row_format: RowFormat, dtype) -> None:
    found = unpack(pack(jnp.asarray(GOLDEN["x"]).astype(dtype), row_format), row_format, dtype)
    assert found.dtype == dtype
    assert_same_bits(found, GOLDEN[GOLDEN_NAMES[row_format]])


@each_format
@each_dtype
def test_rounding_is_packing_and_unpacking(row_format: RowFormat, dtype) -> None:
    rows = jnp.asarray(np.concatenate([edge_rows(), random_rows()])).astype(dtype)
    packed = pack(rows, row_format)
    assert packed.shape == (len(rows), row_format.width(96)) and packed.dtype == row_format.dtype
    rounded = jax.jit(round_rows, static_argnums=1)(rows, row_format)
    assert rounded.dtype == dtype
    assert_same_bits(unpack(packed, row_format, dtype), rounded)


def test_float32_rows_round_to_bfloat16_and_keep_their_dtype() -> None:
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
    found = round_rows(rows, RowFormat.BFLOAT16)
    assert_same_bits(found, np.asarray(rows).astype(ml_dtypes.bfloat16))
    gradient = jax.grad(lambda x: jnp.sum(round_rows(x, RowFormat.BFLOAT16) * 1.2345678))(rows)
    assert_same_bits(gradient, np.full((4, 32), 1.2345678, np.float32))


def test_released_formats_have_the_published_sizes() -> None:
    """890 bytes a token of three sources at ratio 2 and one at ratio 1; a window of 128 rows a layer."""
    window, entry, index_key = CACHE_FORMATS["fp4"]
    assert (window, entry, index_key) == (RowFormat.FP8, RowFormat.FP4_SCALED, RowFormat.FP4_BLOCK)
    assert (window.width(512), entry.width(512), index_key.width(128)) == (528, 288, 68)
    per_entry = entry.width(512) + index_key.width(128)
    assert 3 * per_entry / 2 + per_entry == 890
    assert 128 * window.width(512) == 67_584


@each_format
def test_width_and_channels_are_inverse(row_format: RowFormat) -> None:
    for channels in (32, 128, 512):
        assert row_format.channels(row_format.width(channels)) == channels


def test_rows_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="FP8 row: got 24 channels, expected a multiple of 32"):
        pack_rows(jnp.zeros((2, 24)), RowFormat.FP8)
    with pytest.raises(ValueError, match="FP4_SCALED row: got width 10, expected a multiple of 9"):
        unpack_rows(jnp.zeros((2, 10), jnp.uint8), RowFormat.FP4_SCALED, jnp.float32)
