"""Log-probabilities; temperature, top-k, top-p and min-p: which tokens may be drawn, as masks of logits.

Separate because each rule is a small function of scores that can be tested alone. Nothing is sorted: a
kept set is everything above a threshold plus the lowest ids on it, and 31 halvings of a float's bits
find the threshold exactly, 20 to 30 times faster than a sort on the CPU.
Read next: `sample.py`, which says the order.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ..arrays import Array
from ..sampling_params import GREEDY_BELOW

KEY_BITS = 31
LARGEST_KEY = 0x7F800000
"""Key of minus infinity."""


class Logprobs(struct.PyTreeNode):
    """Log-probabilities after R rows.

    Attributes:
        logprobs: float32 [R], of the given token.
        top_ids: int32 [R, N], most probable tokens, best first.
        top_logprobs: float32 [R, N].
    """

    logprobs: Array
    top_ids: Array
    top_logprobs: Array


def token_logprobs(logits: Array, token_ids: Array, count: int) -> Logprobs:
    """Give the log-probabilities of given tokens and of the best, as the model has them.

    Args:
        logits: float32 [R, V].
        token_ids: int32 [R].
        count: N, static.

    Returns:
        The log-probabilities.
    """
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_logits, top_ids = lax.top_k(logits, count)
    own = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    return Logprobs((own - normalizer)[:, 0], top_ids, top_logits - normalizer)


def is_greedy(temperature: Array) -> Array:
    """Tell the rows that take the best token: bool [B]."""
    return temperature < GREEDY_BELOW


def scale_by_temperature(logits: Array, temperature: Array) -> Array:
    """Divide the distance from each row's best logit by its temperature.

    The best becomes 0, so that a tiny temperature overflows nothing; softmax does not see the shift.

    Args:
        logits: float32 [B, V], finite or minus infinity.
        temperature: float32 [B]; greedy rows are divided by 1.

    Returns:
        float32 [B, V], at most 0.
    """
    best = logits.max(axis=-1, keepdims=True)
    distance = logits - jnp.where(jnp.isfinite(best), best, 0.0)
    return distance * (1 / jnp.where(is_greedy(temperature), 1.0, temperature))[:, None]


def keep_top_k(scores: Array, top_k: Array) -> Array:
    """Keep exactly the `top_k` best tokens, equals by lower id.

    Args:
        scores: float32 [B, V], at most 0.
        top_k: int32 [B]; 0 keeps all.

    Returns:
        bool [B, V].
    """
    keys = _descending_keys(scores)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, scores.shape[1]), scores.shape[1])
    threshold = _smallest_key(lambda key: _count(keys <= key[:, None]) >= wanted, scores.shape[0])
    is_above, is_equal, rank = _split(keys, threshold)
    room = wanted - _count(is_above)
    return is_above | (is_equal & (rank < room[:, None]))


def keep_top_p(scores: Array, is_kept: Array, top_p: Array) -> Array:
    """Keep the most probable tokens until they hold `top_p` of what was kept so far.

    Tokens are taken by falling probability, equals by lower id; one is kept if those before it hold
    less than top_p. The best is always kept. Sums are float32: a decision within about 1e-6 of top_p
    may fall either way, the same way every time.

    Args:
        scores: float32 [B, V], at most 0, the best kept 0.
        is_kept: bool [B, V], what earlier filters left.
        top_p: float32 [B]; 1 keeps all.

    Returns:
        bool [B, V], a part of `is_kept`.
    """
    keys = _descending_keys(scores)
    weights = jnp.where(is_kept, jnp.exp(scores), 0.0)
    # At least the smallest normal number: a flushed product would drop even the best.
    goal = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny) * weights.sum(axis=-1)

    def mass(is_counted: Array) -> Array:
        return jnp.where(is_counted, weights, 0.0).sum(axis=-1)

    threshold = _smallest_key(lambda key: mass(keys <= key[:, None]) >= goal, scores.shape[0])
    is_above, is_equal, rank = _split(jnp.where(is_kept, keys, LARGEST_KEY), threshold)
    before = mass(keys < threshold[:, None])[:, None] + rank.astype(jnp.float32) * weights
    is_inside = is_above | (is_equal & (before < goal[:, None])) | (top_p >= 1)[:, None]
    return is_kept & is_inside


def keep_min_p(scores: Array, min_p: Array) -> Array:
    """Keep the tokens of at least `min_p` times the best one's probability.

    Args:
        scores: float32 [B, V], the best 0; compared with log(min_p), so nothing is summed.
        min_p: float32 [B]; 0 keeps all, 1 the best and its equals.

    Returns:
        bool [B, V].
    """
    return scores >= jnp.log(min_p)[:, None]


def _descending_keys(scores: Array) -> Array:
    # The bits of a float that is not negative are ordered as it is.
    return lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)


def _smallest_key(holds: Callable[[Array], Array], num_rows: int) -> Array:
    """Find the smallest key of each row at which a condition that stays true holds: int32 [B]."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        is_enough = holds(middle)
        return jnp.where(is_enough, low, middle + 1), jnp.where(is_enough, middle, high)

    start = (jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, LARGEST_KEY, jnp.int32))
    return lax.fori_loop(0, KEY_BITS, halve, start)[1]


def _split(keys: Array, threshold: Array) -> tuple[Array, Array, Array]:
    """Give what is above the threshold, what is on it, and the place of each among its equals."""
    is_equal = keys == threshold[:, None]
    rank = jnp.cumsum(is_equal, axis=-1, dtype=jnp.int32) - 1
    return keys < threshold[:, None], is_equal, rank


def _count(is_counted: Array) -> Array:
    return is_counted.sum(axis=-1, dtype=jnp.int32)
