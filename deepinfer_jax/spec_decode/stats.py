"""What speculation did: acceptance, verified lengths, calibration, choices and step times. NumPy only.

Separate because benchmarks, notebooks and the engine's statistics read it, and the step knows nothing of it.
Read next: `summary.py`, what comes out; `calibrate.py`, whose predictions are judged here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..config import NOTHING
from .calibrate import NUM_BINS, Reliability
from .calibration import REGIMES, Calibration, uncalibrated
from .summary import DraftSummary, ratio, ratios

FINE_BINS = 1000
"""Bins of a survival that are kept: memory stays the same however long it runs."""

NO_DRAFT = 0
"""The choice of a step that drafts nothing."""

type Integers = NDArray[np.int64]
type Floats = NDArray[np.float64]


def judged_lengths(num_tokens: ArrayLike, num_verified: ArrayLike, num_accepted: ArrayLike) -> Integers:
    """Tell of how many drafts the outcome is known.

    Those verified, but no further than the output went where it ended on an accepted draft: what follows a
    stop token or the last token was neither accepted nor refused.

    Args:
        num_tokens: int [B] tokens of the step.
        num_verified: int [B] drafts verified.
        num_accepted: int [B] drafts accepted, at most `num_tokens`.

    Returns:
        int64 [B].

    Source: spec/dspark.md section 7.
    """
    tokens, accepted = np.asarray(num_tokens, np.int64), np.asarray(num_accepted, np.int64)
    return np.where(tokens == accepted, accepted, np.asarray(num_verified, np.int64))


class DraftStats:
    """Counts what speculation did; memory does not grow.

    A round is one slot in one step that drafted; a step without drafts (choice 0) has none.

    Args:
        block_size: K.
        calibration: what the confidences are calibrated by; by default they stay as they are.
        budgets: rows of the schedule's candidates 1..G, which name the choices.
    """

    def __init__(
        self, block_size: int, calibration: Calibration | None = None, budgets: Sequence[int] = ()
    ) -> None:
        self._block = block_size
        self._calibration = calibration or uncalibrated(block_size)
        if self._calibration.block_size != block_size:
            raise ValueError(
                f"calibration: got {self._calibration.block_size} positions, expected {block_size} (the "
                "block's drafts); load the calibration of this draft"
            )
        self._budgets = tuple(budgets)
        self.reset()

    def reset(self) -> None:
        """Forget everything counted."""
        shape = (len(REGIMES), self._block)
        self._steps = self._slot_steps = self._tokens = 0
        self._rounds = np.zeros(len(REGIMES), np.int64)
        self._round_tokens = self._verified = self._accepted = 0
        self._expected_tokens = 0.0
        self._without_confidence = 0
        # By position: trials of the two acceptances, and what came of them.
        self._judged, self._reached, self._passed = (np.zeros(self._block, np.int64) for _ in range(3))
        # By regime, position and bin of the survival.
        self._bin_count = np.zeros((*shape, FINE_BINS), np.int64)
        self._bin_accepted = np.zeros((*shape, FINE_BINS), np.int64)
        self._bin_predicted = np.zeros((*shape, FINE_BINS), np.float64)
        self._squared_error = np.zeros(shape, np.float64)
        self._choices: Counter[int] = Counter()
        self._timed_steps = 0
        self._predicted_ms = self._measured_ms = self._time_gap_ms = 0.0

    def add(
        self,
        *,
        num_tokens: ArrayLike,
        num_verified: ArrayLike,
        num_accepted: ArrayLike,
        logits: ArrayLike,
        regimes: ArrayLike,
        choice: int = NOTHING,
        predicted_ms: float | None = None,
        measured_ms: float | None = None,
    ) -> None:
        """Count one step.

        Args:
            num_tokens: int [B] tokens that each slot's output got, after any stop; 0 where it did not run.
            num_verified: int [B] drafts verified, 0..K.
            num_accepted: int [B] drafts among those tokens.
            logits: float [B, K] raw confidence logits; not read where nothing was drafted.
            regimes: int [B], index into `REGIMES`.
            choice: candidate that the schedule took; 0 for no draft, NOTHING without a schedule.
            predicted_ms: time that the cost table predicts, None without one.
            measured_ms: time that the step took, None if it was not measured.

        Raises:
            ValueError: counts that contradict each other, such as more accepted drafts than tokens.
        """
        tokens, verified, accepted, regime = (
            np.asarray(values, np.int64) for values in (num_tokens, num_verified, num_accepted, regimes)
        )
        table = np.asarray(logits, np.float64)
        self._check(tokens, verified, accepted, regime, table, choice)
        has_run = tokens > 0
        self._steps += 1
        self._slot_steps += int(has_run.sum())
        self._tokens += int(tokens.sum())
        self._choices[int(choice)] += 1
        self._add_time(predicted_ms, measured_ms)
        if choice != NO_DRAFT and has_run.any():
            self._add_rounds(
                tokens[has_run], verified[has_run], accepted[has_run], regime[has_run], table[has_run]
            )

    def _check(
        self,
        tokens: Integers,
        verified: Integers,
        accepted: Integers,
        regime: Integers,
        logits: Floats,
        choice: int,
    ) -> None:
        shapes = [values.shape for values in (tokens, verified, accepted, regime, logits)]
        expected = [tokens.shape[:1]] * 4 + [(*tokens.shape[:1], self._block)]
        if shapes != expected:
            raise ValueError(
                f"draft statistics: got shapes {shapes}, expected four of [B] and [B, {self._block}]; pass "
                "one entry a slot"
            )
        limit = NO_DRAFT if choice == NO_DRAFT else self._block
        rules = {
            f"num_verified in 0..{limit}": (verified >= 0) & (verified <= limit),
            "num_accepted in 0..num_verified": (accepted >= 0) & (accepted <= verified),
            # A round ends with a token of the target's own, unless the output ended on an accepted draft.
            "num_tokens of num_accepted or one more": (tokens == accepted) | (tokens == accepted + 1),
            f"regimes in 0..{len(REGIMES) - 1}": (regime >= 0) & (regime < len(REGIMES)),
        }
        for rule, holds in rules.items():
            # A slot that did not run may hold anything.
            wrong = np.flatnonzero(~holds & (tokens != 0))
            if wrong.size:
                slot = int(wrong[0])
                raise ValueError(
                    f"draft statistics: slot {slot}: got {tokens[slot]} tokens, {verified[slot]} verified, "
                    f"{accepted[slot]} accepted, regime {regime[slot]}, expected {rule}; count only tokens "
                    "that the output got"
                )

    def _add_time(self, predicted_ms: float | None, measured_ms: float | None) -> None:
        if predicted_ms is not None and measured_ms is not None:
            self._timed_steps += 1
            self._predicted_ms += predicted_ms
            self._measured_ms += measured_ms
            self._time_gap_ms += abs(measured_ms - predicted_ms)

    def _add_rounds(
        self, tokens: Integers, verified: Integers, accepted: Integers, regime: Integers, logits: Floats
    ) -> None:
        self._rounds += np.bincount(regime, minlength=len(REGIMES))
        self._round_tokens += int(tokens.sum())
        self._verified += int(verified.sum())
        self._accepted += int(accepted.sum())
        positions = np.arange(self._block, dtype=np.int64)
        is_judged = judged_lengths(tokens, verified, accepted)[:, None] > positions
        is_accepted = accepted[:, None] > positions
        self._judged += is_judged.sum(axis=0)
        self._reached += (is_judged & (accepted[:, None] >= positions)).sum(axis=0)
        self._passed += is_accepted.sum(axis=0)
        survivals = self._calibration.survivals(logits, regime)
        # A broken confidence costs time, never a token, so it is counted and stops nothing.
        is_number = ~np.isnan(survivals)
        self._without_confidence += int((~is_number).any(axis=1).sum())
        is_verified = verified[:, None] > positions
        self._expected_tokens += len(tokens) + float(survivals[is_verified & is_number].sum())
        self._add_predictions(survivals, is_judged & is_number, is_accepted, regime)

    def _add_predictions(
        self,
        survivals: Floats,
        is_judged: NDArray[np.bool_],
        is_accepted: NDArray[np.bool_],
        regime: Integers,
    ) -> None:
        rows, columns = np.nonzero(is_judged)
        predicted, observed = survivals[rows, columns], is_accepted[rows, columns]
        bins = np.minimum((predicted * FINE_BINS).astype(np.int64), FINE_BINS - 1)
        where = (regime[rows], columns, bins)
        np.add.at(self._bin_count, where, 1)
        np.add.at(self._bin_accepted, where, observed.astype(np.int64))
        np.add.at(self._bin_predicted, where, predicted)
        np.add.at(self._squared_error, where[:2], np.square(predicted - observed))

    def reliability(self, position: int, regime: int | None = None) -> Reliability:
        """Give the reliability diagram of one position's calibrated survival.

        Positions that were not verified have no outcome: under a schedule this judges what it chose.

        Args:
            position: 1..K, as in the formulas.
            regime: index into `REGIMES`, None for all.

        Returns:
            Mean prediction, observed share and number of each of the 20 bins.
        """
        chosen = slice(None) if regime is None else slice(regime, regime + 1)
        tables = (self._bin_predicted, self._bin_accepted, self._bin_count)
        sums = [table[chosen, position - 1].sum(axis=0).reshape(NUM_BINS, -1).sum(axis=1) for table in tables]
        return Reliability.from_sums(*sums)

    def summary(self) -> DraftSummary:
        """Give everything counted so far, as means."""
        rounds, steps = int(self._rounds.sum()), self._timed_steps
        count, accepted = self._bin_count.sum(axis=0), self._bin_accepted.sum(axis=0)
        return DraftSummary(
            steps=self._steps,
            tokens=self._tokens,
            tokens_per_slot_step=ratio(self._tokens, self._slot_steps),
            rounds=rounds,
            rounds_by_regime=dict(zip(REGIMES, self._rounds.tolist(), strict=True)),
            rounds_without_confidence=self._without_confidence,
            verified=self._verified,
            accepted=self._accepted,
            tau=ratio(self._round_tokens, rounds),
            expected_tau=ratio(self._expected_tokens, rounds),
            mean_verified=ratio(self._verified, rounds),
            draft_acceptance=ratio(self._accepted, self._verified),
            verify_rate=ratio(self._accepted + rounds, self._verified + rounds),
            unconditional_acceptance=ratios(self._passed, self._judged),
            conditional_acceptance=ratios(self._passed, self._reached),
            calibration_error=tuple(self.reliability(k + 1).error for k in range(self._block)),
            brier=ratios(self._squared_error.sum(axis=0), count.sum(axis=1)),
            auroc=tuple(_area(accepted[k], count[k] - accepted[k]) for k in range(self._block)),
            choices={self._choice_name(key): self._choices[key] for key in sorted(self._choices)},
            timed_steps=steps,
            predicted_ms=ratio(self._predicted_ms, steps),
            measured_ms=ratio(self._measured_ms, steps),
            time_error=ratio(self._time_gap_ms, self._measured_ms),
        )

    def _choice_name(self, choice: int) -> str:
        if choice == NOTHING:
            return "no schedule"
        if choice == NO_DRAFT:
            return "no draft"
        return f"{self._budgets[choice - 1]} rows" if choice <= len(self._budgets) else "full block"


def _area(positives: Integers, negatives: Integers) -> float:
    """Area under the ROC curve from counts by rising score; equal bins count half, NaN without either."""
    above = positives.sum() - np.cumsum(positives)
    wins = float((negatives * (above + positives / 2)).sum())
    return ratio(wins, float(positives.sum()) * float(negatives.sum()))
