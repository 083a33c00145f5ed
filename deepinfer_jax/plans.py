"""What host and device exchange: sampling parameters, step shapes, plans. NumPy only.

Separate because both sides depend on it: the engine fills plans in, the step reads them.
Read next: `step.py` (the device side), `engine/generate.py` (the host side).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .config import ModelConfig

SLOT_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Sequences that run together; a larger batch is cut into groups of the last size."""

CHUNK_BUCKETS = (16, 64, 256)
"""Prompt tokens of one slot in one prefill step."""

CAPACITY_BUCKETS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
"""Tokens a slot's cache can hold."""


class RequestError(ValueError):
    """A request that is refused at the boundary: what, got, expected, how to fix."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Args:
        max_tokens: tokens to generate at most, 0 or more.
        temperature: 0 for greedy, otherwise the divisor of the logits.
        top_p: smallest probability mass to sample from, in (0, 1].
        seed: 64-bit; with the position it determines every draw.
        ignore_eos: whether to continue after the end-of-sequence token.

    Raises:
        RequestError: a value out of range.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 0, "max_tokens", self.max_tokens, "an int >= 0"
        )
        is_temperature = _is_number(self.temperature) and 0 <= self.temperature < math.inf
        _require(is_temperature, "temperature", self.temperature, "a finite number >= 0 (0 is greedy)")
        is_top_p = _is_number(self.top_p) and 0 < self.top_p <= 1
        _require(is_top_p, "top_p", self.top_p, "a number in (0, 1] (1 keeps every token)")
        _require(_is_int(self.seed) and 0 <= self.seed < 2**64, "seed", self.seed, "an int in 0..2^64-1")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float | np.floating)


def _require(condition: bool, what: str, got: object, expected: str) -> None:
    if not condition:
        raise RequestError(f"{what}: got {got!r}, expected {expected}; change the request's {what}")


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill step: the next chunk of each slot's prompt.

    Attributes:
        token_ids: int32 [B, Q], padded with 0.
        num_tokens: int32 [B], valid tokens of each slot's chunk, 0 for none.
        is_last: bool [B], whether the prompt ends in this chunk, so that a token is sampled.
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray
    is_last: np.ndarray


def bucket_for(size: int, buckets: tuple[int, ...], what: str) -> int:
    """Give the smallest bucket that holds `size`.

    Raises:
        RequestError: a size over the largest bucket.
    """
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise RequestError(f"{what}: got {size}, expected at most {buckets[-1]}; make the request smaller")


def prefill_plans(prompts: list[list[int]], num_slots: int) -> list[PrefillPlan]:
    """Cut the prompts of a group into chunks of one shape, all slots in step.

    Args:
        prompts: at most `num_slots` lists of token ids.
        num_slots: slots of the group.

    Returns:
        The steps in order.
    """
    longest = max(len(prompt) for prompt in prompts)
    chunk = bucket_for(min(longest, CHUNK_BUCKETS[-1]), CHUNK_BUCKETS, "prompt chunk")
    plans = []
    for start in range(0, longest, chunk):
        token_ids = np.zeros((num_slots, chunk), np.int32)
        num_tokens = np.zeros(num_slots, np.int32)
        is_last = np.zeros(num_slots, bool)
        for slot, prompt in enumerate(prompts):
            part = prompt[start : start + chunk]
            token_ids[slot, : len(part)] = part
            num_tokens[slot] = len(part)
            is_last[slot] = start < len(prompt) <= start + chunk
        plans.append(PrefillPlan(token_ids, num_tokens, is_last))
    return plans


def check_prompt(token_ids: list[int], params: SamplingParams, config: ModelConfig, which: str) -> None:
    """Refuse a prompt that cannot be run, before anything is computed.

    Args:
        token_ids: the prompt.
        params: its sampling parameters.
        config: the architecture.
        which: names the prompt in messages.

    Raises:
        RequestError: an empty prompt, an id outside the vocabulary, or more tokens than positions.
    """
    if not token_ids:
        raise RequestError(f"{which}: got no tokens, expected at least one; give a non-empty prompt")
    outside = [token for token in token_ids if not (_is_int(token) and 0 <= token < config.vocab_size)]
    if outside:
        raise RequestError(
            f"{which}: got token id {outside[0]!r}, expected ids in 0..{config.vocab_size - 1}; use this "
            "model's tokenizer"
        )
    total, limit = len(token_ids) + params.max_tokens, config.max_position_embeddings
    if total > limit:
        raise RequestError(
            f"{which}: got {len(token_ids)} prompt tokens + max_tokens {params.max_tokens} = {total}, "
            f"expected at most {limit} positions; shorten the prompt or lower max_tokens"
        )
