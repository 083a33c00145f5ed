"""Scaling of confidences by a temperature, a shift and a base, for acceptance that the head was not taught.

The head is trained on what rejection sampling accepts. Greedy and coupled verification accept less, the more
so where the draft is unsure, which no temperature can tell: it leaves a confidence of one half where it is.
Greedy choices also agree at times where the distributions have next to nothing in common: there acceptance
does not fall to nothing with the confidence, and the base keeps it up.
Separate from `calibrate.py`, whose temperatures are the published method.
Read next: `calibration.py`, which keeps the result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .calibrate import SMALLEST, check_rounds, confidences_of

Floats = NDArray[np.float64]

TEMPERATURES = np.geomspace(0.25, 6.0, 24)
OFFSETS = np.linspace(-3.0, 3.0, 49)
"""First grid; a finer one around its best point follows."""

REFINEMENTS = 2

BASES = (0.0, 1.0)
"""Added to the odds: nothing, or 1, which makes 1 / t of the odds (1 - t) / t at distance t."""


class Scaling(NamedTuple):
    """A calibrated logit is (log(e^z + base) + shift) / temperature: float64 [K] each."""

    temperatures: Floats
    shifts: Floats
    bases: Floats


def with_base(logits: ArrayLike, bases: ArrayLike) -> Floats:
    """Add a base to the odds that logits are of: log(e^z + base).

    Args:
        logits: [n, K] raw confidence logits z, or [n] of one position.
        bases: 0 or more: [K], [n, K] where rows have their own, or one number.

    Returns:
        float64, as the logits.
    """
    # The logarithm of no base is minus infinity, which adds nothing; what is no number stays so.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.logaddexp(np.asarray(logits, np.float64), np.log(np.asarray(bases, np.float64)))


def fit_scaling(logits: ArrayLike, num_accepted: ArrayLike, num_verified: ArrayLike) -> Scaling:
    """Fit each position's temperature, shift and base, left to right, to the survivals' log-likelihood.

    (T_k, s_k, b_k) = argmin of the mean log loss of c_1 ... c_{k-1} sigmoid((log(e^z_k + b) + s) / T) against
    1[the first k drafts are accepted], with all before fixed and b one of `BASES`. Monotone in z_k, so that
    no ranking of a position changes.

    Args:
        logits: float64 [n, K] raw confidence logits.
        num_accepted: int [n] drafts accepted.
        num_verified: int [n] drafts whose outcome is known; must be K everywhere.

    Returns:
        The scaling.

    Raises:
        ValueError: as `calibrate.fit_temperatures`.

    Source: spec/dspark.md section 5.6, with a shift, a base and a log loss.
    """
    table, accepted = np.asarray(logits, np.float64), np.asarray(num_accepted, np.int64)
    check_rounds(table, accepted, np.asarray(num_verified, np.int64), TEMPERATURES)
    prefix = np.ones(len(table), np.float64)
    found = []
    for k in range(table.shape[1]):
        raised = [with_base(table[:, k], base) for base in BASES]
        fits = [_best(one, prefix, accepted > k) for one in raised]
        best = int(np.argmin([loss for _, _, loss in fits]))
        temperature, offset, _ = fits[best]
        shift = offset * temperature
        found.append((temperature, shift, BASES[best]))
        prefix = prefix * confidences_of((raised[best] + shift)[:, None], [temperature])[:, 0]
    columns = np.asarray(found, np.float64).T
    return Scaling(columns[0], columns[1], columns[2])


def _best(logits: Floats, prefix: Floats, is_accepted: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Search temperature and offset, which is added after the division, and tell their loss."""
    temperatures, offsets = TEMPERATURES, OFFSETS
    temperature, offset, loss = 1.0, 0.0, math.inf
    for _ in range(1 + REFINEMENTS):
        losses = [
            [_loss(logits / temperature + offset, prefix, is_accepted) for offset in offsets]
            for temperature in temperatures
        ]
        row, column = np.unravel_index(int(np.argmin(losses)), (len(temperatures), len(offsets)))
        temperature, offset = float(temperatures[row]), float(offsets[column])
        loss = losses[row][column]
        ratio, step = temperatures[1] / temperatures[0], offsets[1] - offsets[0]
        temperatures = temperature * np.geomspace(1 / ratio, ratio, 9)
        offsets = offset + np.linspace(-step, step, 9)
    return temperature, offset, loss


def _loss(scaled: Floats, prefix: Floats, is_accepted: NDArray[np.bool_]) -> float:
    chance = np.clip(prefix * confidences_of(scaled[:, None], [1.0])[:, 0], SMALLEST, 1 - SMALLEST)
    return float(-np.log(np.where(is_accepted, chance, 1 - chance)).mean())
