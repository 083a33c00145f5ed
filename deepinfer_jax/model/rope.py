"""Rotary position embedding with and without YaRN.

Separate because two frequency tables serve all layers: plain for window-only layers, scaled for
everything in a layer that reads compressed KV.
Read next: `attention.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..arithmetic import round_to
from ..arrays import Array
from ..config import ModelConfig, YarnScaling


class Rotation(NamedTuple):
    """Cosine and sine of position * frequency: float32 [..., rope_dim / 2] each."""

    cos: Array
    sin: Array


def rope_frequencies(rope_dim: int, theta: float, scaling: YarnScaling | None) -> np.ndarray:
    """Compute the rotary frequencies f_i = theta^(-2i / rope_dim), with YaRN if scaling is given.

    c(b) = rope_dim ln(L0 / (2 pi b)) / (2 ln theta); lo = max(floor c(beta_fast), 0);
    hi = min(ceil c(beta_slow), rope_dim - 1); ramp_i = clamp((i - lo) / max(hi - lo, 1e-3), 0, 1);
    f_i <- f_i / factor ramp_i + f_i (1 - ramp_i).

    Args:
        rope_dim: rotated channels.
        theta: base.
        scaling: YaRN parameters, or None for plain frequencies.

    Returns:
        float32 [rope_dim / 2].

    Source: spec/model.md section 2.
    """
    pairs = np.arange(rope_dim // 2, dtype=np.float32)
    exponents = 2 * pairs / np.float32(rope_dim)
    frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    if scaling is None:
        return frequencies

    def correction(rotations: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * rotations)
        return rope_dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), rope_dim - 1)
    ramp = np.clip((pairs - low) / np.float32(max(high - low, 1e-3)), 0, 1).astype(np.float32)
    scaled = frequencies / np.float32(scaling.factor)
    return (scaled * ramp + frequencies * (1 - ramp)).astype(np.float32)


def rotation(config: ModelConfig, positions: Array, is_compressed: bool) -> Rotation:
    """Compute the rotation at absolute positions for one kind of layer.

    Args:
        config: the architecture.
        positions: int32 [...].
        is_compressed: whether the layer reads compressed KV (theta and YaRN differ).

    Returns:
        The rotation, float32.

    Source: spec/model.md section 2, RoPE.
    """
    theta = config.compress_rope_theta if is_compressed else config.rope_theta
    scaling = config.rope_scaling if is_compressed else None
    frequencies = jnp.asarray(rope_frequencies(config.qk_rope_head_dim, theta, scaling))
    frequencies = frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Array, table: Rotation, is_inverse: bool = False) -> Array:
    """Rotate the last rope_dim channels, taken as adjacent pairs, and leave the others.

    Args:
        x: [..., channels].
        table: rotation whose leading axes match x's, without the channel axis.
        is_inverse: rotate by the conjugate.

    Returns:
        [..., channels] in x's dtype, rounded once.

    Source: spec/model.md section 2, RoPE.
    """
    rope_dim = 2 * table.cos.shape[-1]
    plain, rotary = x[..., :-rope_dim], x[..., -rope_dim:].astype(jnp.float32)
    pairs = rotary.reshape(*rotary.shape[:-1], rope_dim // 2, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    sin = -table.sin if is_inverse else table.sin
    rotated = jnp.stack([real * table.cos - imaginary * sin, real * sin + imaginary * table.cos], axis=-1)
    return jnp.concatenate([plain, round_to(rotated.reshape(rotary.shape), x.dtype)], axis=-1)


def rotate_heads(x: Array, table: Rotation, is_inverse: bool = False) -> Array:
    """Rotate [..., heads, channels] by one rotation for all heads."""
    return rotate(x, Rotation(table.cos[..., None, :], table.sin[..., None, :]), is_inverse)
