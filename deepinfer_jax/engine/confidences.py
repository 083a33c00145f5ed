"""Rounds of drafts with their outcome, from prompts that an engine answers, and the calibration they give.

Separate from `drafting.py` because calibration needs what an engine in use does not have: every draft of
every round verified.
Read next: `../spec_decode/calibration.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..engine_config import EngineConfig
from ..plans import DEFAULT_SLOTS
from ..sampling_params import RequestError, SamplingParams
from ..spec_decode.calibrate import NUM_BINS, Floats, bins_of
from ..spec_decode.calibration import Calibration, fit_calibration, regime_of
from ..spec_decode.stats import judged_lengths
from .engine import Engine
from .load import Model
from .progress import counting

NUM_DRAWS = 200
"""Errors drawn to tell what chance alone gives."""

NUM_FOLDS = 5
"""Parts of the answers when each is calibrated by the others."""


class Rounds(NamedTuple):
    """Fully verified rounds.

    Attributes:
        logits: float32 [n, K], confidences, not calibrated.
        num_accepted: int [n].
        num_verified: int [n], K everywhere.
        regimes: int [n], place in `REGIMES`.
        requests: int [n], place of the prompt that was answered, as rounds of one answer are alike.
    """

    logits: np.ndarray
    num_accepted: np.ndarray
    num_verified: np.ndarray
    regimes: np.ndarray
    requests: np.ndarray


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
    size, kept, numbers = model.config.draft.block_size, [], {}

    def keep(params: Sequence[SamplingParams], **counts: Any) -> None:
        judged = judged_lengths(counts["num_tokens"], counts["num_verified"], counts["num_accepted"])
        is_whole, counts["requests"] = judged == size, [numbers[id(one)] for one in params]
        kept.append([np.asarray(counts[name])[is_whole] for name in Rounds._fields])

    engine.drafting.on_round = keep
    try:
        # Parameters of its own tell a request apart where all that a round knows is how it was sampled.
        pairs = zip(prompts, params, strict=True)
        requests = [engine.submit(prompt, replace(one)) for prompt, one in pairs]
        numbers.update((id(request.params), number) for number, request in enumerate(requests))
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


def fit_rounds(rounds: Rounds, source: Mapping[str, Any] | None = None) -> Calibration:
    """Fit a calibration to rounds: `fit_calibration` of what they hold."""
    return fit_calibration(
        rounds.logits, rounds.num_accepted, rounds.num_verified, rounds.regimes, source=source
    )


def chance_errors(
    survivals: ArrayLike,
    num_accepted: ArrayLike,
    requests: ArrayLike,
    draws: int = NUM_DRAWS,
    num_bins: int = NUM_BINS,
) -> Floats:
    """Draw the calibration errors that these rounds would show by chance if their survivals were exact.

    e = sum over bins b of |sum over answers a of s_a (r_ab - n_ab m_b)| / n, with r_ab the sum of
    1[accepted] - survival over the n_ab rounds of answer a in bin b, m_b the mean of these residuals in b,
    and signs s_a = 1 or -1 drawn anew for each e.

    Args:
        survivals: [n, K], calibrated.
        num_accepted: int [n].
        requests: int [n], which answer a round is from.
        draws: errors drawn.
        num_bins: bins of [0, 1].

    Returns:
        float64 [draws, K]: the mean is the floor under a measured error.

    Source: spec/dspark.md section 5.6 (the error); wild bootstrap over clusters.
    """
    table, accepted = np.asarray(survivals, np.float64), np.asarray(num_accepted)
    _, answers = np.unique(np.asarray(requests), return_inverse=True)
    num_answers = int(answers.max()) + 1
    # One sign for a whole answer: a text that repeats itself is right, or wrong, many times at once.
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (draws, num_answers))
    errors = np.empty((draws, table.shape[1]), np.float64)
    for k in range(table.shape[1]):
        bins = bins_of(table[:, k], num_bins)
        sums, counts = np.zeros((2, num_answers, num_bins), np.float64)
        np.add.at(sums, (answers, bins), (accepted > k) - table[:, k])
        np.add.at(counts, (answers, bins), 1.0)
        # Without what is truly off, which chance is not to be blamed for.
        centred = sums - counts * (sums.sum(axis=0) / np.maximum(counts.sum(axis=0), 1.0))
        errors[:, k] = np.abs(signs @ centred).sum(axis=1) / len(table)
    return errors


def cross_fitted(rounds: Rounds, folds: int = NUM_FOLDS) -> Floats:
    """Calibrate each answer's survivals by a fit to other answers only.

    Args:
        rounds: of any regimes.
        folds: parts that the answers are dealt to; each is calibrated by a fit to all others.

    Returns:
        float64 [n, K], survivals.

    Source: spec/dspark.md section 5.6, cross-validated.
    """
    survivals = np.empty(rounds.logits.shape, np.float64)
    for fold in range(folds):
        own = rounds.requests % folds == fold
        fitted = fit_rounds(Rounds(*(part[~own] for part in rounds)))
        survivals[own] = fitted.survivals(rounds.logits[own], rounds.regimes[own])
    return survivals


def calibrate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    verification: str = "coupled",
    source: dict[str, Any] | None = None,
) -> Calibration:
    """Fit the calibration of a model's confidences on its own answers.

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
    return fit_rounds(rounds, facts)


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
