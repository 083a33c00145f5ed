"""Counter-based randomness: every draw is a function of (seed, position, purpose, index), nothing else.

Separate so that nothing else can make a random number: a draw never depends on the slot, the batch,
the step or the device count. The counter goes straight into one Threefry block instead of through
`jax.random`, whose way from key to noise depends on configuration and release; unrolled here, it also
runs 8 times as fast on the CPU as JAX's loop.
Read next: `sample.py`, which consumes the draws; `../testing/samplers.py` has the same in plain Python.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ..arrays import Array

SAMPLE_TOKEN, DRAFT_TOKEN, ACCEPT_DRAFT, LAST_TOKEN = range(4)
"""Purposes of draws: which token plain decoding takes, which one an independent draft proposes, whether
that is accepted, and which token follows the last accepted one."""

POSITION_BITS = 24
"""Bits of the counter's first word that hold the position; the purpose has the other eight."""

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
"""Constants of Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""

LARGEST_UNIFORM = 1 - 2.0**-24
"""The float32 below 1: a draw that rounds to 1 would have infinite noise."""


def gumbel(seeds: Array, positions: Array, purpose: int, size: int) -> Array:
    """Draw standard Gumbel noise for each row.

    64 random bits make w in (0, 1), float32 of full relative precision near 0 (down to 2^-65), and the
    noise is -log(-log(1 - w)): the large values, which decide, have a tail as long as it should be.

    Args:
        seeds: uint32 [R, 2], words of each row's seed.
        positions: int32 [R], absolute position the draw is for, below 2^24.
        purpose: constant below 256 that separates draws at one position.
        size: draws of a row.

    Returns:
        float32 [R, size]; draw i is Threefry-2x32 of key `seeds` at counter (purpose | position, i).
    """
    return -jnp.log(-jnp.log1p(-_fractions(seeds, positions, purpose, size)))


def uniform(seeds: Array, positions: Array, purpose: int) -> Array:
    """Draw one number in (0, 1) for each row.

    Args:
        seeds: uint32 [R, 2], words of each row's seed.
        positions: int32 [R], absolute position the draw is for, below 2^24.
        purpose: as in `gumbel`.

    Returns:
        float32 [R].
    """
    return _fractions(seeds, positions, purpose, 1)[:, 0]


def _fractions(seeds: Array, positions: Array, purpose: int, size: int) -> Array:
    """Turn the bits of each counter into a number in (0, 1): float32 [R, size]."""
    shape = (seeds.shape[0], size)
    first = positions.astype(jnp.uint32) | jnp.uint32(purpose << POSITION_BITS)
    index = lax.broadcasted_iota(jnp.uint32, shape, 1)
    high, low = _threefry((seeds[:, :1], seeds[:, 1:]), (first[:, None], index))
    fraction = (low.astype(jnp.float32) + 0.5) * 2.0**-32
    return jnp.minimum((high.astype(jnp.float32) + fraction) * 2.0**-32, LARGEST_UNIFORM)


def _threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Hash a counter under a key with 20 rounds; all uint32, of shapes that broadcast."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    left, right = counter[0] + keys[0], counter[1] + keys[1]
    for number in range(20):
        distance = ROTATIONS[number % 8]
        left = left + right
        right = (right << distance | right >> (32 - distance)) ^ left
        if number % 4 == 3:
            turn = number // 4 + 1
            left, right = left + keys[turn % 3], right + keys[(turn + 1) % 3] + jnp.uint32(turn)
    return left, right
