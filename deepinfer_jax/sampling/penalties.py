"""What changes logits because of a request's tokens or its list: penalties, biases, bans.

Separate from `logits.py` because these read what a slot has seen, the filters there only scores.
Read next: `logits.py`.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..arrays import MASKED_SCORE, NOTHING, Array
from .state import SamplerState


def penalize(logits: Array, sampler: SamplerState) -> Array:
    """Apply the repetition, then the frequency and presence penalties.

        x <- x / r if x > 0 else x r        for tokens of the prompt or the output
        x <- x - f count - p [count > 0]    count in the output

    Results stay finite, whatever the logits, so that no later difference can be a NaN.

    Args:
        logits: float32 [B, V]; MASKED_SCORE stays.
        sampler: state of the slots.

    Returns:
        float32 [B, V]; bitwise the input where every penalty is off.
    """
    largest = jnp.finfo(jnp.float32).max
    repetition = sampler.repetition_penalty[:, None]
    # A multiplication, because XLA makes one of a division by a broadcast value where it likes.
    factor = jnp.where(logits > 0, 1 / repetition, repetition)
    is_seen = sampler.in_prompt | (sampler.counts > 0)
    repeated = jnp.where(is_seen, logits * factor, logits)
    frequency = sampler.frequency_penalty[:, None] * sampler.counts.astype(jnp.float32)
    presence = jnp.where(sampler.counts > 0, sampler.presence_penalty[:, None], 0.0)
    penalized = jnp.clip(repeated - (frequency + presence), -largest, largest)
    return jnp.where(logits == MASKED_SCORE, MASKED_SCORE, penalized)


def add_bias(logits: Array, bias_ids: Array, bias_values: Array) -> Array:
    """Add each slot's biases; MASKED_SCORE bans a token.

    Args:
        logits: float32 [B, V].
        bias_ids: int32 [B, N], no id twice, NOTHING where unused.
        bias_values: float32 [B, N].

    Returns:
        float32 [B, V].
    """
    return logits.at[_places(logits, bias_ids)].add(bias_values, mode="drop")


def mask_stops(logits: Array, sampler: SamplerState) -> Array:
    """Mask every stop token of the slots that have generated fewer than min_tokens: float32 [B, V]."""
    is_early = sampler.num_generated < sampler.min_tokens
    early_ids = jnp.where(is_early[:, None], sampler.stop_ids, NOTHING)
    return logits.at[_places(logits, early_ids)].set(MASKED_SCORE, mode="drop")


def _places(logits: Array, token_ids: Array) -> tuple[Array, Array]:
    # NOTHING would count from the end; past the end it is dropped.
    num_slots, vocab_size = logits.shape
    slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    return slots, jnp.where(token_ids == NOTHING, vocab_size, token_ids)
