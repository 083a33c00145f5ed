"""The device side of generation: state, prefill step, decode step. The page to read first.

Separate because everything jitted and donated is here and nowhere else. Both steps are pure:
(weights, state, plan) in, (state, tokens) out.
Read next: `model/backbone.py` (what a step computes), `engine/generate.py` (who calls it).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from .arrays import Array
from .config import ModelConfig
from .model.backbone import backbone, head_logits
from .model.cache import Cache, empty_cache
from .model.numerics import Numerics
from .model.rows import chunk_rows
from .model.weights import Weights
from .sampling.logits import sample_tokens
from .sampling.randomness import SAMPLE_TOKEN, gumbel


class EngineState(struct.PyTreeNode):
    """State of B slots between steps.

    Attributes:
        cache: what the model keeps of the sequences.
        lengths: int32 [B], tokens in the cache; the next token's position.
        tokens: int32 [B], the latest sampled token, not yet in the cache.
        seeds: uint32 [B, 2], words of the request's seed.
        temperature: float32 [B].
        top_p: float32 [B].
    """

    cache: Cache
    lengths: Array
    tokens: Array
    seeds: Array
    temperature: Array
    top_p: Array


@partial(jax.jit, static_argnames=("config", "num_slots", "capacity", "numerics"))
def initial_state(
    seeds: Array,
    temperature: Array,
    top_p: Array,
    *,
    config: ModelConfig,
    num_slots: int,
    capacity: int,
    numerics: Numerics,
) -> EngineState:
    """Make the state of fresh slots.

    Args:
        seeds: uint32 [B, 2].
        temperature: float32 [B].
        top_p: float32 [B].
        config: the architecture.
        num_slots: B.
        capacity: tokens per slot.
        numerics: the choice of arithmetic.

    Returns:
        The state.
    """
    return EngineState(
        cache=empty_cache(config, num_slots, capacity, numerics),
        lengths=jnp.zeros(num_slots, jnp.int32),
        tokens=jnp.zeros(num_slots, jnp.int32),
        seeds=seeds,
        temperature=temperature,
        top_p=top_p,
    )


@partial(jax.jit, static_argnames=("config", "numerics"), donate_argnames=("state",))
def prefill_step(
    weights: Weights,
    state: EngineState,
    token_ids: Array,
    num_tokens: Array,
    is_last: Array,
    *,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[EngineState, Array]:
    """Run the next chunk of each slot's prompt and sample where the prompt ends. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        token_ids: int32 [B, Q], next prompt tokens.
        num_tokens: int32 [B], how many of them are valid.
        is_last: bool [B], whether the prompt ends here.
        config: the architecture.
        numerics: the choice of arithmetic.

    Returns:
        The state, int32 [B] sampled tokens (meaningful where `is_last`).
    """
    num_slots, chunk = token_ids.shape
    rows = chunk_rows(token_ids, state.lengths, num_tokens)
    hidden, _, cache = backbone(weights, config, rows, state.cache, numerics)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    last = jnp.maximum(num_tokens - 1, 0)
    last_hidden = hidden.reshape(num_slots, chunk, -1)[slots, last]
    state = state.replace(cache=cache, lengths=state.lengths + num_tokens)
    sampled = _sample(weights, last_hidden, state)
    tokens = jnp.where(is_last, sampled, state.tokens)
    return state.replace(tokens=tokens), tokens


@partial(jax.jit, static_argnames=("config", "numerics"), donate_argnames=("state",))
def decode_step(
    weights: Weights, state: EngineState, is_active: Array, *, config: ModelConfig, numerics: Numerics
) -> tuple[EngineState, Array]:
    """Run each active slot's latest token and sample the next. Consumes `state`.

    Args:
        weights: the loaded weights.
        state: state of the slots.
        is_active: bool [B]; other slots do not change.
        config: the architecture.
        numerics: the choice of arithmetic.

    Returns:
        The state, int32 [B] sampled tokens (meaningful where active).
    """
    rows = chunk_rows(state.tokens[:, None], state.lengths, is_active.astype(jnp.int32))
    hidden, _, cache = backbone(weights, config, rows, state.cache, numerics)
    state = state.replace(cache=cache, lengths=state.lengths + is_active.astype(jnp.int32))
    tokens = jnp.where(is_active, _sample(weights, hidden, state), state.tokens)
    return state.replace(tokens=tokens), tokens


def _sample(weights: Weights, hidden: Array, state: EngineState) -> Array:
    logits = head_logits(hidden, weights)
    noise = gumbel(state.seeds, state.lengths, SAMPLE_TOKEN, logits.shape[-1])
    return sample_tokens(logits, state.temperature, state.top_p, noise)
