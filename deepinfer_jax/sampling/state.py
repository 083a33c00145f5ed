"""What sampling keeps of each slot: its request's parameters and the tokens seen so far.

Separate from `sample.py` because a step changes this state at other moments than it samples: when
requests are admitted, while prompts are read, after tokens are accepted.
Read next: `sample.py`, which reads it; `../sampling_params.py`, where the parameters come from.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from ..arrays import Array
from ..slot_parameters import SlotParameters, slot_parameters

RUNNING, STOPPED, LENGTH = 0, 1, 2
"""Finish reasons on the device: none yet, a stop token, max_tokens."""


class SamplerState(struct.PyTreeNode):
    """Sampling state of B slots.

    Attributes:
        seeds ... max_tokens: parameters of the slot's request, as in `SlotParameters`.
        prompt_lengths: int32 [B]; a row from this position on is a token that was generated before.
        num_generated: int32 [B], tokens of the output so far.
        counts: int32 [B, V], how often each token was generated.
        in_prompt: bool [B, V], whether the prompt holds a token.
    """

    seeds: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    bias_ids: Array
    bias_values: Array
    stop_ids: Array
    min_tokens: Array
    max_tokens: Array
    prompt_lengths: Array
    num_generated: Array
    counts: Array
    in_prompt: Array


def empty_sampler(num_slots: int, vocab_size: int) -> SamplerState:
    """Make the state of slots without requests: greedy, no control, nothing seen."""
    parameters = slot_parameters([None] * num_slots, eos_token_id=0)
    return SamplerState(
        **{name: jnp.asarray(array) for name, array in parameters._asdict().items()},
        prompt_lengths=jnp.zeros(num_slots, jnp.int32),
        num_generated=jnp.zeros(num_slots, jnp.int32),
        counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
        in_prompt=jnp.zeros((num_slots, vocab_size), bool),
    )


def admit_parameters(
    sampler: SamplerState,
    is_admitted: Array,
    new: SlotParameters,
    prompt_lengths: Array,
    num_generated: Array,
) -> SamplerState:
    """Give slots to requests: their parameters, and no token seen yet.

    Args:
        sampler: state of B slots.
        is_admitted: bool [B]; other slots do not change.
        new: arrays of B slots, read where admitted.
        prompt_lengths: int32 [B], tokens of the prompt.
        num_generated: int32 [B], tokens of the output that will not come as rows.

    Returns:
        The state.
    """

    def choose(name: str, replacement: Array) -> Array:
        old = getattr(sampler, name)
        is_new = is_admitted.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(is_new, jnp.asarray(replacement, old.dtype), old)

    unseen = {name: jnp.zeros_like(getattr(sampler, name)) for name in ("counts", "in_prompt")}
    arrays = {**new._asdict(), **unseen, "prompt_lengths": prompt_lengths, "num_generated": num_generated}
    return sampler.replace(**{name: choose(name, array) for name, array in arrays.items()})


def record_rows(
    sampler: SamplerState, slots: Array, positions: Array, token_ids: Array, is_valid: Array
) -> SamplerState:
    """Note the tokens of a step's rows: of the prompt, or of an output that is computed again.

    Args:
        sampler: state of B slots.
        slots: int32 [R], slot of each row.
        positions: int32 [R].
        token_ids: int32 [R].
        is_valid: bool [R]; other rows are not noted.

    Returns:
        The state.
    """
    sampler = note_tokens(sampler, slots, positions, token_ids, is_valid)
    is_output = is_valid & (positions >= sampler.prompt_lengths[slots])
    return sampler.replace(num_generated=sampler.num_generated.at[slots].add(is_output.astype(jnp.int32)))


def note_tokens(
    sampler: SamplerState, slots: Array, positions: Array, token_ids: Array, is_valid: Array
) -> SamplerState:
    """Note tokens for the penalties alone, as `record_rows` does; their number is known already."""
    num_slots, vocab_size = sampler.counts.shape
    is_prompt = positions < sampler.prompt_lengths[jnp.minimum(slots, num_slots - 1)]
    prompt_ids = jnp.where(is_valid & is_prompt, token_ids, vocab_size)
    output_ids = jnp.where(is_valid & ~is_prompt, token_ids, vocab_size)
    return sampler.replace(
        in_prompt=sampler.in_prompt.at[slots, prompt_ids].set(True, mode="drop"),
        counts=sampler.counts.at[slots, output_ids].add(1, mode="drop"),
    )


def record_token(sampler: SamplerState, tokens: Array, is_sampled: Array) -> SamplerState:
    """Count one generated token a slot; the next call of `sample` sees it.

    Args:
        sampler: state of B slots.
        tokens: int32 [B].
        is_sampled: bool [B]; other slots do not change.

    Returns:
        The state.
    """
    return record_tokens(sampler, tokens[:, None], is_sampled[:, None])


def record_tokens(sampler: SamplerState, tokens: Array, is_new: Array) -> SamplerState:
    """Count several generated tokens a slot.

    Args:
        sampler: state of B slots.
        tokens: int32 [B, T].
        is_new: bool [B, T]; the others do not count.

    Returns:
        The state.
    """
    num_slots, vocab_size = sampler.counts.shape
    columns = jnp.where(is_new, tokens, vocab_size)
    slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    return sampler.replace(
        num_generated=sampler.num_generated + is_new.sum(axis=1, dtype=jnp.int32),
        counts=sampler.counts.at[slots, columns].add(1, mode="drop"),
    )


def finish_reasons(sampler: SamplerState, tokens: Array, is_sampled: Array) -> Array:
    """Tell which slots end with the tokens that have just been counted, the last of each.

    A stop token ends the output whenever it comes: before min_tokens it is masked and cannot come. A
    stop token that is also the last of max_tokens counts as a stop.

    Args:
        sampler: state of B slots, `tokens` recorded.
        tokens: int32 [B].
        is_sampled: bool [B].

    Returns:
        int32 [B]: RUNNING (also where nothing was sampled), STOPPED or LENGTH.
    """
    is_stop = (tokens[:, None] == sampler.stop_ids).any(axis=-1)
    is_last = sampler.num_generated >= sampler.max_tokens
    reasons = jnp.where(is_stop, STOPPED, jnp.where(is_last, LENGTH, RUNNING))
    return jnp.where(is_sampled, reasons, RUNNING).astype(jnp.int32)
