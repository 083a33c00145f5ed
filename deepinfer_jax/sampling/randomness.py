"""Counter-based randomness: every draw is a function of (seed, position, purpose).

Separate so that nothing else can make a random number: a draw never depends on the slot, the batch,
the step or the device count.
Read next: `logits.py`, which consumes the draws.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Array

SAMPLE_TOKEN = 0
"""Purpose of the draw that chooses a token."""


def seed_words(seed: int) -> np.ndarray:
    """Split a 64-bit seed into two words, exact without 64-bit arrays: uint32 [2], high first."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def gumbel(seeds: Array, positions: Array, purpose: int, size: int) -> Array:
    """Draw standard Gumbel noise for each row.

    Args:
        seeds: uint32 [R, 2], words of each row's seed.
        positions: int32 [R], absolute position the draw is for.
        purpose: constant that separates draws at one position.
        size: draws of a row.

    Returns:
        float32 [R, size].
    """

    def draw(words: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), purpose)
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(draw)(seeds, positions)
