"""Which rows each training step reads: a pure function of seed and step.

Separate so that a run resumes from a step number alone, with no data-loader state to save.
Read next: `data.py`, which makes the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Mixture:
    """A schedule over kinds of text: the first kind alone, then all kinds by their shares.

    Args:
        num_rows: rows of each kind; a batch index counts through the kinds in this order.
        batch_rows: rows of a step.
        num_steps: steps of the run.
        shares: share of each kind's rows after the first phase; rows are equally long and nearly full,
            so this is the share of tokens.
        first_kind_fraction: part of the steps that reads the first kind only.

    Raises:
        ValueError: sizes that are not positive, or shares that do not sum to 1.

    Source: spec/nano_model.md section 5 (curriculum) and section 6 (shares).
    """

    num_rows: tuple[int, ...]
    batch_rows: int
    num_steps: int
    shares: tuple[float, ...] = (0.58, 0.25, 0.17)
    first_kind_fraction: float = 0.3

    def __post_init__(self) -> None:
        if min(*self.num_rows, self.batch_rows, self.num_steps) < 1:
            raise ValueError(f"mixture sizes: got {self}, expected positive numbers; check the corpus folder")
        if len(self.shares) != len(self.num_rows) or not math.isclose(sum(self.shares), 1.0):
            raise ValueError(
                f"shares: got {self.shares}, expected {len(self.num_rows)} numbers that sum to 1; "
                "give one share for each kind"
            )

    @property
    def first_mixed_step(self) -> int:
        """The step from which all kinds are read."""
        return round(self.num_steps * self.first_kind_fraction)


def rows_before(mixture: Mixture, step: int) -> tuple[int, ...]:
    """Count the rows of each kind that the steps before `step` have read.

    Args:
        mixture: the schedule.
        step: 0 to `num_steps`.

    Returns:
        One count for each kind; they sum to `step * batch_rows`.

    Raises:
        ValueError: a step outside the run.
    """
    if not 0 <= step <= mixture.num_steps:
        raise ValueError(f"step: got {step}, expected 0..{mixture.num_steps}; lengthen the schedule")
    mixed = max(step - mixture.first_mixed_step, 0) * mixture.batch_rows
    # Whole rows by rounding down the running total: no step is off its share by more than a row.
    others = [math.floor(mixed * share) for share in mixture.shares[1:]]
    return (step * mixture.batch_rows - sum(others), *others)


def batch_indices(mixture: Mixture, seed: int, step: int) -> np.ndarray:
    """Choose the rows of one step.

    Args:
        mixture: the schedule.
        seed: of the order of rows; every epoch of a kind is another permutation of all its rows.
        step: 0 to `num_steps - 1`.

    Returns:
        int32 [batch_rows], numbers of rows in the concatenation of all kinds.

    Raises:
        ValueError: a step outside the run.
    """
    begin, end = rows_before(mixture, step), rows_before(mixture, step + 1)
    chosen: list[np.ndarray] = []
    offset = 0
    for kind, count in enumerate(mixture.num_rows):
        drawn = np.arange(begin[kind], end[kind])
        for epoch in np.unique(drawn // count):
            order = _epoch_order(seed, kind, int(epoch), count)
            chosen.append(offset + order[drawn[drawn // count == epoch] % count])
        offset += count
    return np.concatenate(chosen).astype(np.int32)


def steps_indices(mixture: Mixture, seed: int, first_step: int, num_steps: int) -> np.ndarray:
    """Choose the rows of successive steps, for a scan on the device.

    Args:
        mixture: the schedule.
        seed: as in `batch_indices`.
        first_step: the first step.
        num_steps: how many steps, at least 1.

    Returns:
        int32 [num_steps, batch_rows].
    """
    return np.stack([batch_indices(mixture, seed, first_step + i) for i in range(num_steps)])


@lru_cache(maxsize=16)
def _epoch_order(seed: int, kind: int, epoch: int, count: int) -> np.ndarray:
    order = np.random.default_rng([seed, kind, epoch]).permutation(count)
    order.setflags(write=False)  # cached: shared by all callers
    return order
