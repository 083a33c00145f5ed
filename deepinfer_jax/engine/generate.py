"""Generate token ids from token ids: many prompts, an engine sized for them.

Separate from `llm.py` because it knows ids, never text, and keeps nothing between calls.
Read next: `engine.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..config import ModelConfig
from ..engine_config import EngineConfig, fitted
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..sampling_params import InvalidOutputError, RequestError, SamplingParams, check_request
from ..step import ONE_DEVICE, Target
from .engine import Engine
from .request import INVALID_REASON, Request, TokenLogprobs
from .target import num_slot_shares

type OnToken = Callable[[int, int], object]
"""Called with (prompt number, token id) for each generated token."""


@dataclass(slots=True)
class Generation:
    """What one prompt became.

    Attributes:
        prompt_ids: the prompt.
        token_ids: generated tokens, without the stop token.
        finish_reason: "stop" (end of sequence or a stop token), "length" (max_tokens) or "invalid" (the
            model's output was no distribution).
        logprobs: one for each token, if asked for.
        prompt_logprobs: one for each prompt token after the first, if asked for.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Timing:
    """Seconds to the first token of a call, seconds from then to the end, tokens that came in that time."""

    first_token: float = 0.0
    decoding: float = 0.0
    num_decoded: int = 0


def generate_ids(
    weights: Weights,
    config: ModelConfig,
    numerics: Numerics,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    on_token: OnToken | None = None,
    timing: Timing | None = None,
    options: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
    forbidden_ids: Sequence[int] = (),
    target: Target = ONE_DEVICE,
) -> list[Generation]:
    """Generate from prompts of token ids.

    All prompts are checked before any is run. With batch invariant numerics the tokens of one are the same
    whatever runs beside it and however it is cut into steps.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        prompts: lists of token ids.
        params: for all prompts, or one for each.
        on_token: receives every token as it is known.
        timing: filled in.
        options: how to run them; sizes that are left open fit these prompts.
        forbidden_ids: tokens that no request may get, besides the image token.
        target: where the weights lie.

    Returns:
        One generation per prompt, in order.

    Raises:
        RequestError: a prompt or parameter that is refused, by number.
        InvalidOutputError: NaN in a prompt's logits, or nothing left to sample; the others are in it.
    """
    each = params_of_each(params, len(prompts))
    for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        check_request(prompt, one, config, f"prompt {number}")
        if one.stop_strings:
            raise RequestError(
                f"prompt {number}: stop: got {list(one.stop_strings)}, expected none, as ids have no text; "
                "use LLM, or stop_token_ids"
            )
    if not prompts:
        return []
    num_tokens = [len(prompt) + one.max_tokens for prompt, one in zip(prompts, each, strict=True)]
    sizes = fitted(options, num_tokens, config, num_slot_shares(target))
    engine = Engine(weights, config, numerics, sizes, forbidden_ids, target)
    try:
        requests = [
            engine.submit(prompt, one, f"prompt {number}")
            for number, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]
        _run(engine, requests, on_token or (lambda number, token: None), timing or Timing())
    finally:
        engine.close()
    generations = [generation_of(request) for request in requests]
    refuse_invalid([one.finish_reason for one in generations], generations)
    return generations


def params_of_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Give each prompt its parameters.

    Raises:
        RequestError: as many as neither one nor the prompts.
    """
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise RequestError(
            f"params: got {len(each)}, expected one for each of {count} prompts, or a single one for "
            "all; give as many as prompts"
        )
    return each


def generation_of(request: Request) -> Generation:
    """Collect what a request became."""
    return Generation(
        prompt_ids=request.prompt.tolist(),
        token_ids=list(request.token_ids),
        finish_reason=request.finish_reason,
        logprobs=list(request.logprobs),
        prompt_logprobs=list(request.prompt_logprobs),
    )


def refuse_invalid(reasons: Sequence[str | None], results: Sequence[object]) -> None:
    """Raise for requests whose logits were no distribution; the results of all are in the error.

    Raises:
        InvalidOutputError: if there are any.
    """
    numbers = [number for number, reason in enumerate(reasons) if reason == INVALID_REASON]
    if numbers:
        raise InvalidOutputError(
            f"prompts {numbers}: the logits held NaN or no token was left to sample, expected a "
            "distribution; check the weights and the requests' bad_token_ids; the other prompts' results "
            "are in this error's `generations`",
            results,
        )


def _run(engine: Engine, requests: Sequence[Request], on_token: OnToken, timing: Timing) -> None:
    """Step until all requests are over, and hand their tokens on."""
    numbers = {request: number for number, request in enumerate(requests)}
    told = [0] * len(requests)
    started, first = time.monotonic(), 0.0
    while engine.has_work:
        for request in engine.step():
            number = numbers[request]
            news = request.token_ids[told[number] :]
            told[number] += len(news)
            for token in news:
                on_token(number, token)
        if not first and any(told):
            first, timing.num_decoded = time.monotonic(), timing.num_decoded - sum(told)
            timing.first_token = timing.first_token or first - started
    if first:
        timing.decoding += time.monotonic() - first
        timing.num_decoded += sum(told)
