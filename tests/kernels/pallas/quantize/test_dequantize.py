"""Resident weights: values of all three storages, whatever the stacking, ends of the scales included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.arrays import QuantArray, Storage
from deepinfer_jax.kernels import dequantize

TINY = np.finfo(np.float32).tiny
CODES = {Storage.FP8_BLOCK: 256, Storage.FP8_ROW: 256, Storage.MXFP4: 16}

decode = jax.jit(dequantize, static_argnums=1)

each_storage = pytest.mark.parametrize("storage", CODES, ids=lambda storage: storage.name)


def make(storage: Storage, codes: np.ndarray, scales: np.ndarray) -> QuantArray:
    if storage is Storage.MXFP4:
        payload = codes[..., 0::2] | codes[..., 1::2] << 4
    else:
        payload = codes.view(ml_dtypes.float8_e4m3fn)
    return QuantArray(jnp.asarray(payload), jnp.asarray(scales), storage, ("ffn", "embed"))


def values_of(storage: Storage, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The definition, element by element and in float64."""
    dtype = ml_dtypes.float4_e2m1fn if storage is Storage.MXFP4 else ml_dtypes.float8_e4m3fn
    values = codes.view(dtype).astype(np.float64)
    i, j = np.indices(codes.shape[-2:])
    return np.ldexp(values, scales[..., i // storage.block_rows, j // 32].astype(int) - 127)


def draw(storage: Storage, shape: tuple[int, ...], low: int = 1, high: int = 241):
    random = np.random.default_rng(len(shape))
    codes = random.integers(0, CODES[storage], shape).astype(np.uint8)
    if storage is not Storage.MXFP4:
        codes[codes & 0x7F == 0x7F] = 0x80
    scale_shape = (*shape[:-2], -(-shape[-2] // storage.block_rows), -(-shape[-1] // 32))
    return codes, random.integers(low, high, scale_shape).astype(np.uint8)


@each_storage
@pytest.mark.parametrize("shape", [(64, 96), (2, 3, 64, 64), (37, 70)], ids=["matrix", "stacked", "ragged"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_values_are_exact_at_ordinary_scales(storage: Storage, shape: tuple[int, ...], dtype) -> None:
    codes, scales = draw(storage, shape, low=18)
    weight = make(storage, codes, scales)
    assert weight.shape == shape and weight.ndim == len(shape)
    found = decode(weight, dtype)
    assert found.dtype == dtype
    expected = values_of(storage, codes, scales)
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(np.asarray(found).astype(np.float32)), np.signbit(expected))


@each_storage
@pytest.mark.parametrize("byte", [0, 1, 2, 17, 240, 246, 252, 253, 254])
def test_ends_of_the_scales(storage: Storage, byte: int) -> None:
    """Exact wherever float32 holds the value as a normal number; below, it or a flushed zero."""
    codes, _ = draw(storage, (256, 32))
    scales = np.full((256 // storage.block_rows, 1), byte, np.uint8)
    expected = values_of(storage, codes, scales)
    finite = np.abs(expected) <= np.finfo(np.float32).max
    found = np.asarray(decode(make(storage, codes, scales), jnp.float32))
    is_small = np.abs(expected) < TINY
    compared = finite & ~is_small
    np.testing.assert_array_equal(found[compared].astype(np.float64), expected[compared])
    assert ((found[is_small] == 0) | (found[is_small] == expected[is_small])).all()
    assert compared.any()


def test_slices_of_a_stack_are_its_weights() -> None:
    codes, scales = draw(Storage.FP8_BLOCK, (2, 3, 64, 64))
    weight = make(Storage.FP8_BLOCK, codes, scales)
    one = jax.tree.map(lambda array: array[1, 2], weight)
    assert one.shape == (64, 64) and (one.storage, one.axes) == (weight.storage, weight.axes)
    np.testing.assert_array_equal(
        np.asarray(decode(one, jnp.float32)), np.asarray(decode(weight, jnp.float32))[1, 2]
    )
    assert weight.num_bytes == codes.size + scales.size
