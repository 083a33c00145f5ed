"""Generate token ids from token ids: a simple batch, all prompts together.

Separate from `llm.py` because the loop knows ids, never text.
Read next: `../step.py`, the two functions it calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from ..config import ModelConfig
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..plans import (
    CAPACITY_BUCKETS,
    SLOT_BUCKETS,
    RequestError,
    SamplingParams,
    bucket_for,
    check_prompt,
    prefill_plans,
)
from ..sampling.randomness import seed_words
from ..step import EngineState, decode_step, initial_state, prefill_step
from .progress import working_on

STOPPED = "stop"
LENGTH = "length"


@dataclass(slots=True)
class Generation:
    """Tokens of one prompt as they come.

    Attributes:
        prompt_ids: the prompt.
        token_ids: generated tokens, without the end-of-sequence token.
        finish_reason: "stop" (end of sequence) or "length" (max_tokens), None while running.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Timing:
    """Seconds to the first token of a call, seconds decoding, tokens decoded in that time."""

    first_token: float = 0.0
    decoding: float = 0.0
    num_decoded: int = 0


type OnToken = Callable[[int, int], None]
"""Called with (prompt number, token id) for each generated token."""


def generate_ids(
    weights: Weights,
    config: ModelConfig,
    numerics: Numerics,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    on_token: OnToken | None = None,
    timing: Timing | None = None,
) -> list[Generation]:
    """Generate from prompts of token ids.

    All prompts are checked before any is run. Up to 64 run together; the tokens of one do not depend
    on which others run beside it, up to the rounding of matrix products.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        prompts: lists of token ids.
        params: for all prompts, or one for each.
        on_token: receives every token as it is known.
        timing: filled in.

    Returns:
        One generation per prompt, in order.

    Raises:
        RequestError: a prompt or parameter that is refused, by number.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise RequestError(
            f"params: got {len(each)}, expected one for each of {len(prompts)} prompts, or a single one for "
            "all; give as many as prompts"
        )
    checked = [[int(token) if isinstance(token, np.integer) else token for token in p] for p in prompts]
    for number, (prompt, one) in enumerate(zip(checked, each, strict=True)):
        check_prompt(prompt, one, config, f"prompt {number}")
    generations = [Generation(prompt) for prompt in checked]
    size = SLOT_BUCKETS[-1]
    for start in range(0, len(checked), size):
        group = _Group(
            weights, config, numerics, generations[start : start + size], each[start : start + size]
        )
        group.run(
            lambda slot, token, start=start: on_token and on_token(start + slot, token), timing or Timing()
        )
    return generations


_compiled: set[tuple[object, ...]] = set()


class _Group:
    """Prompts that run together in one set of slots."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        numerics: Numerics,
        generations: list[Generation],
        params: list[SamplingParams],
    ) -> None:
        self.weights, self.config, self.numerics = weights, config, numerics
        self.generations, self.params = generations, params
        self.num_slots = bucket_for(len(generations), SLOT_BUCKETS, "prompts")
        longest = max(
            len(generation.prompt_ids) + one.max_tokens
            for generation, one in zip(generations, params, strict=True)
        )
        self.capacity = bucket_for(longest, CAPACITY_BUCKETS, "tokens")

    def run(self, on_token: Callable[[int, int], object], timing: Timing) -> None:
        started = time.monotonic()
        for generation, one in zip(self.generations, self.params, strict=True):
            if one.max_tokens == 0:
                generation.finish_reason = LENGTH
        if not self._active().any():
            return
        state, tokens = self._prefill(self._initial_state())
        self._accept(np.asarray(tokens), on_token)
        timing.first_token = timing.first_token or time.monotonic() - started
        started = time.monotonic()
        while (is_active := self._active()).any():
            state, tokens = self._decode(state, is_active)
            self._accept(np.asarray(tokens), on_token)
            timing.num_decoded += int(is_active.sum())
        timing.decoding += time.monotonic() - started

    def _active(self) -> np.ndarray:
        running = [generation.finish_reason is None for generation in self.generations]
        return np.array(running + [False] * (self.num_slots - len(running)))

    def _initial_state(self) -> EngineState:
        padded = self.params + [SamplingParams()] * (self.num_slots - len(self.params))
        return initial_state(
            jnp.asarray(np.stack([seed_words(one.seed) for one in padded])),
            jnp.asarray([one.temperature for one in padded], jnp.float32),
            jnp.asarray([one.top_p for one in padded], jnp.float32),
            **{"config": self.config, "num_slots": self.num_slots, "numerics": self.numerics},
            capacity=self.capacity,
        )

    def _prefill(self, state: EngineState):
        tokens = None
        for plan in prefill_plans([generation.prompt_ids for generation in self.generations], self.num_slots):
            chunk = plan.token_ids.shape[1]
            arguments = (plan.token_ids, plan.num_tokens, plan.is_last)
            state, tokens = self._call("prefill", prefill_step, state, chunk, *arguments)
        return state, tokens

    def _decode(self, state: EngineState, is_active: np.ndarray):
        return self._call("decode", decode_step, state, 1, is_active)

    def _call(self, name: str, step, state: EngineState, chunk: int, *arguments: np.ndarray):
        key = (name, self.num_slots, chunk, self.capacity, self.config, self.numerics)
        arrays = [jnp.asarray(argument) for argument in arguments]
        options = {"config": self.config, "numerics": self.numerics}
        if key in _compiled:
            return step(self.weights, state, *arrays, **options)
        with working_on(f"compiling {name} for {self.num_slots} slots x {chunk} tokens, once per machine"):
            result = step(self.weights, state, *arrays, **options)
            result[1].block_until_ready()
        _compiled.add(key)
        return result

    def _accept(self, tokens: np.ndarray, on_token: Callable[[int, int], object]) -> None:
        for slot, (generation, one) in enumerate(zip(self.generations, self.params, strict=True)):
            if generation.finish_reason is not None:
                continue
            token = int(tokens[slot])
            if token == self.config.eos_token_id and not one.ignore_eos:
                generation.finish_reason = STOPPED
                continue
            generation.token_ids.append(token)
            on_token(slot, token)
            if len(generation.token_ids) == one.max_tokens:
                generation.finish_reason = LENGTH
