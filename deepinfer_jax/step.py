"""The device side of generation: state, admission, prefill step, decode step. The page to read first.

Separate because everything jitted and donated is here and nowhere else. All steps are pure:
(weights, state, plan) in, (state, output) out.
Read next: `model/backbone.py` (what a step computes), `engine/driver.py` (who calls it).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from .arrays import Array
from .config import CacheConfig, ModelConfig
from .model.backbone import backbone, encode, head_logits
from .model.cache import Cache, empty_cache
from .model.numerics import Numerics
from .model.rows import Rows, chunk_rows, text_rows
from .model.weights import Weights
from .plans import ROWS_PER_BLOCK, Admission, PrefillPlan
from .sampling.sample import sample
from .sampling.state import (
    RUNNING,
    SamplerState,
    admit_parameters,
    empty_sampler,
    finish_reasons,
    record_prompt,
    record_token,
)


class EngineState(struct.PyTreeNode):
    """State of B slots between steps.

    Attributes:
        cache: what the model keeps of the sequences.
        sampler: sampling parameters and counts.
        lengths: int32 [B], tokens in the cache; the next token's position.
        tokens: int32 [B], the latest sampled token, not yet in the cache.
        is_running: bool [B], whether the slot has a token to continue from.
        is_forbidden: bool [V], tokens that no request may get.
    """

    cache: Cache
    sampler: SamplerState
    lengths: Array
    tokens: Array
    is_running: Array
    is_forbidden: Array


class StepOutput(struct.PyTreeNode):
    """What the host learns of a step, for each of B slots.

    Attributes:
        tokens: int32 [B], the sampled token.
        is_sampled: bool [B], whether the slot sampled one; the other fields count only there.
        finish: int32 [B], RUNNING, STOPPED (the token is a stop token) or LENGTH.
        is_invalid: bool [B], the logits held NaN, or left no token that may be sampled.
        logprobs: float32 [B], the model's log-probability of the token.
        top_ids: int32 [B, N], the model's most probable tokens.
        top_logprobs: float32 [B, N].
    """

    tokens: Array
    is_sampled: Array
    finish: Array
    is_invalid: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array


@partial(jax.jit, static_argnames=("config", "sizes", "numerics"))
def initial_state(
    is_forbidden: Array, *, config: ModelConfig, sizes: CacheConfig, numerics: Numerics
) -> EngineState:
    """Make the state of empty slots.

    Args:
        is_forbidden: bool [V], tokens that no request may get.
        config: the architecture.
        sizes: of the cache.
        numerics: the choice of arithmetic.

    Returns:
        The state.
    """
    num_slots = sizes.num_slots
    return EngineState(
        cache=empty_cache(config, sizes, numerics),
        sampler=empty_sampler(num_slots, config.vocab_size),
        lengths=jnp.zeros(num_slots, jnp.int32),
        tokens=jnp.zeros(num_slots, jnp.int32),
        is_running=jnp.zeros(num_slots, bool),
        is_forbidden=is_forbidden,
    )


@partial(jax.jit, donate_argnames=("state",))
def admit_step(state: EngineState, admission: Admission) -> EngineState:
    """Start new requests in some slots; what those held before is forgotten. Consumes `state`.

    Args:
        state: state of the slots.
        admission: the new requests.

    Returns:
        The state; nothing of the prompts has run yet.
    """
    is_new = jnp.asarray(admission.is_admitted)
    cache = state.cache.replace(
        page_table=jnp.where(is_new[:, None], admission.page_table, state.cache.page_table),
        decoder_starts=jnp.where(is_new, admission.decoder_starts, state.cache.decoder_starts),
    )
    return state.replace(
        cache=cache,
        sampler=admit_parameters(state.sampler, is_new, admission.parameters),
        lengths=jnp.where(is_new, 0, state.lengths),
        is_running=state.is_running & ~is_new,
    )


@partial(jax.jit, static_argnames=("config", "numerics"), donate_argnames=("state",))
def encode_step(
    weights: Weights, state: EngineState, plan: PrefillPlan, *, config: ModelConfig, numerics: Numerics
) -> EngineState:
    """Run the encoder half on prompt rows before `decoder_starts`. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        plan: the rows; no prompt ends in them.
        config: the architecture.
        numerics: the choice of arithmetic.

    Returns:
        The state.
    """
    rows = _prompt_rows(plan)
    cache = encode(weights, config, rows, state.cache, numerics)
    return _extend(state.replace(cache=cache), rows)


@partial(jax.jit, static_argnames=("config", "numerics", "num_logprobs"), donate_argnames=("state",))
def prefill_step(
    weights: Weights,
    state: EngineState,
    plan: PrefillPlan,
    *,
    config: ModelConfig,
    numerics: Numerics,
    num_logprobs: int = 0,
) -> tuple[EngineState, StepOutput]:
    """Run prompt rows and sample where a prompt ends. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        plan: the rows.
        config: the architecture.
        numerics: the choice of arithmetic.
        num_logprobs: most probable tokens to report.

    Returns:
        The state and what was sampled.
    """
    rows = _prompt_rows(plan)
    hidden, _, cache = backbone(weights, config, rows, state.cache, numerics)
    state = _extend(state.replace(cache=cache), rows)
    last_hidden = hidden[jnp.maximum(plan.last_rows, 0)]
    is_sampled = jnp.asarray(plan.last_rows) >= 0
    return _sample(weights, state, last_hidden, is_sampled, numerics, num_logprobs)


@partial(jax.jit, static_argnames=("config", "numerics", "num_logprobs"), donate_argnames=("state",))
def decode_step(
    weights: Weights,
    state: EngineState,
    is_active: Array,
    *,
    config: ModelConfig,
    numerics: Numerics,
    num_logprobs: int = 0,
) -> tuple[EngineState, StepOutput]:
    """Run each active slot's latest token and sample the next. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        is_active: bool [B]; other slots, and those that are not running, do not change.
        config: the architecture.
        numerics: the choice of arithmetic.
        num_logprobs: most probable tokens to report.

    Returns:
        The state and what was sampled.
    """
    is_sampled = is_active & state.is_running
    rows = chunk_rows(state.tokens[:, None], state.lengths, is_sampled.astype(jnp.int32))
    hidden, _, cache = backbone(weights, config, rows, state.cache, numerics)
    state = state.replace(cache=cache, lengths=state.lengths + is_sampled.astype(jnp.int32))
    return _sample(weights, state, hidden, is_sampled, numerics, num_logprobs)


def _prompt_rows(plan: PrefillPlan) -> Rows:
    arrays = (jnp.asarray(plan.token_ids), jnp.asarray(plan.slots), jnp.asarray(plan.positions))
    return text_rows(*arrays, jnp.asarray(plan.is_valid), rows_per_block=ROWS_PER_BLOCK)


def _extend(state: EngineState, rows: Rows) -> EngineState:
    """Count prompt rows that ran."""
    slots = jnp.where(rows.is_valid, rows.slots, state.lengths.shape[0])
    lengths = state.lengths.at[slots].max(rows.positions + 1, mode="drop")
    sampler = record_prompt(state.sampler, rows.slots, rows.token_ids, rows.is_valid)
    return state.replace(lengths=lengths, sampler=sampler)


def _sample(
    weights: Weights,
    state: EngineState,
    hidden: Array,
    is_sampled: Array,
    numerics: Numerics,
    num_logprobs: int,
) -> tuple[EngineState, StepOutput]:
    """Sample a token for each slot from its hidden state [B, D] and record it."""
    sampled = sample(
        *(head_logits(hidden, weights, numerics), state.sampler, state.lengths, state.is_forbidden),
        num_logprobs=num_logprobs,
        batch_invariant=numerics.batch_invariant,
    )
    tokens = jnp.where(is_sampled, sampled.tokens, state.tokens)
    sampler = record_token(state.sampler, tokens, is_sampled)
    finish = finish_reasons(sampler, tokens, is_sampled)
    is_running = jnp.where(is_sampled, (finish == RUNNING) & ~sampled.is_invalid, state.is_running)
    output = StepOutput(
        tokens=tokens,
        is_sampled=is_sampled,
        finish=finish,
        is_invalid=sampled.is_invalid & is_sampled,
        logprobs=sampled.logprob,
        top_ids=sampled.top_ids,
        top_logprobs=sampled.top_logprobs,
    )
    return state.replace(sampler=sampler, tokens=tokens, is_running=is_running), output
