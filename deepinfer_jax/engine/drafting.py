"""How an engine's drafts are controlled from the host: what each step is told, what is learnt of each.

Separate from `runner.py`, which gives steps to the devices, and from `engine.py`, which knows requests:
here are the cost table, the calibration, the guard that compares times with the table, the statistics.
Read next: `../speculate.py` (the step), `../spec_decode/costs.py`, `../spec_decode/guard.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..config import NOTHING, CacheConfig, ModelConfig
from ..engine_config import EngineConfig
from ..model.numerics import Numerics
from ..plans import DRAFT_MODES, PLAIN_STEP, PRIOR_CONFIDENCE
from ..sampling_params import SamplingParams
from ..sharding.layout import SINGLE
from ..spec_decode.budgets import HYSTERESIS, NO_DRAFT, StepCosts
from ..spec_decode.calibration import Calibration, regime_of, uncalibrated
from ..spec_decode.costs import CostTable, budgets_for
from ..spec_decode.guard import Guard
from ..spec_decode.rest import Rest
from ..spec_decode.stats import DraftStats
from ..speculate import PROBE_STEPS, Speculation, SpeculationPlan
from ..step import ONE_DEVICE, Target
from ..step_state import DraftOutput
from .target import num_slot_shares

NEEDS_COSTS = ("dynamic", "early_stop")
"""Schedules that weigh tokens against measured times."""


class Drafting:
    """Controls the drafts of one engine.

    Attributes:
        speculation: static choices of the step.
        stats: what came of drafts so far.
        guard: watches how long steps take.
        rest: says which steps leave drafts out because none paid.
        on_round: called with what is counted of each step, by the names that `DraftStats.add` has, and the
            `params` of each slot counted; None by default.
        notice: why the full block is verified instead of what was asked for; None if it is not.

    Args:
        config: the architecture.
        options: how requests are run, with drafts on.
        sizes: of the cache, over all devices.
        numerics: the choice of arithmetic.
        calibration: of the confidences; by default they stay as they are.
        costs: step times measured on these devices; without them the full block is verified in every step.
        target: where the weights lie.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineConfig,
        sizes: CacheConfig,
        numerics: Numerics,
        calibration: Calibration | None = None,
        costs: CostTable | None = None,
        target: Target = ONE_DEVICE,
    ) -> None:
        self.block_size, self.max_drafts = config.draft.block_size, options.num_drafts(config)
        self.calibration = calibration or uncalibrated(self.block_size)
        self.options, self.costs = options, costs
        self.slots_each = sizes.num_slots // num_slot_shares(target)
        tile, chooses = row_tile(numerics, target), options.drafts == "dynamic" and costs is not None
        # Budgets that are no tiles are a program each, several times as much to compile as one.
        budgets = budgets_for(self.slots_each, self.block_size, tile) if tile or chooses else ()
        self.speculation = Speculation(options.verification, budgets)
        self.stats = DraftStats(self.block_size, self.calibration, budgets)
        self.notice: str | None = None
        self.guard = Guard()
        self.on_round: Callable[..., object] | None = None
        self._schedule, self._forced = options.drafts, NOTHING
        if options.drafts in NEEDS_COSTS and costs is None:
            self._fall_back(
                f"drafts={options.drafts!r}: no measured step times for this engine; all drafts are "
                "verified. Measure them once with: deepinfer_jax costs"
            )
        self._scaling = self.calibration.arrays()
        max_rows = self.slots_each * (self.block_size + 1)
        by_slots = np.ones(self.slots_each + 1, np.float32)
        self._costs = StepCosts(0 * by_slots, np.ones(len(budgets) + 1, np.float32), by_slots)
        self._row_ms = np.ones(max_rows + 1, np.float32)
        if costs is not None:
            self._costs = StepCosts(*costs.arrays(budgets, self.slots_each))
            self._row_ms = costs.row_ms(max_rows)
        self._past: dict[int, np.ndarray] = {}
        self._prior = PRIOR_CONFIDENCE ** np.arange(1, self.block_size + 1)
        self._previous, self._num_skipped = NOTHING, 0
        self.rest = Rest(config.sliding_window)

    def plan(self, is_decoding: np.ndarray, choice: int) -> SpeculationPlan:
        """Say what the next step is told.

        Args:
            is_decoding: bool [B].
            choice: how many rows to verify, as `speculate.py` numbers it; NOTHING to choose on the devices.

        Returns:
            The plan, as NumPy arrays.
        """
        temperatures, shifts, bases = self._scaling
        return SpeculationPlan(
            is_active=is_decoding,
            schedule=np.int32(DRAFT_MODES.index(self._schedule)),
            max_drafts=np.int32(self.max_drafts),
            choice=np.int32(choice if self._forced == NOTHING else self._forced),
            threshold=np.float32(self.options.draft_threshold),
            temperatures=temperatures,
            shifts=shifts,
            bases=bases,
            costs=self._costs,
            row_ms=self._row_ms,
        )

    def choice(self, slots: Sequence[int]) -> int:
        """Say what the next step is told: the host's choice if that was asked for, else the devices choose.

        Either way a step is plain while drafts do not pay.

        Args:
            slots: that run their latest token.

        Returns:
            The choice, `PROBE`, `PLAIN_STEP`, `BARE_STEP`, or NOTHING to leave it to the devices.

        Source: spec/dspark.md section 9.4.
        """
        if not slots or self._schedule != "dynamic":
            return NOTHING
        if not self.options.choose_on_host:
            return self.rest.next(len(slots))
        choice = self._settle(self.thetas(slots))
        return PLAIN_STEP if choice == NO_DRAFT else choice

    def thetas(self, slots: Sequence[int]) -> np.ndarray:
        """Weigh the choices of a step as `budgets.budget_thetas` does, from the confidences that were read.

        Args:
            slots: that run their latest token.

        Returns:
            Tokens per millisecond, float64 [G + 2].

        Source: spec/dspark.md sections 9.3 and 9.4.
        """
        budgets = np.asarray(self.speculation.budgets)
        tokens = np.zeros(len(budgets) + 2)
        shares: dict[int, list[np.ndarray]] = {}
        for slot in slots:
            past = self._past.get(slot, self._prior)[: self.max_drafts]
            shares.setdefault(slot // self.slots_each, []).append(past)
        for past in shares.values():
            gains = np.append(0.0, np.cumsum(np.sort(np.concatenate(past))[::-1]))
            room = budgets - len(past)
            filled = np.where(room >= 0, gains[np.clip(room, 0, len(gains) - 1)], -np.inf)
            tokens += len(past) + np.concatenate([[0.0], filled, gains[-1:]])
        most = max(map(len, shares.values()))
        drafted_ms = self._costs.draft_ms[most] + self._costs.verify_ms
        return tokens / np.append(self._costs.plain_ms[most], drafted_ms)

    def output_of(self, output: Any) -> DraftOutput:
        """Give what a step tells of drafts; of a plain step, that there were none.

        Args:
            output: of the step, as NumPy arrays.

        Returns:
            The same in either case.
        """
        if output.drafts is not None:
            return output.drafts
        has_run = (output.num_tokens > 0) | output.is_invalid
        nothing = np.zeros(len(has_run), np.int32)
        logits: Any = np.zeros((len(has_run), self.block_size), np.float32)
        counts: Any = {"num_verified": nothing, "num_accepted": nothing, "choice": nothing}
        return DraftOutput(num_rows=has_run.astype(np.int32), logits=logits, **counts)

    def note(
        self,
        params: Mapping[int, SamplingParams],
        output: Any,
        told: int = NOTHING,
        measured_ms: float | None = None,
    ) -> None:
        """Learn from a step.

        Args:
            params: of the requests that took part, by slot.
            output: of the step, as NumPy arrays.
            told: what the step was told.
            measured_ms: how long it took, None where that says nothing of the step alone.
        """
        slots = [slot for slot in sorted(params) if output.num_tokens[slot] > 0]
        if not slots:
            return
        drafts, regimes = self.output_of(output), [regime_of(params[slot]) for slot in slots]
        choice = int(drafts.choice[slots[0]])
        self.rest.note(told, choice, len(slots))
        is_plain = output.drafts is None
        predicted = None if self.costs is None else self._predicted_ms(drafts, choice, is_plain)
        counts = {
            "num_tokens": output.num_tokens[slots],
            "num_verified": drafts.num_verified[slots],
            "num_accepted": drafts.num_accepted[slots],
            "logits": drafts.logits[slots],
            "regimes": np.asarray(regimes),
        }
        if self.on_round is not None:
            self.on_round(params=[params[slot] for slot in slots], **counts)
        self.stats.add(
            **counts,
            choice=choice,
            predicted_ms=None if measured_ms is None else predicted,
            measured_ms=None if predicted is None else measured_ms,
        )
        if choice != NO_DRAFT:
            survivals = self.calibration.survivals(drafts.logits[slots], regimes)
            self._past.update(zip(slots, survivals, strict=True))
        if predicted is not None and measured_ms is not None and self._forced == NOTHING:
            if self._schedule in NEEDS_COSTS and self.guard.observe(choice, predicted, measured_ms):
                self._fall_back(f"drafts: {self.guard.reason}")

    def forget(self, slot: int) -> None:
        """Forget the confidences of a slot that another request gets."""
        self._past.pop(slot, None)

    def _predicted_ms(self, drafts: Any, choice: int, is_plain: bool) -> float:
        shares = drafts.num_rows.reshape(-1, self.slots_each)
        rows, active = int(shares.sum(axis=1).max()), int((shares > 0).sum(axis=1).max())
        if is_plain:
            return float(self._costs.plain_ms[active])
        is_budget = 0 < choice <= len(self.speculation.budgets)
        verify = self._costs.verify_ms[choice - 1] if is_budget else self._row_ms[rows]
        return float(verify + (0.0 if choice == NO_DRAFT else self._costs.draft_ms[active]))

    def _settle(self, thetas: np.ndarray) -> int:
        """Stay with the choice before unless another is clearly better; try drafts now and then."""
        best = int(np.argmax(thetas))
        if self._previous >= 0 and thetas[best] <= (1 + HYSTERESIS) * thetas[self._previous]:
            best = self._previous
        if best == NO_DRAFT and self._num_skipped >= PROBE_STEPS:
            best = 1 + int(np.argmax(np.isfinite(thetas[1:])))
        self._num_skipped = self._num_skipped + 1 if best == NO_DRAFT else 0
        self._previous = best
        return best

    def _fall_back(self, notice: str) -> None:
        """Verify the full block from now on, and say why."""
        self.notice = notice
        self._schedule, self._forced = "fixed", self.speculation.uniform
        warnings.warn(notice, RuntimeWarning, stacklevel=2)


def row_tile(numerics: Numerics, target: Target) -> int | None:
    """Give the rows of a tile where tiles without rows are skipped, None where every budget is compiled."""
    return numerics.row_tile if numerics.batch_invariant and target.layout == SINGLE else None
