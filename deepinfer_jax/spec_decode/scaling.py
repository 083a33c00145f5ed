"""Scaling of confidences by a temperature and a shift, for acceptance that the head was not taught.

The head is trained on what rejection sampling accepts. Greedy and coupled verification accept less, the more
so where the draft is unsure, which no temperature can tell: it leaves a confidence of one half where it is.
Separate from `calibrate.py`, whose temperatures are the published method.
Read next: `calibration.py`, which keeps the result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .calibrate import SMALLEST, check_rounds, confidences_of

Floats = NDArray[np.float64]

TEMPERATURES = np.geomspace(0.25, 6.0, 24)
OFFSETS = np.linspace(-3.0, 3.0, 49)
"""First grid; a finer one around its best point follows."""

REFINEMENTS = 2


class Scaling(NamedTuple):
    """A calibrated logit is (z + shift) / temperature: float64 [K] each."""

    temperatures: Floats
    shifts: Floats


def fit_scaling(logits: ArrayLike, num_accepted: ArrayLike, num_verified: ArrayLike) -> Scaling:
    """Fit temperature and shift of each position, from left to right, to the survivals' log-likelihood.

    (T_k, s_k) = argmin of the mean log loss of c_1 ... c_{k-1} sigmoid((z_k + s) / T) against 1[the first k
    drafts are accepted], with all before fixed. Monotone in z_k, so that no ranking of a position changes.

    Args:
        logits: float64 [n, K] raw confidence logits.
        num_accepted: int [n] drafts accepted.
        num_verified: int [n] drafts whose outcome is known; must be K everywhere.

    Returns:
        The scaling.

    Raises:
        ValueError: as `calibrate.fit_temperatures`.

    Source: spec/dspark.md section 5.6, with a shift and a log loss.
    """
    table, accepted = np.asarray(logits, np.float64), np.asarray(num_accepted, np.int64)
    check_rounds(table, accepted, np.asarray(num_verified, np.int64), TEMPERATURES)
    prefix = np.ones(len(table), np.float64)
    temperatures, shifts = [], []
    for k in range(table.shape[1]):
        temperature, offset = _best(table[:, k], prefix, accepted > k)
        temperatures.append(temperature)
        shifts.append(offset * temperature)
        prefix = prefix * confidences_of(table[:, k, None] + shifts[-1], [temperature])[:, 0]
    return Scaling(np.asarray(temperatures, np.float64), np.asarray(shifts, np.float64))


def _best(logits: Floats, prefix: Floats, is_accepted: NDArray[np.bool_]) -> tuple[float, float]:
    """Search temperature and offset, which is added after the division."""
    temperatures, offsets = TEMPERATURES, OFFSETS
    temperature, offset = 1.0, 0.0
    for _ in range(1 + REFINEMENTS):
        losses = [
            [_loss(logits / temperature + offset, prefix, is_accepted) for offset in offsets]
            for temperature in temperatures
        ]
        row, column = np.unravel_index(int(np.argmin(losses)), (len(temperatures), len(offsets)))
        temperature, offset = float(temperatures[row]), float(offsets[column])
        ratio, step = temperatures[1] / temperatures[0], offsets[1] - offsets[0]
        temperatures = temperature * np.geomspace(1 / ratio, ratio, 9)
        offsets = offset + np.linspace(-step, step, 9)
    return temperature, offset


def _loss(scaled: Floats, prefix: Floats, is_accepted: NDArray[np.bool_]) -> float:
    chance = np.clip(prefix * confidences_of(scaled[:, None], [1.0])[:, 0], SMALLEST, 1 - SMALLEST)
    return float(-np.log(np.where(is_accepted, chance, 1 - chance)).mean())
