"""Laws of tokens: what is left of one after a rejection, and a draw.

Separate from `verify.py` because block verification needs the same.
Read next: `verify.py`, which compares laws.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..arrays import Array

SMALLEST_RESIDUAL = 1e-8
"""Mass below which two laws are the same in float32, and what is left is rounding."""


def residual_law(target_law: Array, draft_law: Array, scale: Array) -> Array:
    """Give what is left of a target's law where the draft's has had its share.

        max(s p - q, 0) / Z

    Args:
        target_law: p, float32 [B, V].
        draft_law: q, float32 [B, V].
        scale: s, float32 [B].

    Returns:
        float32 [B, V]; the target's law itself where nothing is left but rounding.

    Source: spec/dspark.md sections 4.1 and 4.2.
    """
    rest = jnp.maximum(scale[:, None] * target_law - draft_law, 0.0)
    mass = rest.sum(axis=-1, keepdims=True)
    is_left = mass >= SMALLEST_RESIDUAL
    return jnp.where(is_left, rest / jnp.where(is_left, mass, 1.0), target_law)


def draw(law: Array, uniforms: Array) -> Array:
    """Draw from laws: the first token whose cumulative probability is above a uniform number.

    Args:
        law: float32 [B, V], sums 1 up to rounding.
        uniforms: float32 [B], in [0, 1).

    Returns:
        int32 [B]; never a token of probability 0, however sums are rounded, unless all are.

    Source: spec/dspark.md section 4.1.
    """
    is_possible = law > 0
    is_reached = is_possible & (jnp.cumsum(law, axis=-1) > uniforms[:, None])
    index = jnp.arange(law.shape[1], dtype=jnp.int32)[None, :]
    last = jnp.where(is_possible, index, 0).max(axis=-1)
    first = jnp.argmax(is_reached, axis=-1).astype(jnp.int32)
    return jnp.where(is_reached.any(axis=-1), first, last)
