"""Runs one group of requests to the end: admit all, prefill all, decode until the last one stops.

Separate from `generate.py` because this is the host side of the steps and nothing else: it fills plans
in, reads outputs, and knows neither text nor how requests were grouped.
Read next: `../step.py`, the functions it calls; `../plans.py`, what it fills in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arrays import NOTHING
from ..config import PAGE_TOKENS, CacheConfig, ModelConfig
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..plans import (
    LOGPROB_BUCKETS,
    PAGE_BUCKETS,
    PREFILL_MODES,
    ROW_BUCKETS,
    SLOT_BUCKETS,
    Admission,
    PromptSpan,
    bucket_for,
    prefill_plans,
)
from ..sampling.state import LENGTH, STOPPED
from ..sampling_params import RequestError, SamplingParams, slot_parameters
from ..step import (
    ONE_DEVICE,
    EngineState,
    StepOutput,
    Target,
    admit_step,
    decode_step,
    encode_step,
    initial_state,
    prefill_step,
)
from .progress import working_on
from .target import num_row_shares, num_slot_shares, to_devices, to_host

STOP_REASON = "stop"
LENGTH_REASON = "length"
INVALID_REASON = "invalid"
FINISH_REASONS = {STOPPED: STOP_REASON, LENGTH: LENGTH_REASON}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated token, of the model's own distribution.

    Attributes:
        logprob: of the token.
        top: of the most probable tokens, by token id, best first.
    """

    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class Generation:
    """Tokens of one prompt as they come.

    Attributes:
        prompt_ids: the prompt.
        token_ids: generated tokens, without the stop token.
        finish_reason: "stop" (end of sequence or a stop token), "length" (max_tokens) or "invalid" (the
            model's output was no distribution), None while running.
        logprobs: one for each token, if asked for.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Timing:
    """Seconds to the first token of a call, seconds decoding, tokens decoded in that time."""

    first_token: float = 0.0
    decoding: float = 0.0
    num_decoded: int = 0


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """How requests are run; no choice but `prefill` changes a token.

    Args:
        prefill: "exact", or "bounded": the decoder half sees only the last `sliding_window` tokens of a
            prompt, which is faster and approximate by design.
        num_slots: slots of a group, on each device that has its own, one of `SLOT_BUCKETS`; the smallest
            that fits by default.
        pages_per_slot: pages of a slot, one of `PAGE_BUCKETS`; the smallest that fits by default.
        max_rows: rows of a prefill step at most, on each device, one of `ROW_BUCKETS`.
        max_chunk: prompt tokens of one request in a step at most, any number by default.

    Raises:
        RequestError: a value that is not one of the choices.

    Source: spec/serving.md section 1.
    """

    prefill: str = "exact"
    num_slots: int | None = None
    pages_per_slot: int | None = None
    max_rows: int = ROW_BUCKETS[-1]
    max_chunk: int | None = None

    def __post_init__(self) -> None:
        _require_choice("prefill", self.prefill, PREFILL_MODES)
        _require_choice("max_rows", self.max_rows, ROW_BUCKETS)
        _require_choice("num_slots", self.num_slots, (None, *SLOT_BUCKETS))
        _require_choice("pages_per_slot", self.pages_per_slot, (None, *PAGE_BUCKETS))
        if self.max_chunk is not None and self.max_chunk < 1:
            raise RequestError(f"max_chunk: got {self.max_chunk}, expected 1 or more; change the option")


def _require_choice(name: str, got: object, choices: Sequence[object]) -> None:
    if got not in choices:
        raise RequestError(f"{name}: got {got!r}, expected one of {list(choices)}; change the option")


type OnToken = Callable[[int, int], object]
"""Called with (place among the requests, token id) for each generated token."""

_compiled: set[tuple[object, ...]] = set()


class Driver:
    """Requests that run together in one set of slots.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        generations: to fill in, at most as many as the largest slot bucket.
        params: of each.
        is_forbidden: bool [V], tokens that no request may get.
        options: how to run them.
        target: where the weights lie.
    """

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        numerics: Numerics,
        generations: list[Generation],
        params: list[SamplingParams],
        is_forbidden: np.ndarray,
        options: DriverOptions,
        target: Target = ONE_DEVICE,
    ) -> None:
        self.target, self.slot_shares = target, num_slot_shares(target)
        self.weights, self.config, self.numerics = weights, config, numerics
        self.generations, self.params = generations, params
        self.is_forbidden, self.options = is_forbidden, options
        self.sizes = self._sizes()
        wanted = max(one.logprobs or 0 for one in params)
        self.num_logprobs = bucket_for(wanted, LOGPROB_BUCKETS, "logprobs")

    def run(self, on_token: OnToken, timing: Timing) -> None:
        """Run all requests to their end.

        Args:
            on_token: receives every token as it is known.
            timing: filled in.
        """
        started = time.monotonic()
        for generation, one in zip(self.generations, self.params, strict=True):
            if one.max_tokens == 0:
                generation.finish_reason = LENGTH_REASON
        if not self._is_active().any():
            return
        state = self._prefill(self._admit(), on_token)
        timing.first_token = timing.first_token or time.monotonic() - started
        started = time.monotonic()
        while (is_active := self._is_active()).any():
            state, output = self._call("decode", decode_step, state, is_active, 1)
            self._accept(output, on_token)
            timing.num_decoded += int(is_active.sum())
        timing.decoding += time.monotonic() - started

    def _sizes(self) -> CacheConfig:
        options = self.options
        each = -(-len(self.generations) // self.slot_shares)
        slots_each = options.num_slots or bucket_for(each, SLOT_BUCKETS, "prompts")
        num_slots = slots_each * self.slot_shares
        needed = max(self._num_pages(slot) for slot in range(len(self.generations)))
        pages = options.pages_per_slot or bucket_for(needed, PAGE_BUCKETS, "pages of a request")
        if len(self.generations) > num_slots or needed > pages:
            raise RequestError(
                f"options: got {num_slots} slots of {pages} pages, expected at least "
                f"{len(self.generations)} of {needed} for these requests; leave num_slots and "
                "pages_per_slot out"
            )
        return CacheConfig(num_slots, pages, num_slots * pages)

    def _num_pages(self, number: int) -> int:
        """Count the pages that a request can need."""
        num_tokens = len(self.generations[number].prompt_ids) + self.params[number].max_tokens
        return -(-num_tokens // PAGE_TOKENS)

    def _slot(self, number: int) -> int:
        """Give a request's slot: requests take turns over the shares of the slots."""
        place, share = divmod(number, self.slot_shares)
        return share * (self.sizes.num_slots // self.slot_shares) + place

    def _by_slot[T](self, values: Sequence[T], empty: T) -> list[T]:
        """Put values of the requests at their slots."""
        placed = [empty] * self.sizes.num_slots
        for number, value in enumerate(values):
            placed[self._slot(number)] = value
        return placed

    def _is_active(self) -> np.ndarray:
        return np.array(self._by_slot([one.finish_reason is None for one in self.generations], False))

    def _decoder_start(self, number: int) -> int:
        if self.options.prefill == "exact":
            return 0
        kept = self.config.sliding_window + self.sizes.window_slack
        return max(0, len(self.generations[number].prompt_ids) - kept)

    def _admit(self) -> EngineState:
        options = {"config": self.config, "sizes": self.sizes, "numerics": self.numerics}
        state = initial_state(to_devices(self.is_forbidden, (), self.target), **options, target=self.target)
        starts = [self._decoder_start(number) for number in range(len(self.generations))]
        admission = Admission(
            is_admitted=self._is_active(),
            page_table=self._page_table(),
            decoder_starts=np.array(self._by_slot(starts, 0), np.int32),
            parameters=slot_parameters(self._by_slot(self.params, None), self.config.eos_token_id),
        )
        return admit_step(state, to_devices(admission, ("slots",), self.target), target=self.target)

    def _page_table(self) -> np.ndarray:
        """Give each request the pages that it can need, one after the other, among those of its share."""
        table = np.full((self.sizes.num_slots, self.sizes.pages_per_slot), NOTHING, np.int32)
        pages_each = self.sizes.num_pages // self.slot_shares
        free = [share * pages_each for share in range(self.slot_shares)]
        for number in range(len(self.generations)):
            share, count = number % self.slot_shares, self._num_pages(number)
            table[self._slot(number), :count] = np.arange(free[share], free[share] + count)
            free[share] += count
        return table

    def _prefill(self, state: EngineState, on_token: OnToken) -> EngineState:
        before, after = [], []
        for number, generation in enumerate(self.generations):
            if generation.finish_reason is not None:
                continue
            prompt = np.asarray(generation.prompt_ids, np.int32)
            start, slot = self._decoder_start(number), self._slot(number)
            before.append(PromptSpan(slot, prompt, 0, start))
            after.append(PromptSpan(slot, prompt, start, len(prompt)))
        packing = (self.sizes.num_slots, self.options.max_rows, self.options.max_chunk)
        packing = (*packing, self.slot_shares, num_row_shares(self.target))
        for plan in prefill_plans(before, *packing):
            state = self._call("encode", encode_step, state, plan, len(plan.token_ids))
        for plan in prefill_plans(after, *packing):
            state, output = self._call("prefill", prefill_step, state, plan, len(plan.token_ids))
            if (plan.last_rows >= 0).any():
                self._accept(output, on_token)
        return state

    def _call(self, name: str, step, state: EngineState, plan, num_rows: int):
        options = {"config": self.config, "numerics": self.numerics, "target": self.target}
        plan = to_devices(plan, ("slots",), self.target)
        if name != "encode":
            options["num_logprobs"] = self.num_logprobs
        key = (name, num_rows, self.sizes, *options.values())
        if key in _compiled:
            return step(self.weights, state, plan, **options)
        slots = self.sizes.num_slots
        with working_on(
            f"compiling {name} for {slots} slots x {self.sizes.capacity} tokens, once per machine"
        ):
            result = step(self.weights, state, plan, **options)
        _compiled.add(key)
        return result

    def _accept(self, output: StepOutput, on_token: OnToken) -> None:
        """Read a step's output and hand its tokens on."""
        output = to_host(output, self.target)
        is_sampled, tokens = np.asarray(output.is_sampled), np.asarray(output.tokens)
        finish, is_invalid = np.asarray(output.finish), np.asarray(output.is_invalid)
        for number, (generation, one) in enumerate(zip(self.generations, self.params, strict=True)):
            slot = self._slot(number)
            if not is_sampled[slot] or generation.finish_reason is not None:
                continue
            if is_invalid[slot]:
                generation.finish_reason = INVALID_REASON
                continue
            generation.finish_reason = FINISH_REASONS.get(int(finish[slot]))
            if finish[slot] == STOPPED:
                continue
            generation.token_ids.append(int(tokens[slot]))
            if one.logprobs is not None:
                generation.logprobs.append(_token_logprobs(output, slot, one.logprobs))
            on_token(number, int(tokens[slot]))


def _token_logprobs(output: StepOutput, slot: int, count: int) -> TokenLogprobs:
    ids = np.asarray(output.top_ids)[slot, :count].tolist()
    values = np.asarray(output.top_logprobs)[slot, :count].tolist()
    return TokenLogprobs(float(np.asarray(output.logprobs)[slot]), dict(zip(ids, values, strict=True)))
