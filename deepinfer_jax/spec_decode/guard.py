"""Watching whether steps take as long as the cost table says.

Separate from the table because it lives with a running engine and the table with a file.
Read next: `costs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

MIN_STEPS = 20
"""Steps of one kind before it is judged."""

MAX_ERROR = 0.3
"""Relative error of the mean that is still trusted."""

DECAY = 0.9
"""Weight of the past in the exponential mean: it remembers about ten steps."""

MAX_FACTOR = 4.0
"""One step counts as this many times slower or faster at most: a pause of the host is no trend."""


@dataclass(slots=True)
class _Kind:
    steps: int = 0
    mean: float = 0.0
    weight: float = 0.0


class Guard:
    """Compares predicted with measured step times, and trips where they part for good.

    Of each kind of step it keeps the exponential mean of log(measured / predicted), as a ratio's errors
    up and down weigh the same there. Once tripped it stays so.

    Args:
        min_steps: steps of one kind before it is judged.
        max_error: largest |measured / predicted - 1| of the mean.

    Source: spec/dspark.md section 5.3 (a wrong table makes verification slower than no schedule).
    """

    def __init__(self, min_steps: int = MIN_STEPS, max_error: float = MAX_ERROR) -> None:
        self._min_steps = min_steps
        self._max_error = max_error
        self.reset()

    def reset(self) -> None:
        """Forget all steps, as after a new table."""
        self._kinds: dict[Hashable, _Kind] = {}
        self._reason = ""

    @property
    def is_tripped(self) -> bool:
        """Whether the table is refuted."""
        return bool(self._reason)

    @property
    def reason(self) -> str:
        """What refuted it and what to do; empty before."""
        return self._reason

    def observe(self, kind: Hashable, predicted_ms: float, measured_ms: float) -> bool:
        """Note one step.

        Args:
            kind: steps of equal kind are judged together, such as the schedule's choice; its words are in
                the reason.
            predicted_ms: by the table, positive.
            measured_ms: taken, 0 or more.

        Returns:
            Whether this step tripped the guard.

        Raises:
            ValueError: times that are not such numbers.
        """
        if not (0 < predicted_ms < math.inf and 0 <= measured_ms < math.inf):
            raise ValueError(
                f"guard: got {predicted_ms} ms predicted and {measured_ms} ms measured, expected positive "
                "numbers; pass milliseconds"
            )
        if self._reason:
            return False
        seen = self._kinds.setdefault(kind, _Kind())
        factor = min(max(measured_ms / predicted_ms, 1 / MAX_FACTOR), MAX_FACTOR)
        seen.steps += 1
        seen.mean = DECAY * seen.mean + (1 - DECAY) * math.log(factor)
        seen.weight = DECAY * seen.weight + (1 - DECAY)
        ratio = math.exp(seen.mean / seen.weight)
        if seen.steps < self._min_steps or abs(ratio - 1) <= self._max_error:
            return False
        self._reason = (
            f"steps of kind {kind!r} took {ratio:.2f} times as long as the cost table says (mean of "
            f"{seen.steps} steps, last {measured_ms:.3g} ms against {predicted_ms:.3g} ms), expected 1 +- "
            f"{self._max_error:g}; the full block is verified from now on; measure the step times again"
        )
        return True
