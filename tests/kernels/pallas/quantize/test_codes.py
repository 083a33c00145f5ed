"""The byte codes: every one of them, against ml_dtypes and against the exponents written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.kernels.pallas.quantize import codes

E4M3 = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
E2M1 = np.arange(16, dtype=np.uint8)


def bits_of(values) -> np.ndarray:
    return np.asarray(values).view(np.uint32)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize(
    ("decode", "every_code", "dtype"),
    [
        (codes.e4m3_values, E4M3, ml_dtypes.float8_e4m3fn),
        (codes.e2m1_values, E2M1, ml_dtypes.float4_e2m1fn),
    ],
    ids=["e4m3", "e2m1"],
)
def test_every_code_has_its_value(transform, decode, every_code: np.ndarray, dtype) -> None:
    found = transform(decode)(jnp.asarray(every_code))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(bits_of(found), bits_of(every_code.view(dtype).astype(np.float32)))


@pytest.mark.parametrize(
    ("decode", "encode", "every_code"),
    [(codes.e4m3_values, codes.e4m3_codes, E4M3), (codes.e2m1_values, codes.e2m1_codes, E2M1)],
    ids=["e4m3", "e2m1"],
)
def test_every_value_has_its_code(decode, encode, every_code: np.ndarray) -> None:
    found = jax.jit(lambda stored: encode(decode(stored)))(jnp.asarray(every_code))
    assert found.dtype == jnp.uint8
    np.testing.assert_array_equal(np.asarray(found), every_code)


def test_every_scale_byte_is_the_product_of_two_normal_powers() -> None:
    every_byte = np.arange(255, dtype=np.uint8)
    first, second = (np.asarray(factor) for factor in jax.jit(codes.e8m0_factors)(jnp.asarray(every_byte)))
    smallest = np.finfo(np.float32).tiny
    assert (first >= smallest).all() and (second >= smallest).all()
    product = first.astype(np.float64) * second.astype(np.float64)
    np.testing.assert_array_equal(product, np.ldexp(1.0, every_byte.astype(int) - 127))


def test_scale_bytes_of_normal_powers() -> None:
    every_byte = np.arange(1, 255, dtype=np.uint8)
    scales = np.ldexp(np.float32(1), every_byte.astype(int) - 127)
    np.testing.assert_array_equal(np.asarray(codes.e8m0_codes(jnp.asarray(scales))), every_byte)


def test_low_nibble_is_the_even_element() -> None:
    nibbles = np.random.default_rng(0).integers(0, 16, (3, 5, 8)).astype(np.uint8)
    packed = codes.pack_nibbles(jnp.asarray(nibbles))
    np.testing.assert_array_equal(np.asarray(packed), nibbles[..., 0::2] + 16 * nibbles[..., 1::2])
    np.testing.assert_array_equal(np.asarray(codes.unpack_nibbles(packed)), nibbles)
