"""The parameters of requests as arrays of fixed shape, one entry a slot. NumPy only.

Separate from `sampling_params.py` because that is what a user writes, this what a step reads.
Read next: `sampling/state.py`, which keeps them on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .config import NOTHING
from .sampling_params import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams, stop_ids_of


class SlotParameters(NamedTuple):
    """The parameters of B slots as arrays of fixed shape.

    Attributes:
        seeds: uint32 [B, 2], words of the 64-bit seed.
        temperature: float32 [B], 0 for greedy.
        top_k: int32 [B], 0 for off.
        top_p: float32 [B].
        min_p: float32 [B].
        repetition_penalty: float32 [B].
        presence_penalty: float32 [B].
        frequency_penalty: float32 [B].
        bias_ids: int32 [B, MAX_BIASED_TOKENS], no id twice, NOTHING where unused.
        bias_values: float32 [B, MAX_BIASED_TOKENS], MASKED_SCORE for a banned token.
        stop_ids: int32 [B, MAX_STOP_TOKENS + 1], end of sequence included, NOTHING where unused.
        min_tokens: int32 [B].
        max_tokens: int32 [B].
    """

    seeds: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    repetition_penalty: np.ndarray
    presence_penalty: np.ndarray
    frequency_penalty: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    stop_ids: np.ndarray
    min_tokens: np.ndarray
    max_tokens: np.ndarray


def slot_parameters(params: Sequence[SamplingParams | None], eos_token_id: int) -> SlotParameters:
    """Lay the parameters of several slots out as arrays.

    Args:
        params: one a slot; None for a slot without a request, which is greedy and never stops.
        eos_token_id: the end of sequence, a stop token unless the request ignores it.

    Returns:
        The arrays.
    """
    num_slots = len(params)
    arrays = SlotParameters(
        seeds=np.zeros((num_slots, 2), np.uint32),
        temperature=np.zeros(num_slots, np.float32),
        top_k=np.zeros(num_slots, np.int32),
        top_p=np.ones(num_slots, np.float32),
        min_p=np.zeros(num_slots, np.float32),
        repetition_penalty=np.ones(num_slots, np.float32),
        presence_penalty=np.zeros(num_slots, np.float32),
        frequency_penalty=np.zeros(num_slots, np.float32),
        bias_ids=np.full((num_slots, MAX_BIASED_TOKENS), NOTHING, np.int32),
        bias_values=np.zeros((num_slots, MAX_BIASED_TOKENS), np.float32),
        stop_ids=np.full((num_slots, MAX_STOP_TOKENS + 1), NOTHING, np.int32),
        min_tokens=np.zeros(num_slots, np.int32),
        max_tokens=np.zeros(num_slots, np.int32),
    )
    for slot, one in enumerate(params):
        if one is not None:
            _fill_slot(arrays, slot, one, eos_token_id)
    return arrays


def seed_words(seed: int) -> np.ndarray:
    """Split a 64-bit seed into two words, exact without 64-bit arrays: uint32 [2], high first."""
    return np.array([int(seed) >> 32, int(seed) & 0xFFFFFFFF], np.uint32)


def _fill_slot(arrays: SlotParameters, slot: int, one: SamplingParams, eos_token_id: int) -> None:
    arrays.seeds[slot] = seed_words(one.seed)
    # Decided here, in float64: 1e-5 itself is below 1e-5 once it is a float32.
    arrays.temperature[slot] = 0.0 if one.is_greedy else one.temperature
    arrays.top_k[slot] = max(one.top_k, 0)
    for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        getattr(arrays, name)[slot] = getattr(one, name)
    arrays.min_tokens[slot], arrays.max_tokens[slot] = one.min_tokens, one.max_tokens
    # A ban replaces the bias, so that no id is there twice.
    biases = {**dict(one.bias_pairs), **dict.fromkeys(one.bad_token_ids, -math.inf)}
    arrays.bias_ids[slot, : len(biases)] = list(biases)
    arrays.bias_values[slot, : len(biases)] = list(biases.values())
    stops = stop_ids_of(one, eos_token_id)
    arrays.stop_ids[slot, : len(stops)] = stops
