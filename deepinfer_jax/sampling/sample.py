"""One token per slot, its log-probability and those of the best: the order of all controls.

    0. log-probabilities: log-softmax of the model's own float32 logits, before any control
    1. repetition, frequency and presence penalty            penalties.penalize
    2. logit_bias, bad tokens                                penalties.add_bias
    3. stop tokens before min_tokens, forbidden ids          penalties.mask_stops
    4. temperature below 1e-5: the best token, and no more
    5. temperature                                           logits.scale_by_temperature
    6. top_k                                                 logits.keep_top_k
    7. top_p of what top_k kept                              logits.keep_top_p
    8. min_p                                                 logits.keep_min_p
    9. the best of score + Gumbel noise of (seed, position)  randomness.gumbel

Equals go to the lower id everywhere. Separate so that the order is written once.
Read next: the modules named above; `../testing/samplers.py` is the same with plain loops.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ..arithmetic import map_tiles
from ..arrays import MASKED_SCORE, Array
from .logits import is_greedy, keep_min_p, keep_top_k, keep_top_p, scale_by_temperature
from .penalties import add_bias, mask_stops, penalize
from .randomness import SAMPLE_TOKEN, gumbel
from .state import SamplerState

SAMPLING_TILE = 8
"""Rows that are sampled together where results must not depend on the number of rows."""


class Sampled(struct.PyTreeNode):
    """What was chosen in B slots.

    Attributes:
        tokens: int32 [B]; 0 where invalid.
        is_invalid: bool [B]: a NaN or +infinity among the logits, or no token allowed.
        logprob: float32 [B], of the chosen token; MASKED_SCORE where invalid.
        top_ids: int32 [B, N], most probable tokens, best first.
        top_logprobs: float32 [B, N]; MASKED_SCORE where invalid.
    """

    tokens: Array
    is_invalid: Array
    logprob: Array
    top_ids: Array
    top_logprobs: Array


def sample(
    logits: Array,
    sampler: SamplerState,
    positions: Array,
    is_forbidden: Array,
    *,
    num_logprobs: int,
    batch_invariant: bool,
) -> Sampled:
    """Choose a token for every slot.

    Args:
        logits: float32 [B, V] of the model; minus infinity is a token it never gives.
        sampler: state of the B slots.
        positions: int32 [B], position the token will have; with the seed it determines the draw.
        is_forbidden: bool [V], ids no request may generate (images, placeholders).
        num_logprobs: N, static.
        batch_invariant: whether a slot's result must be bitwise the same for every B, place and
            neighbour; then slots are sampled in tiles of `SAMPLING_TILE`, one after the other.

    Returns:
        The choice of each slot.

    Source: spec/serving.md sections 6 and 8.
    """
    rows = (logits, sampler, positions)
    choose = partial(_sample_tile, is_forbidden=is_forbidden, num_logprobs=num_logprobs)
    if not batch_invariant:
        return choose(rows)
    return map_tiles(choose, rows, SAMPLING_TILE)


def control_logits(logits: Array, sampler: SamplerState, is_forbidden: Array) -> Array:
    """Apply steps 1 to 3: penalties, biases and masks.

    Args:
        logits: float32 [B, V], no NaN and no +infinity.
        sampler: state of the B slots.
        is_forbidden: bool [V].

    Returns:
        float32 [B, V], MASKED_SCORE where a token may not be generated.
    """
    has_penalty = (
        (sampler.repetition_penalty != 1) | (sampler.frequency_penalty != 0) | (sampler.presence_penalty != 0)
    )
    has_list = (sampler.bias_ids >= 0).any(axis=-1) | (sampler.num_generated < sampler.min_tokens)

    def controlled(logits: Array) -> Array:
        penalized = penalize(logits, sampler)
        return mask_stops(add_bias(penalized, sampler.bias_ids, sampler.bias_values), sampler)

    # Rows without any control come through `controlled` bitwise as they are.
    adjusted = lax.cond((has_penalty | has_list).any(), controlled, lambda logits: logits, logits)
    return jnp.where(is_forbidden[None, :], MASKED_SCORE, adjusted)


def keep_filtered(scores: Array, sampler: SamplerState) -> Array:
    """Apply steps 6 to 8: top_k, top_p, min_p; rows without them, and greedy rows, keep all.

    Args:
        scores: float32 [B, V], scaled by temperature.
        sampler: state of the B slots.

    Returns:
        bool [B, V].
    """
    is_drawn = ~is_greedy(sampler.temperature)
    everything = jnp.ones(scores.shape, bool)
    is_kept = lax.cond(
        (is_drawn & (sampler.top_k > 0)).any(),
        lambda: keep_top_k(scores, sampler.top_k),
        lambda: everything,
    )
    is_kept = lax.cond(
        (is_drawn & (sampler.top_p < 1)).any(),
        lambda: keep_top_p(scores, is_kept, sampler.top_p),
        lambda: is_kept,
    )
    return (is_kept & keep_min_p(scores, sampler.min_p)) | ~is_drawn[:, None]


def _sample_tile(
    rows: tuple[Array, SamplerState, Array], *, is_forbidden: Array, num_logprobs: int
) -> Sampled:
    logits, sampler, positions = rows
    has_nonsense = (jnp.isnan(logits) | (logits == jnp.inf)).any(axis=-1)
    # One kind of zero, so that -0, 0 and what XLA may flush are equals everywhere; no NaN goes further.
    is_zero = jnp.abs(logits) < jnp.finfo(jnp.float32).tiny
    logits = jnp.where(has_nonsense[:, None] | is_zero, 0.0, logits)
    adjusted = control_logits(logits, sampler, is_forbidden)
    is_invalid = has_nonsense | (adjusted.max(axis=-1) == MASKED_SCORE)
    chosen = jnp.where(is_invalid, 0, _choose(adjusted, sampler, positions))

    # A row of minus infinity has no distribution; it is invalid, and its NaN is not selected.
    logprobs = partial(_logprobs_at, jax.nn.logsumexp(logits, axis=-1, keepdims=True), is_invalid[:, None])
    top_logits, top_ids = lax.top_k(logits, num_logprobs)
    chosen_logits = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
    return Sampled(chosen, is_invalid, logprobs(chosen_logits)[:, 0], top_ids, logprobs(top_logits))


def _choose(adjusted: Array, sampler: SamplerState, positions: Array) -> Array:
    greedy = is_greedy(sampler.temperature)[:, None]
    scores = scale_by_temperature(adjusted, sampler.temperature)
    noise = lax.cond(
        ~greedy.all(),
        lambda: gumbel(sampler.seeds, positions, SAMPLE_TOKEN, adjusted.shape[1]),
        lambda: jnp.zeros_like(adjusted),
    )
    # Greedy compares the logits themselves: their distances to the best may round to equals. The sum
    # stands outside the branches, so that it is rounded the same way whatever the neighbours need.
    values = jnp.where(greedy, adjusted, scores + noise)
    kept_values = jnp.where(keep_filtered(scores, sampler), values, MASKED_SCORE)
    return jnp.argmax(kept_values, axis=-1).astype(jnp.int32)


def _logprobs_at(normalizer: Array, is_invalid: Array, logits: Array) -> Array:
    return jnp.where(is_invalid, MASKED_SCORE, logits - normalizer)
