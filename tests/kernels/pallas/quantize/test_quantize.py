"""The quantisers, bit for bit: against the golden file and against ml_dtypes casts."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.kernels import (
    quantize_dequantize_fp4_block,
    quantize_dequantize_fp4_scaled,
    quantize_dequantize_fp8,
)
from deepinfer_jax.kernels.pallas.quantize import power_of_two_scale, round_e2m1, round_e4m3
from deepinfer_jax.testing.golden import read_golden

GOLDEN = read_golden(Path(__file__).parents[3] / "golden", "quantizers")

QUANTIZERS = {
    "fp8_e8m0_g32": quantize_dequantize_fp8,
    "fp4_e8m0_g32": quantize_dequantize_fp4_block,
    "fp4_e4m3_g16": quantize_dequantize_fp4_scaled,
}
GROUPS = {"fp8_e8m0_g32": 32, "fp4_e8m0_g32": 32, "fp4_e4m3_g16": 16}

each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def assert_same_bits(found, expected: np.ndarray) -> None:
    """Compare as float32 bits, so that the sign of zero counts."""
    bits = np.ascontiguousarray(np.asarray(found).astype(np.float32)).view(np.uint32)
    np.testing.assert_array_equal(bits, np.ascontiguousarray(expected.astype(np.float32)).view(np.uint32))


def ceil_power_of_two(value: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(value)
    return np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)


def reference(name: str, x: np.ndarray) -> np.ndarray:
    """Quantise and dequantise with NumPy divisions and ml_dtypes casts, the formulas of the spec."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUPS[name])
    amax = np.abs(groups).max(axis=-1, keepdims=True)
    if name == "fp8_e8m0_g32":
        scale = ceil_power_of_two(np.maximum(amax, np.float32(1e-4)) * np.float32(1 / 448))
        codes = np.clip(groups / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    else:
        if name == "fp4_e8m0_g32":
            scale = ceil_power_of_two(np.maximum(amax, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
        else:
            raw = np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6)
            scale = np.minimum(raw, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        codes = np.clip(groups / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float32) * scale).reshape(x.shape)


def random_bf16(seed: int, rows: int) -> np.ndarray:
    """Draw bf16 values of very different magnitudes, zeros and group maxima included."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(rows, 96)) * 2.0 ** random.integers(-24, 10, (rows, 1))
    values[random.random(values.shape) < 0.05] = 0.0
    values[random.random(values.shape) < 0.05] = -0.0
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@each_dtype
@each_quantizer
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_golden_bit_for_bit(name: str, dtype, transform) -> None:
    x = jnp.asarray(GOLDEN["x"]).astype(dtype)
    found = transform(QUANTIZERS[name])(x)
    assert found.dtype == dtype
    assert_same_bits(found, GOLDEN[name])


@each_quantizer
def test_reference_reproduces_the_golden_file(name: str) -> None:
    assert_same_bits(reference(name, GOLDEN["x"]), GOLDEN[name])


@each_quantizer
@pytest.mark.parametrize("seed", range(4))
def test_random_values_bit_for_bit(name: str, seed: int) -> None:
    x = random_bf16(seed, 512)
    assert_same_bits(jax.jit(QUANTIZERS[name])(jnp.asarray(x)), reference(name, x))


@each_quantizer
def test_result_is_exact_in_bfloat16(name: str) -> None:
    found = np.asarray(QUANTIZERS[name](jnp.asarray(random_bf16(9, 256))))
    assert_same_bits(found.astype(ml_dtypes.bfloat16), found)


@pytest.mark.parametrize("name", ["fp8_e8m0_g32", "fp4_e8m0_g32"])
def test_power_of_two_scales_are_idempotent(name: str) -> None:
    once = QUANTIZERS[name](jnp.asarray(random_bf16(10, 256)))
    assert_same_bits(QUANTIZERS[name](once), np.asarray(once))


@each_quantizer
def test_gradient_is_the_identity(name: str) -> None:
    x, cotangent = jnp.asarray(GOLDEN["x"][:8]), jnp.asarray(GOLDEN["x"][8:16])
    _, pull_back = jax.vjp(QUANTIZERS[name], x)
    assert_same_bits(pull_back(cotangent)[0], np.asarray(cotangent))


@each_quantizer
def test_derivative_is_the_identity_under_jit(name: str) -> None:
    x, tangent = jnp.asarray(GOLDEN["x"][:8]), jnp.asarray(GOLDEN["x"][8:16])
    _, found = jax.jit(lambda x, t: jax.jvp(QUANTIZERS[name], (x,), (t,)))(x, tangent)
    assert_same_bits(found, np.asarray(tangent))


@each_quantizer
def test_channels_that_are_no_whole_groups_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"got 24 channels, expected a multiple of {GROUPS[name]}"):
        QUANTIZERS[name](jnp.zeros((2, 24)))


def test_e4m3_rounds_every_bfloat16_as_ml_dtypes_does() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = every[np.isfinite(every) & (np.abs(every) <= 448)]
    assert_same_bits(jax.jit(round_e4m3)(jnp.asarray(x)), x.astype(ml_dtypes.float8_e4m3fn))


# 464 and above would be NaN in e4m3; the quantisers clamp to 448 first. Subnormal float32 are left
# out: XLA flushes them and NumPy does not, and both give zero here.
float32_values = st.floats(-448, 448, width=32, allow_subnormal=False)


@given(st.lists(float32_values, min_size=64, max_size=64))
def test_e4m3_rounds_any_float32_as_ml_dtypes_does(values: list[float]) -> None:
    x = np.array(values, np.float32)
    assert_same_bits(round_e4m3(jnp.asarray(x)), x.astype(ml_dtypes.float8_e4m3fn))


def test_e2m1_rounds_every_bfloat16_as_ml_dtypes_does() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    x = every[np.isfinite(every) & (np.abs(every) <= 6)]
    x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)]
    found = jax.jit(round_e2m1)(jnp.asarray(x), jnp.ones_like(x))
    assert_same_bits(found, x.astype(ml_dtypes.float4_e2m1fn))


@pytest.mark.parametrize("scale_byte", [1, 8, 56, 63, 85, 126], ids=lambda byte: f"scale_{byte}")
def test_e2m1_keeps_ties_under_scales_that_are_no_powers_of_two(scale_byte: int) -> None:
    scale = np.array([scale_byte], np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    x = np.concatenate([ties, -ties]) * scale
    expected = np.array([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    found = jax.jit(round_e2m1)(jnp.asarray(x), jnp.broadcast_to(jnp.asarray(scale), x.shape))
    assert_same_bits(found, np.concatenate([expected, -expected]))


@given(st.floats(2.0**-125, 2.0**120, width=32))
def test_power_of_two_scale_is_the_next_power(value: float) -> None:
    scale, inverse = power_of_two_scale(jnp.asarray([value], jnp.float32))
    expected = ceil_power_of_two(np.array([value], np.float32))
    assert_same_bits(scale, expected)
    assert_same_bits(inverse, 1 / expected)
