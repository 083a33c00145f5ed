"""The bytes and nibbles of the 8-bit and 4-bit grids, decoded and encoded by bit arithmetic.

Separate because weights and cache rows share them. No casts to 8-bit types, which XLA may drop or
compile slowly, and no table lookups: a few integer operations per element, which fuse into what
reads the result. Small codes get a leading one that is subtracted again, so that no subnormal
float32 arises on the way, which devices flush.
Read next: `dequantize.py` and `../../row_format.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from ....arrays import Array

_E4M3_BIAS = 127 - 7
_E2M1_BIAS = 127 - 1


def e4m3_values(codes: Array) -> Array:
    """Decode e4m3 bytes: (-1)^s 2^(e - 7) (1 + m / 8), or (-1)^s 2^-6 m / 8 at e = 0.

    Args:
        codes: uint8; 0x7F and 0xFF, the format's NaN, decode as 480 and must not occur.

    Returns:
        float32 of the same shape, exact.

    Source: spec/checkpoint.md section 3.
    """
    return _decode(codes, mantissa_bits=3, sign_bit=7, bias=_E4M3_BIAS)


def e2m1_values(codes: Array) -> Array:
    """Decode e2m1 nibbles: codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6, bit 3 is the sign.

    Args:
        codes: uint8, each 0..15.

    Returns:
        float32 of the same shape, exact, sign of zero kept.

    Source: spec/checkpoint.md section 3.
    """
    return _decode(codes, mantissa_bits=1, sign_bit=3, bias=_E2M1_BIAS)


def _decode(codes: Array, mantissa_bits: int, sign_bit: int, bias: int) -> Array:
    codes = codes.astype(jnp.uint32)
    magnitude = codes & jnp.uint32(2**sign_bit - 1)
    is_subnormal = magnitude < 2**mantissa_bits
    exponent = jnp.where(is_subnormal, jnp.uint32(bias + 1), jnp.uint32(bias)) << 23
    values = _as_float((magnitude << (23 - mantissa_bits)) + exponent)
    values = values - jnp.where(is_subnormal, np.float32(2.0 ** (bias - 126)), np.float32(0))
    return _as_float(_as_bits(values) | ((codes >> sign_bit) << 31))


def e4m3_codes(values: Array) -> Array:
    """Encode float32 values that lie on the e4m3 grid.

    Args:
        values: float32 on the grid, at most 448 in magnitude; see `round_e4m3`.

    Returns:
        uint8 of the same shape, sign of zero kept.
    """
    return _encode(values, mantissa_bits=3, sign_bit=7, bias=_E4M3_BIAS)


def e2m1_codes(values: Array) -> Array:
    """Encode float32 values that lie on the e2m1 grid.

    Args:
        values: float32 on the grid, at most 6 in magnitude; see `round_e2m1`.

    Returns:
        uint8 of the same shape, each 0..15, sign of zero kept.
    """
    return _encode(values, mantissa_bits=1, sign_bit=3, bias=_E2M1_BIAS)


def _encode(values: Array, mantissa_bits: int, sign_bit: int, bias: int) -> Array:
    bits = _as_bits(values)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    is_subnormal = magnitude < (bias + 1) << 23
    normal = (magnitude >> (23 - mantissa_bits)) - jnp.uint32(bias << mantissa_bits)
    # A multiple of the smallest subnormal, so the conversion to an integer rounds nothing.
    smallest = 2.0 ** (bias + 1 - 127 - mantissa_bits)
    subnormal = (jnp.abs(values) * np.float32(1 / smallest)).astype(jnp.int32).astype(jnp.uint32)
    codes = jnp.where(is_subnormal, subnormal, normal) | ((bits >> 31) << sign_bit)
    return codes.astype(jnp.uint8)


def e8m0_factors(codes: Array) -> tuple[Array, Array]:
    """Decode E8M0 bytes as two factors: first * second = 2^(b - 127).

    One float32 cannot take part in arithmetic at b = 0, where 2^-127 is subnormal and flushed. Both
    factors are normal, about the square root each, so multiplying by one after the other is exact
    wherever the result is a normal float32.

    Args:
        codes: uint8; 255, the format's NaN, must not occur.

    Returns:
        Two float32 arrays of the same shape.

    Source: spec/checkpoint.md section 3.
    """
    codes = codes.astype(jnp.uint32)
    half = codes >> 1
    # Exponents half - 63 and (codes - half) - 64.
    return _as_float((half + 64) << 23), _as_float((codes - half + 63) << 23)


def e8m0_codes(scales: Array) -> Array:
    """Encode float32 scales that are powers of two.

    Args:
        scales: float32 powers of two, 2^-126..2^127.

    Returns:
        uint8 bytes of the same shape.
    """
    return (_as_bits(scales) >> 23).astype(jnp.uint8)


def pack_nibbles(codes: Array) -> Array:
    """Put two nibbles into a byte, the even element into the low half.

    Args:
        codes: uint8 [..., channels], each 0..15, an even number of channels.

    Returns:
        uint8 [..., channels / 2].
    """
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Array) -> Array:
    """Take the nibbles of bytes apart, the low half first.

    Args:
        packed: uint8 [..., bytes].

    Returns:
        uint8 [..., 2 bytes], each 0..15.
    """
    # Two shifts side by side instead of two slices that are interleaved: one elementwise loop.
    shifts = lax.broadcasted_iota(jnp.uint8, (*packed.shape, 2), packed.ndim) * jnp.uint8(4)
    pairs = (packed[..., None] >> shifts) & jnp.uint8(15)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _as_bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.uint32)


def _as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
