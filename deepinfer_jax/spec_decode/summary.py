"""What speculation did, in numbers and as a table.

Separate from `stats.py`, which counts, because results are passed on and printed long after.
Read next: `stats.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class DraftSummary:
    """Means over everything counted; NaN where nothing was.

    With a schedule the acceptances and the calibration are those of the drafts that it let be verified.

    Attributes:
        steps: steps, with and without drafts.
        tokens: tokens of the outputs.
        tokens_per_slot_step: tokens that a running slot gets from a step, with or without drafts.
        rounds: slots in steps that drafted.
        rounds_by_regime: the same by sampling regime.
        rounds_without_confidence: those with a confidence that was no number.
        verified: drafts verified, over all rounds.
        accepted: drafts that are in the outputs, over all rounds.
        tau: tokens of a round, the target's own included; a round that ends on an accepted stop has none.
        expected_tau: what the calibrated confidences of the verified drafts predicted, stops not foreseen.
        mean_verified: drafts verified in a round.
        draft_acceptance: accepted / verified.
        verify_rate: (accepted + rounds) / (verified + rounds), the share of rows that gave a token.
        unconditional_acceptance: by position k, accepted >= k among the rounds in which k was judged.
        conditional_acceptance: by position k, the same among those whose drafts before k were accepted.
        calibration_error: by position, of the survival in 20 bins.
        brier: by position, mean squared difference of survival and outcome.
        auroc: by position, chance that an accepted draft has a larger survival than a refused one.
        choices: steps by what the schedule chose.
        timed_steps: steps with a predicted and a measured time.
        predicted_ms: mean of their predicted times.
        measured_ms: mean of their measured times.
        time_error: sum of |measured - predicted| over the sum of the measured times.

    Source: spec/dspark.md section 7.
    """

    steps: int
    tokens: int
    tokens_per_slot_step: float
    rounds: int
    rounds_by_regime: Mapping[str, int]
    rounds_without_confidence: int
    verified: int
    accepted: int
    tau: float
    expected_tau: float
    mean_verified: float
    draft_acceptance: float
    verify_rate: float
    unconditional_acceptance: tuple[float, ...]
    conditional_acceptance: tuple[float, ...]
    calibration_error: tuple[float, ...]
    brier: tuple[float, ...]
    auroc: tuple[float, ...]
    choices: Mapping[str, int]
    timed_steps: int
    predicted_ms: float
    measured_ms: float
    time_error: float

    def lines(self) -> list[str]:
        """Give the lines of a table in plain text."""
        regimes = ", ".join(f"{name} {count}" for name, count in self.rounds_by_regime.items() if count)
        choices = ", ".join(f"{name} {count}" for name, count in self.choices.items())
        count = self.rounds_without_confidence
        broken = f"; {count} with a confidence that was no number" if count else ""
        positions = range(1, len(self.brier) + 1)
        return [
            f"steps      {self.steps}, {_plain(self.tokens_per_slot_step)} tokens a slot",
            f"rounds     {self.rounds} ({regimes or 'none'}){broken}",
            f"tokens     {_plain(self.tau)} a round, {_plain(self.expected_tau)} expected",
            f"drafts     {_plain(self.mean_verified)} verified a round, {_percent(self.draft_acceptance)} of "
            f"them accepted; {_percent(self.verify_rate)} of the rows gave a token",
            f"choices    {choices or 'none'}",
            f"time       {_plain(self.measured_ms)} ms measured, {_plain(self.predicted_ms)} predicted "
            f"({self.timed_steps} steps, mean error {_percent(self.time_error)})",
            "position              " + "".join(f"{k:>8}" for k in positions),
            "accepted              " + _row(self.unconditional_acceptance, _percent),
            "  if all before were  " + _row(self.conditional_acceptance, _percent),
            "calibration error     " + _row(self.calibration_error, _percent),
            "Brier score           " + _row(self.brier, _plain),
            "AUROC                 " + _row(self.auroc, _plain),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def ratio(numerator: float, denominator: float) -> float:
    """Divide; NaN by zero."""
    return numerator / denominator if denominator else math.nan


def ratios(numerators: ArrayLike, denominators: ArrayLike) -> tuple[float, ...]:
    """Divide element by element; NaN where the denominator is 0."""
    pairs = zip(np.asarray(numerators).tolist(), np.asarray(denominators).tolist(), strict=True)
    return tuple(ratio(*pair) for pair in pairs)


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def _row(values: tuple[float, ...], show) -> str:
    return "".join(f"{show(value):>8}" for value in values)
