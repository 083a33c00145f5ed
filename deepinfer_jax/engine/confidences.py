"""Rounds of drafts with their outcome, from prompts that an engine answers, and the calibration they give.

Separate from `drafting.py` because calibration needs what an engine in use does not have: every draft of
every round verified.
Read next: `../spec_decode/calibration.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..engine_config import EngineConfig
from ..plans import DEFAULT_SLOTS
from ..sampling_params import RequestError, SamplingParams
from ..spec_decode.calibration import Calibration, fit_calibration, regime_of
from ..spec_decode.stats import judged_lengths
from .engine import Engine
from .load import Model
from .progress import counting


class Rounds(NamedTuple):
    """Fully verified rounds.

    Attributes:
        logits: float32 [n, K], confidences, not calibrated.
        num_accepted: int [n].
        num_verified: int [n], K everywhere.
        regimes: int [n], place in `REGIMES`.
    """

    logits: np.ndarray
    num_accepted: np.ndarray
    num_verified: np.ndarray
    regimes: np.ndarray


def collect_rounds(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    options: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
) -> Rounds:
    """Answer prompts with all drafts verified, and keep what became of each round.

    Rounds that a limit or the end of an output cut are left out: what they would have accepted is not known.

    Args:
        model: with draft stages.
        prompts: token ids.
        params: one for each prompt.
        options: sizes and the verification mode; the schedule is "fixed".

    Returns:
        The rounds.

    Raises:
        RequestError: a model without drafts, or a prompt that is refused.
    """
    options = replace(options, drafts="fixed", max_drafts=None)
    engine = Engine(
        *(model.weights, model.config, model.numerics, options, model.forbidden_ids, model.target),
        calibration=model.calibration,
    )
    assert engine.drafting is not None
    size, kept = model.config.draft.block_size, []

    def keep(**counts: Any) -> None:
        judged = judged_lengths(counts["num_tokens"], counts["num_verified"], counts["num_accepted"])
        is_whole = judged == size
        kept.append([np.asarray(counts[name])[is_whole] for name in Rounds._fields])

    engine.drafting.on_round = keep
    try:
        requests = [engine.submit(*one) for one in zip(prompts, params, strict=True)]
        with counting("answering", len(requests)) as count:
            while engine.has_work:
                over = sum(request.is_over for request in engine.step())
                count(over, sum(len(request.token_ids) for request in requests))
    finally:
        engine.close()
    if not kept:
        raise RequestError(
            "calibration: got no round whose drafts were all verified, expected some hundred; give more "
            f"prompts or a larger max_tokens than {size}"
        )
    return Rounds(*(np.concatenate(part) for part in zip(*kept, strict=True)))


def calibrate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    verification: str = "coupled",
    source: dict[str, Any] | None = None,
) -> Calibration:
    """Fit the temperatures of a model's confidences on its own answers.

    Args:
        model: with draft stages.
        prompts: token ids, such as those of the traffic to come.
        params: one for each prompt; those of one sampling regime calibrate that regime.
        verification: mode whose acceptance is predicted.
        source: facts to keep with the result.

    Returns:
        The calibration.

    Raises:
        RequestError: as `collect_rounds`.

    Source: spec/dspark.md section 5.6.
    """
    longest = max(len(prompt) + one.max_tokens for prompt, one in zip(prompts, params, strict=True))
    options = EngineConfig(
        num_slots=DEFAULT_SLOTS,
        max_context=min(longest, model.config.max_position_embeddings),
        verification=verification,
    )
    rounds = collect_rounds(model, prompts, params, options)
    facts = {"model": model.name, "verification": verification, **(source or {})}
    return fit_calibration(*rounds, source=facts)


def in_every_regime(params: SamplingParams) -> list[SamplingParams]:
    """Give parameters of all three sampling regimes: greedy, sampled, sampled after a filter."""
    plain = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    regimes = [
        replace(plain, temperature=0.0),
        replace(plain, temperature=1.0),
        replace(plain, temperature=1.0, top_p=0.9),
    ]
    assert [regime_of(one) for one in regimes] == [0, 1, 2]
    return regimes
