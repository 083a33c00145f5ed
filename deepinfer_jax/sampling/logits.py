"""Temperature and top-p, then one token per row.

Separate because each rule is a small function of logits that can be tested alone.
Read next: `randomness.py` (where the noise comes from), `../step.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..arrays import MASKED_SCORE, Array


def scale_by_temperature(logits: Array, temperature: Array) -> Array:
    """Divide logits [R, V] by each row's temperature [R]; rows at 0 stay as they are."""
    divisor = jnp.where(temperature > 0, temperature, 1.0)
    return logits / divisor[:, None]


def keep_top_p(logits: Array, top_p: Array) -> Array:
    """Mask the tokens outside the smallest set that holds `top_p` of the probability.

    Tokens are taken by descending probability, ties by lower id; a token is kept if those before it
    hold less than top_p. The most probable token is always kept.

    Args:
        logits: float32 [R, V].
        top_p: float32 [R].

    Returns:
        float32 [R, V], MASKED_SCORE where dropped.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probabilities = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    is_kept_sorted = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    is_kept_sorted = is_kept_sorted.at[:, 0].set(True)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    is_kept = jnp.zeros(logits.shape, bool).at[rows, order].set(is_kept_sorted)
    return jnp.where(is_kept, logits, MASKED_SCORE)


def sample_tokens(logits: Array, temperature: Array, top_p: Array, noise: Array) -> Array:
    """Choose a token per row: the best at temperature 0, else the best of scaled logits + noise.

    Adding Gumbel noise and taking the maximum samples the softmax exactly.

    Args:
        logits: float32 [R, V].
        temperature: float32 [R].
        top_p: float32 [R].
        noise: float32 [R, V], standard Gumbel.

    Returns:
        int32 [R]; ties go to the lower id.
    """
    kept = keep_top_p(scale_by_temperature(logits, temperature), top_p)
    sampled = jnp.argmax(kept + noise, axis=-1)
    greedy = jnp.argmax(logits, axis=-1)
    return jnp.where(temperature > 0, sampled, greedy).astype(jnp.int32)
