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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ..arithmetic import fenced, map_tiles, map_used_tiles
from ..arrays import MASKED_SCORE, Array
from .logits import is_greedy, keep_min_p, keep_top_k, keep_top_p, scale_by_temperature
from .penalties import add_bias, mask_stops, penalize
from .randomness import SAMPLE_TOKEN, gumbel
from .state import SamplerState, record_tokens


class Sampled(struct.PyTreeNode):
    """What was chosen in B slots.

    Attributes:
        tokens: int32 [B]; 0 where invalid.
        is_invalid: bool [B]: a NaN or +infinity among the logits, or no token allowed.
        logprob: float32 [B], of the chosen token; MASKED_SCORE where invalid.
        top_ids: int32 [B, N], most probable tokens, best first.
        top_logprobs: float32 [B, N]; MASKED_SCORE where invalid.
        law: float32 [B, V], the distribution that the token was drawn from, if it was asked for.
    """

    tokens: Array
    is_invalid: Array
    logprob: Array
    top_ids: Array
    top_logprobs: Array
    law: Array | None = None


class RowPlaces(NamedTuple):
    """Which slot R rows belong to and what the slot has got since its state was noted.

    Attributes:
        slots: int32 [R].
        new_ids: int32 [R, J], tokens that the slot generated in between, NOTHING behind them.
        positions: int32 [R], position that the row's token will have.
        is_used: bool [R].
    """

    slots: Array
    new_ids: Array
    positions: Array
    is_used: Array


def sample(
    logits: Array,
    sampler: SamplerState,
    positions: Array,
    is_forbidden: Array,
    *,
    num_logprobs: int,
    tile: int | None,
) -> Sampled:
    """Choose a token for every slot.

    Args:
        logits: float32 [B, V] of the model; minus infinity is a token it never gives.
        sampler: state of the B slots.
        positions: int32 [B], position the token will have; with the seed it determines the draw.
        is_forbidden: bool [V], ids no request may generate (images, placeholders).
        num_logprobs: N, static.
        tile: slots that are sampled together, static, one tile after the other, so that a slot's result is
            bitwise the same for every B, place and neighbour; None for all at once.

    Returns:
        The choice of each slot.

    Source: spec/serving.md sections 6 and 8.
    """
    rows = (logits, sampler, positions)
    choose = partial(_sample_tile, is_forbidden=is_forbidden, num_logprobs=num_logprobs)
    return choose(rows) if tile is None else map_tiles(choose, rows, tile)


def sample_rows(
    logits: Array,
    places: RowPlaces,
    sampler: SamplerState,
    is_forbidden: Array,
    *,
    num_logprobs: int,
    tile: int | None,
    purpose: int = SAMPLE_TOKEN,
    wants_law: bool = False,
) -> Sampled:
    """Choose a token for every row, also for several of one slot, as `sample` would one after the other.

    Args:
        logits: float32 [R, V] of the model.
        places: whose the rows are.
        sampler: state of the B slots before the first of these rows.
        is_forbidden: bool [V], ids no request may generate.
        num_logprobs: N, static.
        tile: as in `sample`; tiles without used rows are skipped.
        purpose: of the draws, static.
        wants_law: whether to give the distributions too, static.

    Returns:
        The choice of each row; anything where it is not used.

    Source: spec/dspark.md sections 4.1 and 4.3.
    """

    def choose(rows: tuple[Array, RowPlaces]) -> Sampled:
        logits, places = rows
        # Fenced, so that the rest is compiled as it is in `sample`.
        own = fenced(_sampler_of_rows(sampler, places))
        return _sample_tile(
            (logits, own, places.positions),
            is_forbidden=is_forbidden,
            num_logprobs=num_logprobs,
            purpose=purpose,
            wants_law=wants_law,
        )

    if tile is None:
        return choose((logits, places))
    return map_used_tiles(choose, (logits, places), places.is_used, tile)


def _sampler_of_rows(sampler: SamplerState, places: RowPlaces) -> SamplerState:
    """Give each row its slot's state, its new tokens counted."""
    own = jax.tree.map(lambda array: array[places.slots], sampler)
    return record_tokens(own, places.new_ids, places.new_ids >= 0)


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


def processed_law(adjusted: Array, sampler: SamplerState) -> Array:
    """Give the law that `sample` draws from, after temperature and filters.

    Args:
        adjusted: float32 [B, V], logits after penalties, biases and masks (`control_logits`).
        sampler: state of the B slots.

    Returns:
        float32 [B, V]; the best token alone where a row is greedy, zeros where no token is allowed.

    Source: spec/dspark.md section 4.1.
    """
    scores = scale_by_temperature(adjusted, sampler.temperature)
    drawn = jax.nn.softmax(jnp.where(keep_filtered(scores, sampler), scores, MASKED_SCORE), axis=-1)
    best = jax.nn.one_hot(jnp.argmax(adjusted, axis=-1), adjusted.shape[1], dtype=jnp.float32)
    law = jnp.where(is_greedy(sampler.temperature)[:, None], best, drawn)
    return jnp.where(adjusted.max(axis=-1, keepdims=True) == MASKED_SCORE, 0.0, law)


def _sample_tile(
    rows: tuple[Array, SamplerState, Array],
    *,
    is_forbidden: Array,
    num_logprobs: int,
    purpose: int = SAMPLE_TOKEN,
    wants_law: bool = False,
) -> Sampled:
    logits, sampler, positions = rows
    has_nonsense = (jnp.isnan(logits) | (logits == jnp.inf)).any(axis=-1)
    # One kind of zero, so that -0, 0 and what XLA may flush are equals everywhere; no NaN goes further.
    is_zero = jnp.abs(logits) < jnp.finfo(jnp.float32).tiny
    logits = jnp.where(has_nonsense[:, None] | is_zero, 0.0, logits)
    adjusted = control_logits(logits, sampler, is_forbidden)
    is_invalid = has_nonsense | (adjusted.max(axis=-1) == MASKED_SCORE)
    chosen = jnp.where(is_invalid, 0, _choose(adjusted, sampler, positions, purpose))
    law = processed_law(adjusted, sampler) if wants_law else None

    # A row of minus infinity has no distribution; it is invalid, and its NaN is not selected.
    logprobs = partial(_logprobs_at, jax.nn.logsumexp(logits, axis=-1, keepdims=True), is_invalid[:, None])
    top_logits, top_ids = lax.top_k(logits, num_logprobs)
    chosen_logits = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
    return Sampled(chosen, is_invalid, logprobs(chosen_logits)[:, 0], top_ids, logprobs(top_logits), law)


def _choose(adjusted: Array, sampler: SamplerState, positions: Array, purpose: int) -> Array:
    greedy = is_greedy(sampler.temperature)[:, None]
    scores = scale_by_temperature(adjusted, sampler.temperature)
    noise = lax.cond(
        ~greedy.all(),
        lambda: gumbel(sampler.seeds, positions, purpose, adjusted.shape[1]),
        lambda: jnp.zeros_like(adjusted),
    )
    # Greedy compares the logits themselves: their distances to the best may round to equals. The sum
    # stands outside the branches, so that it is rounded the same way whatever the neighbours need.
    values = jnp.where(greedy, adjusted, scores + noise)
    kept_values = jnp.where(keep_filtered(scores, sampler), values, MASKED_SCORE)
    return jnp.argmax(kept_values, axis=-1).astype(jnp.int32)


def _logprobs_at(normalizer: Array, is_invalid: Array, logits: Array) -> Array:
    return jnp.where(is_invalid, MASKED_SCORE, logits - normalizer)
