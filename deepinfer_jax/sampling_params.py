"""How a request says its tokens are chosen, checked at the boundary. NumPy only.

Separate from `plans.py` because a request is checked before any plan exists, and from `sampling/`
because the engine's host side must not import JAX.
Read next: `sampling/sample.py` (what each parameter does, in order), `slot_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .config import ModelConfig

MAX_BIASED_TOKENS = 512
"""Tokens of one request with a bias or a ban, together: the width of a slot's table."""

MAX_STOP_TOKENS = 64
"""Stop tokens of one request, besides the end of sequence."""

MAX_STOP_STRINGS = 64
"""Stop strings of one request."""

MAX_SAMPLES = 64
"""Outputs of one request."""

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
        stop: texts that end the output where they first appear, a string or several; they need a
            tokenizer, and do not count before `min_tokens`.
        include_stop: whether the stop text that ended the output stays at its end.
        n: outputs of one prompt; the first has the seed itself, the others seeds made of it.
        prompt_logprobs: the same as `logprobs` for the tokens of the prompt after the first; the prompt
            is then computed whole.

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
    stop: str | Sequence[str] = ()
    include_stop: bool = False
    n: int = 1
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_numbers()
        object.__setattr__(self, "stop", _stop_strings(self.stop))
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
        _require(_is_int_in(self.n, 1, MAX_SAMPLES), "n", self.n, f"an int in 1..{MAX_SAMPLES}")
        for name in ("ignore_eos", "include_stop"):
            value = getattr(self, name)
            _require(isinstance(value, bool | np.bool_), name, value, "True or False")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            is_count = value is None or _is_int_in(value, 0, MAX_LOGPROBS)
            _require(is_count, name, value, f"None or an int in 0..{MAX_LOGPROBS}")
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

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The `stop` as it is stored: a sorted tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def for_sample(self, index: int) -> SamplingParams:
        """Give the parameters of one of the `n` outputs.

        Args:
            index: which one, from 0; it has the same tokens for every `n`.

        Returns:
            Parameters with `n` 1 and a seed of their own.
        """
        return replace(self, n=1, seed=sample_seed(self.seed, index))


def sample_seed(seed: int, index: int) -> int:
    """Make the seed of one of several outputs: the seed itself for the first, hashed with the index after.

    Args:
        seed: 64-bit.
        index: which output, from 0.

    Returns:
        The 64-bit seed.

    Source: the finaliser of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators").
    """
    if index == 0:
        return int(seed)
    word = (int(seed) + index * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


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
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > config.vocab_size:
            raise RequestError(
                f"{which}: {name}: got {value}, expected at most the {config.vocab_size} tokens of the "
                "vocabulary; ask for fewer"
            )


def stop_ids_of(params: SamplingParams, eos_token_id: int) -> tuple[int, ...]:
    """List every token that ends the output of a request."""
    return tuple({*params.stop_token_ids, *(() if params.ignore_eos else (eos_token_id,))})


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


def _stop_strings(value: object) -> tuple[str, ...]:
    expected = f"a text or at most {MAX_STOP_STRINGS} of them, none empty"
    texts = [value] if isinstance(value, str) else _listed(value, "stop", expected)
    is_valid = all(isinstance(text, str) and text for text in texts)
    _require(is_valid and len(texts) <= MAX_STOP_STRINGS, "stop", value, expected)
    return tuple(sorted(set(texts)))


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
