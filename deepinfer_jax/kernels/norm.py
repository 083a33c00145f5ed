"""RMS normalisation.

Separate because every part of the model uses it with one epsilon and one rounding, and so do
operations that fuse it.
Read next: `pallas/hyper_connection/ref.py`, which uses the same statistic over all residual streams.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ..arithmetic import round_to
from ..arrays import Array


def inverse_rms(x: Array, eps: float) -> Array:
    """Give rsqrt(mean(x^2) + eps) over the last axis, kept as a size-1 axis, in float32.

    An eps of 1e-20 is a normal float32, so an all-zero vector gives 1e10 and not infinity.
    """
    squares = jnp.square(x.astype(jnp.float32))
    return lax.rsqrt(jnp.mean(squares, axis=-1, keepdims=True) + jnp.float32(eps))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalise by the root mean square: x rsqrt(mean(x^2) + eps) w, rounded once.

    Args:
        x: [..., channels].
        weight: [channels].
        eps: added to the mean square.

    Returns:
        [..., channels] in x's dtype.

    Source: spec/model.md section 2.
    """
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return round_to(x.astype(jnp.float32) * inverse_rms(x, eps) * weight, x.dtype)
