"""How a request says its tokens are chosen, checked at the boundary, and the same as arrays. NumPy only.

Separate from `plans.py` because a request is checked before any plan exists, and from `sampling/`
because the engine's host side must not import JAX.
Read next: `sampling/sample.py` (what each parameter does, in order), `plans.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .config import NOTHING, ModelConfig

MAX_BIASED_TOKENS = 512
"""Tokens of one request with a bias or a ban, together: the width of a slot's table."""

MAX_STOP_TOKENS = 64
"""Stop tokens of one request, besides the end of sequence."""

MAX_LOGPROBS = 20
"""Most probable tokens that a request may ask the log-probabilities of."""

GREEDY_BELOW = 1e-5
"""A lower temperature takes the best token, as in the released engine (spec/serving.md section 8)."""

MAX_TEMPERATURE = 1e30
"""Above, the inverse is flushed to zero in float32; uniform draws come long before."""

MAX_INT32 = 2**31 - 1

type Pairs = tuple[tuple[int, float], ...]


class RequestError(ValueError):
    """A request that is refused at the boundary: what, got, expected, how to fix."""


class InvalidOutputError(RuntimeError):
    """Some requests ended because the model's output was no distribution; the others are finished.

    Attributes:
        generations: results of all prompts, in order.
    """

    def __init__(self, message: str, generations: Sequence[Any]) -> None:
        super().__init__(message)
        self.generations = generations


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; `sampling/sample.py` says in which order the controls apply.

    Sequences and mappings are stored as sorted tuples, so that equal requests are equal and hashable.

    Args:
        max_tokens: tokens to generate at most, 0 or more.
        temperature: below 1e-5 greedy, otherwise the divisor of the logits.
        top_p: smallest probability mass to sample from, in (0, 1].
        seed: 64-bit; with the position it determines every draw.
        ignore_eos: whether to continue after the end-of-sequence token.
        min_tokens: tokens to generate before a stop or end-of-sequence token may come.
        top_k: number of most probable tokens to sample from; 0 or -1 for all.
        min_p: least probability of a token as a part of the most probable one's, in [0, 1].
        repetition_penalty: divides a positive and multiplies a negative logit of every token of the
            prompt or the output; 1 is off.
        presence_penalty: subtracted from the logit of every token of the output.
        frequency_penalty: subtracted once for each time a token is in the output.
        logit_bias: token id -> what is added to its logit; a mapping or pairs.
        bad_token_ids: tokens never generated.
        stop_token_ids: tokens that end the output, besides the end of sequence.
        logprobs: None for none, n for the chosen token's and those of the n most probable.

    Raises:
        RequestError: a value out of range.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Pairs = ()
    bad_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_numbers()
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        for name, limit in (("bad_token_ids", MAX_BIASED_TOKENS), ("stop_token_ids", MAX_STOP_TOKENS)):
            object.__setattr__(self, name, _token_ids(getattr(self, name), limit, name))
        biased = {token for token, _ in self.bias_pairs} | set(self.bad_token_ids)
        if len(biased) > MAX_BIASED_TOKENS:
            raise RequestError(
                f"logit_bias and bad_token_ids: got {len(biased)} tokens, expected at most "
                f"{MAX_BIASED_TOKENS} together; name fewer tokens"
            )

    def _check_lengths(self) -> None:
        for name in ("max_tokens", "min_tokens"):
            value = getattr(self, name)
            _require(_is_int_in(value, 0, MAX_INT32), name, value, "an int >= 0 (below 2^31)")
        expected = f"an int <= max_tokens ({self.max_tokens})"
        _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, expected)
        _require(isinstance(self.ignore_eos, bool | np.bool_), "ignore_eos", self.ignore_eos, "True or False")
        is_logprobs = self.logprobs is None or _is_int_in(self.logprobs, 0, MAX_LOGPROBS)
        _require(is_logprobs, "logprobs", self.logprobs, f"None or an int in 0..{MAX_LOGPROBS}")
        _require(_is_int_in(self.seed, 0, 2**64 - 1), "seed", self.seed, "an int in 0..2^64-1")

    def _check_numbers(self) -> None:
        expected = f"a number in [0, {MAX_TEMPERATURE:g}] (below {GREEDY_BELOW:g} is greedy)"
        _require(
            _is_number_in(self.temperature, 0, MAX_TEMPERATURE), "temperature", self.temperature, expected
        )
        _require(
            _is_int_in(self.top_k, -1, MAX_INT32), "top_k", self.top_k, "an int >= -1 (0 and -1 are off)"
        )
        is_top_p = _is_number_in(self.top_p, 0, 1) and self.top_p > 0
        _require(is_top_p, "top_p", self.top_p, "a number in (0, 1] (1 keeps every token)")
        _require(_is_number_in(self.min_p, 0, 1), "min_p", self.min_p, "a number in [0, 1] (0 is off)")
        value = self.repetition_penalty
        is_penalty = _is_number_in(value, 0.01, 100)
        _require(is_penalty, "repetition_penalty", value, "a number in [0.01, 100] (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number_in(value, -100, 100), name, value, "a number in [-100, 100] (0 is off)")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken and nothing is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def bias_pairs(self) -> Pairs:
        """The `logit_bias` as it is stored: sorted pairs of token id and bias."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias


def check_request(token_ids: Sequence[int], params: SamplingParams, config: ModelConfig, which: str) -> None:
    """Refuse a request that cannot be run, before anything is computed.

    Args:
        token_ids: the prompt.
        params: its sampling parameters.
        config: the architecture.
        which: names the request in messages.

    Raises:
        RequestError: an empty prompt, an id outside the vocabulary (of the prompt or of a parameter), more
            tokens than positions, or parameters that leave no token to choose.
    """
    if not len(token_ids):
        raise RequestError(f"{which}: got no tokens, expected at least one; give a non-empty prompt")
    _check_ids(token_ids, config, which)
    total, limit = len(token_ids) + params.max_tokens, config.max_position_embeddings
    if total > limit:
        raise RequestError(
            f"{which}: got {len(token_ids)} prompt tokens + max_tokens {params.max_tokens} = {total}, "
            f"expected at most {limit} positions; shorten the prompt or lower max_tokens"
        )
    _check_ids([token for token, _ in params.bias_pairs], config, f"{which}: logit_bias")
    _check_ids(params.bad_token_ids, config, f"{which}: bad_token_ids")
    _check_ids(params.stop_token_ids, config, f"{which}: stop_token_ids")
    banned = {*params.bad_token_ids, config.image_token_id}
    if params.min_tokens:
        banned.update(stop_ids_of(params, config.eos_token_id))
    if len(banned) >= config.vocab_size:
        raise RequestError(
            f"{which}: bad_token_ids: got every token that could be generated, expected at least one left "
            "(min_tokens forbids the stop tokens as well); ban fewer tokens"
        )
    if params.logprobs is not None and params.logprobs > config.vocab_size:
        raise RequestError(
            f"{which}: logprobs: got {params.logprobs}, expected at most the {config.vocab_size} tokens of "
            "the vocabulary; ask for fewer"
        )


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


def stop_ids_of(params: SamplingParams, eos_token_id: int) -> tuple[int, ...]:
    """List every token that ends the output of a request."""
    return tuple({*params.stop_token_ids, *(() if params.ignore_eos else (eos_token_id,))})


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


def _bias_pairs(value: object) -> Pairs:
    expected = "token id -> number in [-1000, 1000], no id twice"
    pairs: list[Any] = list(
        value.items() if isinstance(value, Mapping) else _listed(value, "logit_bias", expected)
    )
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        is_valid = is_pair and _is_int_in(pair[0], 0, MAX_INT32) and _is_number_in(pair[1], -1000, 1000)
        _require(is_valid, "logit_bias", value, expected)
    biases = {int(token): float(bias) for token, bias in pairs}
    _require(len(biases) == len(pairs), "logit_bias", value, expected)
    return tuple(sorted(biases.items()))


def _token_ids(value: object, limit: int, what: str) -> tuple[int, ...]:
    expected = f"at most {limit} token ids"
    tokens = _listed(value, what, expected)
    _require(all(_is_int_in(token, 0, MAX_INT32) for token in tokens), what, value, expected)
    unique = tuple(sorted({int(token) for token in tokens}))
    _require(len(unique) <= limit, what, value, expected)
    return unique


def _listed(value: object, what: str, expected: str) -> list[Any]:
    _require(isinstance(value, Iterable) and not isinstance(value, str | bytes), what, value, expected)
    assert isinstance(value, Iterable)
    return list(value)


def _check_ids(token_ids: Iterable[Any], config: ModelConfig, which: str) -> None:
    outside = [token for token in token_ids if not _is_int_in(token, 0, config.vocab_size - 1)]
    if outside:
        raise RequestError(
            f"{which}: got token id {outside[0]!r}, expected ids in 0..{config.vocab_size - 1}; use this "
            "model's tokenizer"
        )


def _is_int_in(value: Any, lowest: int, highest: int) -> bool:
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_int and bool(lowest <= value <= highest)


def _is_number_in(value: Any, lowest: float, highest: float) -> bool:
    # A NaN fails both comparisons.
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_number and bool(lowest <= value <= highest)


def _require(condition: bool, what: str, got: object, expected: str) -> None:
    if not condition:
        raise RequestError(f"{what}: got {got!r}, expected {expected}; change the request's {what}")
