"""The model's three activation and cache quantisers, as quantise-dequantise functions.

Separate because training, cache and matmuls share them bit for bit. All rounding is written as
arithmetic on float32: XLA may drop a cast to an 8-bit type and back inside one fusion. Derivatives
are the identity's (straight-through).
Read next: `codes.py`, the bytes of the same grids, and `../../row_format.py`, which packs rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....arrays import Array

FP8_GROUP = 32
"""Channels that share a scale in FP8 activations and window rows, and in FP4 index keys."""

FP4_SCALED_GROUP = 16
"""Channels that share an E4M3 scale in compressed KV."""

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0

# Distance above a threshold of |x| / scale, and whether the threshold itself rounds up: ties go to
# the even code. The steps add up to the grid 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_E2M1_STEPS = (
    (0.25, False, 0.5),
    (0.75, True, 0.5),
    (1.25, False, 0.5),
    (1.75, True, 0.5),
    (2.5, False, 1.0),
    (3.5, True, 1.0),
    (5.0, False, 2.0),
)


def straight_through(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Give a rounding function the identity's derivative, so that training can pass through it."""
    rounded = jax.custom_jvp(function)
    rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))
    return rounded


@straight_through
def quantize_dequantize_fp8(x: Array) -> Array:
    """Round to e4m3 with one power-of-two scale per 32 channels (the spec's Q8).

    a = max(max|x|, 1e-4); s = P(a / 448); y = e4m3(clamp(x / s, +-448)) s, with P(v) the smallest
    power of two that is not below v.

    Args:
        x: [..., channels], channels a multiple of 32.

    Returns:
        y in x's dtype (exact in bfloat16).

    Source: spec/model.md section 2.
    """
    return _join(fp8_parts(x), x)


@straight_through
def quantize_dequantize_fp4_block(x: Array) -> Array:
    """Round to e2m1 with one power-of-two scale per 32 channels (the spec's Q4i, index keys).

    a = max(max|x|, 6 2^-126); s = P(a / 6); y = e2m1(clamp(x / s, +-6)) s.

    Args:
        x: [..., channels], channels a multiple of 32.

    Returns:
        y in x's dtype (exact in bfloat16).

    Source: spec/model.md section 2.
    """
    return _join(fp4_block_parts(x), x)


@straight_through
def quantize_dequantize_fp4_scaled(x: Array) -> Array:
    """Round to e2m1 with one e4m3 scale per 16 channels (the spec's Q4c, compressed KV).

    a = max(max|x|, 6 2^-9); s = e4m3(a / 6), saturating; y = e2m1(clamp(x / s, +-6)) s.

    Args:
        x: [..., channels], channels a multiple of 16.

    Returns:
        y in x's dtype (exact in bfloat16).

    Source: spec/model.md section 2.
    """
    return _join(fp4_scaled_parts(x), x)


def fp8_parts(x: Array) -> tuple[Array, Array]:
    """Split Q8's result into e4m3 elements and their scales, before they are multiplied.

    Args:
        x: [..., channels], channels a multiple of 32.

    Returns:
        Elements float32 [..., groups, 32] on the e4m3 grid; scales float32 [..., groups, 1].
    """
    groups = _split(x, FP8_GROUP)
    amax = jnp.maximum(_amax(groups), 1e-4)
    scale, inverse = power_of_two_scale(amax * np.float32(1 / _E4M3_MAX))
    scaled = jnp.clip(groups * inverse, -_E4M3_MAX, _E4M3_MAX)
    return round_e4m3(scaled), scale


def fp4_block_parts(x: Array) -> tuple[Array, Array]:
    """Split Q4i's result into e2m1 elements and power-of-two scales, as `fp8_parts` does.

    Args:
        x: [..., channels], channels a multiple of 32.

    Returns:
        Elements float32 [..., groups, 32] on the e2m1 grid; scales float32 [..., groups, 1].
    """
    groups = _split(x, FP8_GROUP)
    amax = jnp.maximum(_amax(groups), np.float32(_E2M1_MAX * 2.0**-126))
    scale, _ = power_of_two_scale(amax * np.float32(1 / _E2M1_MAX))
    return round_e2m1(groups, scale), scale


def fp4_scaled_parts(x: Array) -> tuple[Array, Array]:
    """Split Q4c's result into e2m1 elements and e4m3 scales, as `fp8_parts` does.

    Args:
        x: [..., channels], channels a multiple of 16.

    Returns:
        Elements float32 [..., groups, 16] on the e2m1 grid; scales float32 [..., groups, 1] on the
        e4m3 grid.
    """
    groups = _split(x, FP4_SCALED_GROUP)
    amax = jnp.maximum(_amax(groups), np.float32(_E2M1_MAX * 2.0**-9))
    scale = round_e4m3(jnp.minimum(amax * np.float32(1 / _E2M1_MAX), _E4M3_MAX))
    return round_e2m1(groups, scale), scale


def _split(x: Array, group: int) -> Array:
    if x.shape[-1] % group:
        raise ValueError(f"quantiser: got {x.shape[-1]} channels, expected a multiple of {group}")
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _join(parts: tuple[Array, Array], x: Array) -> Array:
    elements, scale = parts
    return (elements * scale).reshape(x.shape).astype(x.dtype)


def _amax(groups: Array) -> Array:
    return jnp.max(jnp.abs(groups), axis=-1, keepdims=True)


def power_of_two_scale(values: Array) -> tuple[Array, Array]:
    """Give P(v), the smallest power of two that is not below v, and 1 / P(v).

    From the bits: the exponent, plus 1 if the mantissa is not 0.

    Args:
        values: float32, normal and positive.

    Returns:
        P(v) and its reciprocal, float32.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)
    return _power_from_exponent(exponent), _power_from_exponent(254 - exponent)


def _power_from_exponent(biased_exponent: Array) -> Array:
    return lax.bitcast_convert_type(biased_exponent << 23, jnp.float32)


def round_e4m3(x: Array) -> Array:
    """Round |x| <= 448 to the nearest e4m3 value, ties to even, subnormals included."""
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF
    exponent = jnp.maximum(exponent, 127 - 6)
    quantum, inverse = _power_from_exponent(exponent - 3), _power_from_exponent(254 - (exponent - 3))
    return jnp.round(x * inverse) * quantum


def round_e2m1(x: Array, scale: Array) -> Array:
    """Round x / scale to the e2m1 grid by comparing |x| with threshold * scale.

    The products are exact, while a quotient by a scale that is no power of two may be rewritten by
    XLA to a product with its reciprocal, which moves exact ties.
    """
    magnitude = jnp.abs(x)
    level = jnp.zeros_like(x)
    for threshold, is_tie_up, step in _E2M1_STEPS:
        bound = scale * np.float32(threshold)
        is_above = magnitude >= bound if is_tie_up else magnitude > bound
        level = level + jnp.where(is_above, np.float32(step), np.float32(0))
    # Under the smallest scale, a threshold of half a step is flushed to zero, and zero reaches it.
    level = jnp.where(magnitude > 0, level, np.float32(0))
    return jnp.copysign(level, x)
