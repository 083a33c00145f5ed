"""The device side of generation: state, admission, prefill step, decode step. The page to read first.

Separate because everything jitted and donated is here and nowhere else. All steps are pure:
(weights, state, plan) in, (state, output) out.
Read next: `model/backbone.py` (what a step computes), `engine/runner.py` (who calls it).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .arithmetic import map_tiles
from .arrays import NOTHING, Array
from .config import CacheConfig, ModelConfig
from .model.backbone import backbone, encode, head_logits, own_row_ids
from .model.cache import Cache, empty_cache
from .model.draft_weights import words_of
from .model.numerics import Numerics
from .model.rows import Rows, chunk_rows, text_rows
from .model.weights import Weights
from .plans import ROWS_PER_BLOCK, Admission, PrefillPlan
from .sampling.logits import Logprobs, token_logprobs
from .sampling.sample import sample
from .sampling.state import (
    RUNNING,
    admit_parameters,
    empty_sampler,
    finish_reasons,
    record_rows,
    record_token,
)
from .sharding.exchange import axes_size, bring_chosen
from .sharding.layout import Layout
from .sharding.target import ONE_DEVICE, Target
from .step_state import DraftState, EngineState, StepOutput, prior_survivals, state_words


@partial(jax.jit, static_argnames=("config", "sizes", "numerics", "target"))
def initial_state(
    is_forbidden: Array,
    *,
    config: ModelConfig,
    sizes: CacheConfig,
    numerics: Numerics,
    target: Target = ONE_DEVICE,
) -> EngineState:
    """Make the state of empty slots.

    Args:
        is_forbidden: bool [V], tokens that no request may get.
        config: the architecture.
        sizes: of the cache, over all devices.
        numerics: the choice of arithmetic.
        target: where the state lies.

    Returns:
        The state.
    """

    def make(is_forbidden: Array) -> EngineState:
        shares = axes_size(target.layout.axes_of("slots"))
        num_slots = sizes.num_slots // shares
        own = dataclasses.replace(sizes, num_slots=num_slots, num_pages=sizes.num_pages // shares)
        return EngineState(
            cache=empty_cache(config, own, numerics),
            sampler=empty_sampler(num_slots, config.vocab_size),
            drafts=DraftState(
                survivals=prior_survivals(num_slots, max(config.draft.block_size, 1)),
                choice=jnp.full((), NOTHING, jnp.int32),
                num_skipped=jnp.zeros((), jnp.int32),
            ),
            lengths=jnp.zeros(num_slots, jnp.int32),
            tokens=jnp.zeros(num_slots, jnp.int32),
            is_running=jnp.zeros(num_slots, bool),
            is_forbidden=is_forbidden,
        )

    return target.run(make, is_forbidden, words=((),), out=state_words())


# The old page table is not read, and given back with the rest all the same.
@partial(jax.jit, static_argnames=("target",), donate_argnames=("state",), keep_unused=True)
def admit_step(state: EngineState, admission: Admission, *, target: Target = ONE_DEVICE) -> EngineState:
    """Start requests in some slots, and give all slots their pages. Consumes `state`.

    What an admitted slot held before is forgotten, but for what `restore_step` or `import_step` has just
    put there.

    Args:
        state: state of the slots.
        admission: the requests, and the pages of every slot.
        target: where the state lies.

    Returns:
        The state; no row has run.
    """

    def admit(state: EngineState, admission: Admission) -> EngineState:
        is_new = jnp.asarray(admission.is_admitted)
        cache = _with_pages(state.cache, admission.page_table, target)
        decoder_starts = jnp.where(is_new, admission.decoder_starts, cache.decoder_starts)
        seen = (jnp.asarray(admission.prompt_lengths), jnp.asarray(admission.num_generated))
        survivals = state.drafts.survivals
        survivals = jnp.where(is_new[:, None], prior_survivals(*survivals.shape), survivals)
        return state.replace(
            cache=cache.replace(decoder_starts=decoder_starts),
            sampler=admit_parameters(state.sampler, is_new, admission.parameters, *seen),
            drafts=state.drafts.replace(survivals=survivals),
            lengths=jnp.where(is_new, admission.lengths, state.lengths),
            tokens=jnp.where(is_new, admission.tokens, state.tokens),
            is_running=jnp.where(is_new, admission.is_running, state.is_running),
        )

    return target.run(admit, state, admission, words=(state_words(), ("slots",)), out=state_words())


@partial(jax.jit, static_argnames=("target",), donate_argnames=("state",), keep_unused=True)
def page_step(state: EngineState, page_table: Array, *, target: Target = ONE_DEVICE) -> EngineState:
    """Give all slots their pages. Consumes `state`.

    Args:
        state: state of the slots.
        page_table: int32 [B, pages of a slot], NOTHING where a slot has none.
        target: where the state lies.

    Returns:
        The state.
    """

    def give(state: EngineState, page_table: Array) -> EngineState:
        return state.replace(cache=_with_pages(state.cache, page_table, target))

    return target.run(give, state, page_table, words=(state_words(), ("slots",)), out=state_words())


@partial(jax.jit, static_argnames=("config", "numerics", "target"), donate_argnames=("state",))
def encode_step(
    weights: Weights,
    state: EngineState,
    plan: PrefillPlan,
    *,
    config: ModelConfig,
    numerics: Numerics,
    target: Target = ONE_DEVICE,
) -> EngineState:
    """Run the encoder half on prompt rows before `decoder_starts`. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        plan: the rows; no prompt ends in them.
        config: the architecture.
        numerics: the choice of arithmetic.
        target: where weights and state lie.

    Returns:
        The state.
    """

    def run(weights: Weights, state: EngineState, plan: PrefillPlan) -> EngineState:
        rows = _prompt_rows(plan, state, target)
        cache = encode(weights, config, rows, state.cache, numerics, layout=target.layout)
        return _extend(state.replace(cache=cache), rows)

    words = (words_of(weights, config), state_words(), ("slots",))
    return target.run(run, weights, state, plan, words=words, out=state_words())


_STATIC = ("config", "numerics", "num_logprobs", "target")


@partial(jax.jit, static_argnames=(*_STATIC, "num_prompt_logprobs"), donate_argnames=("state",))
def prefill_step(
    weights: Weights,
    state: EngineState,
    plan: PrefillPlan,
    *,
    config: ModelConfig,
    numerics: Numerics,
    num_logprobs: int = 0,
    num_prompt_logprobs: int | None = None,
    target: Target = ONE_DEVICE,
) -> tuple[EngineState, StepOutput]:
    """Run prompt rows and sample where a prompt ends. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        plan: the rows.
        config: the architecture.
        numerics: the choice of arithmetic.
        num_logprobs: most probable tokens to report.
        num_prompt_logprobs: the same after every row, None for no log-probabilities of the prompt.
        target: where weights and state lie.

    Returns:
        The state and what was sampled.
    """
    layout = target.layout

    def run(weights: Weights, state: EngineState, plan: PrefillPlan) -> tuple[EngineState, StepOutput]:
        rows = _prompt_rows(plan, state, target)
        hidden, _, cache = backbone(weights, config, rows, state.cache, numerics, layout=layout)
        state = _extend(state.replace(cache=cache), rows)
        num_rows = rows.slots.shape[0]
        last_rows = jnp.asarray(plan.last_rows) - target.shard("slots") * num_rows
        row_ids = own_row_ids(num_rows, numerics, layout)

        def rows_of(chosen: Array) -> Array:
            if layout.sequence_axes:
                return bring_chosen(hidden, row_ids, chosen, layout.sequence_axes)
            return hidden[jnp.clip(chosen, 0, num_rows - 1)]

        is_sampled = jnp.asarray(plan.last_rows) >= 0
        state, output = _sample(
            weights, state, rows_of(last_rows), is_sampled, numerics, num_logprobs, layout
        )
        if num_prompt_logprobs is None:
            return state, output
        after = (rows_of(jnp.arange(num_rows, dtype=jnp.int32)), jnp.asarray(plan.next_ids))
        prompt = _prompt_logprobs(weights, *after, numerics, num_prompt_logprobs, layout)
        return state, output.replace(prompt=prompt)

    words = (words_of(weights, config), state_words(), ("slots",))
    return target.run(run, weights, state, plan, words=words, out=(state_words(), ("slots",)))


@partial(jax.jit, static_argnames=_STATIC, donate_argnames=("state",))
def decode_step(
    weights: Weights,
    state: EngineState,
    is_active: Array,
    *,
    config: ModelConfig,
    numerics: Numerics,
    num_logprobs: int = 0,
    target: Target = ONE_DEVICE,
) -> tuple[EngineState, StepOutput]:
    """Run each active slot's latest token and sample the next. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        is_active: bool [B]; other slots, and those that are not running, do not change.
        config: the architecture.
        numerics: the choice of arithmetic.
        num_logprobs: most probable tokens to report.
        target: where weights and state lie.

    Returns:
        The state and what was sampled.
    """
    layout = target.layout.while_decoding

    def run(weights: Weights, state: EngineState, is_active: Array) -> tuple[EngineState, StepOutput]:
        is_sampled = is_active & state.is_running
        rows = chunk_rows(state.tokens[:, None], state.lengths, is_sampled.astype(jnp.int32))
        hidden, _, cache = backbone(weights, config, rows, state.cache, numerics, layout=layout)
        state = state.replace(cache=cache, lengths=state.lengths + is_sampled.astype(jnp.int32))
        return _sample(weights, state, hidden, is_sampled, numerics, num_logprobs, layout)

    words = (words_of(weights, config), state_words(), ("slots",))
    return target.run(run, weights, state, is_active, words=words, out=(state_words(), ("slots",)))


def _with_pages(cache: Cache, page_table: Any, target: Target) -> Cache:
    """Put in a page table, whose numbers count over all devices."""
    num_pages = min(pages.kv.shape[1] for pages in cache.compressed.values())
    pages = jnp.asarray(page_table)
    own = jnp.where(pages >= 0, pages - target.shard("pages") * num_pages, NOTHING)
    return cache.replace(page_table=own)


def _prompt_rows(plan: PrefillPlan, state: EngineState, target: Target) -> Rows:
    """Make rows of a plan; slots count within this device's share."""
    slots = jnp.asarray(plan.slots) - target.shard("slots") * state.lengths.shape[0]
    arrays = (jnp.asarray(plan.token_ids), slots, jnp.asarray(plan.positions))
    return text_rows(*arrays, jnp.asarray(plan.is_valid), rows_per_block=ROWS_PER_BLOCK)


def _extend(state: EngineState, rows: Rows) -> EngineState:
    """Count prompt rows that ran."""
    slots = jnp.where(rows.is_valid, rows.slots, state.lengths.shape[0])
    lengths = state.lengths.at[slots].max(rows.positions + 1, mode="drop")
    sampler = record_rows(state.sampler, rows.slots, rows.positions, rows.token_ids, rows.is_valid)
    return state.replace(lengths=lengths, sampler=sampler)


def _sample(
    weights: Weights,
    state: EngineState,
    hidden: Array,
    is_sampled: Array,
    numerics: Numerics,
    num_logprobs: int,
    layout: Layout,
) -> tuple[EngineState, StepOutput]:
    """Sample a token for each slot from its hidden state [B, D] and record it."""
    logits = head_logits(hidden, weights, numerics, layout.while_decoding)
    sampled = sample(
        *(logits, state.sampler, state.lengths, state.is_forbidden),
        num_logprobs=num_logprobs,
        tile=numerics.sampled_together,
    )
    tokens = jnp.where(is_sampled, sampled.tokens, state.tokens)
    sampler = record_token(state.sampler, tokens, is_sampled)
    finish = finish_reasons(sampler, tokens, is_sampled)
    is_running = jnp.where(is_sampled, (finish == RUNNING) & ~sampled.is_invalid, state.is_running)
    output = StepOutput(
        tokens=tokens[:, None],
        num_tokens=(is_sampled & ~sampled.is_invalid).astype(jnp.int32),
        finish=finish,
        is_invalid=sampled.is_invalid & is_sampled,
        logprobs=sampled.logprob[:, None],
        top_ids=sampled.top_ids[:, None],
        top_logprobs=sampled.top_logprobs[:, None],
    )
    return state.replace(sampler=sampler, tokens=tokens, is_running=is_running), output


def _prompt_logprobs(
    weights: Weights, hidden: Array, next_ids: Array, numerics: Numerics, count: int, layout: Layout
) -> Logprobs:
    """Give the log-probability of the token after each row, in the tiles of the head."""

    def of_tile(tile: tuple[Array, Array]) -> Logprobs:
        logits = head_logits(tile[0], weights, numerics, layout.while_decoding)
        return token_logprobs(logits, jnp.maximum(tile[1], 0), count)

    rows = (hidden, next_ids)
    return map_tiles(of_tile, rows, numerics.row_tile) if numerics.batch_invariant else of_tile(rows)
