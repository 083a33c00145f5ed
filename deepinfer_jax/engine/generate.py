"""Generate token ids from token ids: many prompts, in groups that run together.

Separate from `llm.py` because it knows ids, never text, and from `driver.py` because it checks and
groups requests and runs none.
Read next: `driver.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..config import ModelConfig
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..plans import SLOT_BUCKETS
from ..sampling_params import InvalidOutputError, RequestError, SamplingParams, check_request
from ..step import ONE_DEVICE, Target
from .driver import INVALID_REASON, Driver, DriverOptions, Generation, Timing
from .target import num_slot_shares

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
    options: DriverOptions = DriverOptions(),  # noqa: B008 (frozen)
    forbidden_ids: Sequence[int] = (),
    target: Target = ONE_DEVICE,
) -> list[Generation]:
    """Generate from prompts of token ids.

    All prompts are checked before any is run. Up to 64 run together on each device that has its own.
    With batch invariant numerics the tokens of one are the same whatever runs beside it and however it
    is cut into steps.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        prompts: lists of token ids.
        params: for all prompts, or one for each.
        on_token: receives every token as it is known.
        timing: filled in.
        options: how to run them.
        forbidden_ids: tokens that no request may get, besides the image token.
        target: where the weights lie.

    Returns:
        One generation per prompt, in order.

    Raises:
        RequestError: a prompt or parameter that is refused, by number.
        InvalidOutputError: NaN in a prompt's logits, or nothing left to sample; the others are in it.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise RequestError(
            f"params: got {len(each)}, expected one for each of {len(prompts)} prompts, or a single one for "
            "all; give as many as prompts"
        )
    checked = [[int(token) if isinstance(token, np.integer) else token for token in p] for p in prompts]
    for number, (prompt, one) in enumerate(zip(checked, each, strict=True)):
        check_request(prompt, one, config, f"prompt {number}")
    is_forbidden = np.zeros(config.vocab_size, bool)
    is_forbidden[[config.image_token_id, *forbidden_ids]] = True
    generations = [Generation(prompt) for prompt in checked]
    size = (options.num_slots or SLOT_BUCKETS[-1]) * num_slot_shares(target)
    for start in range(0, len(checked), size):
        group = slice(start, start + size)
        requests = (generations[group], each[group], is_forbidden, options)
        driver = Driver(weights, config, numerics, *requests, target)
        driver.run(
            lambda number, token, start=start: on_token and on_token(start + number, token),
            timing or Timing(),
        )
    _refuse_invalid(generations)
    return generations


def _refuse_invalid(generations: list[Generation]) -> None:
    numbers = [number for number, one in enumerate(generations) if one.finish_reason == INVALID_REASON]
    if numbers:
        raise InvalidOutputError(
            f"prompts {numbers}: the logits held NaN or no token was left to sample, expected a "
            "distribution; check the weights and the requests' bad_token_ids; the other prompts' results "
            "are in this error's `generations`",
            generations,
        )
