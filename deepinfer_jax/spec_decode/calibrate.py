"""Making the draft's confidences mean what they say: sequential temperature scaling. NumPy only.

Separate because it happens once for a checkpoint, on the host, and the step only reads its result.
Read next: `calibration.py`, where that result is kept; `plots.py`, which draws it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 20
"""Equal bins of a prediction in [0, 1] (spec/dspark.md section 5.6)."""

SMALLEST = 1e-8
"""Predictions are clipped to [SMALLEST, 1 - SMALLEST], so that none is certain."""

DIGITS = 12
"""Calibration errors are compared after rounding, so that ties do not hang on the last bits."""

DEFAULT_GRID: NDArray[np.float64] = np.arange(4, 161, dtype=np.float64) / 20
"""Temperatures tried at each position: 0.2 to 8 in steps of 0.05."""

type Floats = NDArray[np.float64]
type Integers = NDArray[np.int64]


class Reliability(NamedTuple):
    """How often predictions came true, by equal bins of the prediction.

    Attributes:
        predicted: float64 [bins], mean prediction, NaN where a bin is empty.
        observed: float64 [bins], share that came true, NaN where a bin is empty.
        number: int64 [bins], predictions in the bin.
    """

    predicted: Floats
    observed: Floats
    number: Integers

    @classmethod
    def from_sums(cls, predicted: ArrayLike, observed: ArrayLike, number: ArrayLike) -> Reliability:
        """Divide sums over the predictions of each bin by how many there are.

        Args:
            predicted: [bins], sum of predictions.
            observed: [bins], how many came true.
            number: [bins], how many there are.

        Returns:
            The means.
        """
        counts = np.asarray(number, np.int64)
        divisor = np.where(counts > 0, counts, np.nan)
        sums = np.asarray(predicted, np.float64), np.asarray(observed, np.float64)
        return cls(sums[0] / divisor, sums[1] / divisor, counts)

    @property
    def error(self) -> float:
        """Expected calibration error: mean of |predicted - observed| weighted by number; NaN without any."""
        total = int(self.number.sum())
        if not total:
            return float("nan")
        gaps = np.abs(self.predicted - self.observed)
        return float(np.where(self.number > 0, gaps * self.number, 0.0).sum() / total)


def confidences_of(logits: ArrayLike, temperatures: ArrayLike) -> Floats:
    """Turn confidence logits into probabilities that a position is accepted if those before it are.

    c_k = sigmoid(z_k / T_k).

    Args:
        logits: [n, K] raw confidence logits z.
        temperatures: [K], or [n, K] where rows have their own.

    Returns:
        float64 [n, K] in [0, 1].

    Source: spec/dspark.md section 2.4.
    """
    scaled = np.asarray(logits, np.float64) / np.asarray(temperatures, np.float64)
    # 1 / (1 + exp(-x)) without overflow on either side; what is no number stays so.
    with np.errstate(invalid="ignore"):
        return np.exp(-np.logaddexp(0.0, -scaled))


def survivals_of(logits: ArrayLike, temperatures: ArrayLike) -> Floats:
    """Turn confidence logits into probabilities that a position and all before it are accepted.

    a_k = c_1 ... c_k.

    Args:
        logits: [n, K] raw confidence logits.
        temperatures: [K], or [n, K] where rows have their own.

    Returns:
        float64 [n, K], clipped to [SMALLEST, 1 - SMALLEST].

    Source: spec/dspark.md section 5.1.
    """
    products = np.cumprod(confidences_of(logits, temperatures), axis=1)
    return np.clip(products, SMALLEST, 1 - SMALLEST)


def bins_of(predictions: Floats, num_bins: int = NUM_BINS) -> Integers:
    """Number the equal bins of [0, 1] that predictions lie in: min(floor(bins p), bins - 1)."""
    return np.minimum((num_bins * predictions).astype(np.int64), num_bins - 1)


def reliability_of(predictions: Floats, is_true: ArrayLike, num_bins: int = NUM_BINS) -> Reliability:
    """Sort predictions into equal bins and compare them with what came true.

    bin = min(floor(bins p), bins - 1), with p clipped to [SMALLEST, 1 - SMALLEST].

    Args:
        predictions: float64 [n], probabilities.
        is_true: bool [n].
        num_bins: bins of [0, 1].

    Returns:
        The means of every bin.

    Source: spec/dspark.md section 5.6.
    """
    clipped = np.clip(predictions, SMALLEST, 1 - SMALLEST)
    bins = bins_of(clipped, num_bins)
    count = np.bincount(bins, minlength=num_bins)
    predicted = np.bincount(bins, weights=clipped, minlength=num_bins)
    observed = np.bincount(bins, weights=np.asarray(is_true, np.float64), minlength=num_bins)
    return Reliability.from_sums(predicted, observed, count)


def expected_calibration_error(predictions: Floats, is_true: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """Measure how far predictions are from what came true: mean |predicted - observed| over the bins.

    Args:
        predictions: float64 [n], probabilities.
        is_true: bool [n].
        num_bins: bins of [0, 1].

    Returns:
        The error, 0 (perfect) to 1; NaN without predictions.

    Source: spec/dspark.md section 5.6.
    """
    return reliability_of(predictions, is_true, num_bins).error


def calibration_errors(logits: ArrayLike, num_accepted: ArrayLike, temperatures: ArrayLike) -> Floats:
    """Measure the expected calibration error of the survival at every position.

    Args:
        logits: [n, K] raw confidence logits of fully verified rounds.
        num_accepted: int [n] drafts accepted.
        temperatures: [K].

    Returns:
        float64 [K], 0 to 1.

    Source: spec/dspark.md section 5.6.
    """
    return survival_errors(survivals_of(logits, temperatures), num_accepted)


def survival_errors(survivals: Floats, num_accepted: ArrayLike) -> Floats:
    """Measure the expected calibration error of survivals that are calibrated already.

    Args:
        survivals: [n, K], of fully verified rounds.
        num_accepted: int [n] drafts accepted.

    Returns:
        float64 [K], 0 to 1.

    Source: spec/dspark.md section 5.6.
    """
    accepted, positions = np.asarray(num_accepted), range(survivals.shape[1])
    errors = [expected_calibration_error(survivals[:, k], accepted > k) for k in positions]
    return np.asarray(errors, np.float64)


def reliability(
    logits: ArrayLike, num_accepted: ArrayLike, temperatures: ArrayLike, position: int
) -> Reliability:
    """Give the reliability diagram of one position's survival.

    Args:
        logits: [n, K] raw confidence logits of fully verified rounds.
        num_accepted: int [n] drafts accepted.
        temperatures: [K].
        position: 1..K, as in the formulas.

    Returns:
        Mean prediction, observed share and number of each of the 20 bins.

    Raises:
        ValueError: a position outside 1..K.

    Source: spec/dspark.md section 7.
    """
    survivals = survivals_of(logits, temperatures)
    if not 1 <= position <= survivals.shape[1]:
        raise ValueError(
            f"position: got {position}, expected 1..{survivals.shape[1]} (the block's drafts); choose one"
        )
    return reliability_of(survivals[:, position - 1], np.asarray(num_accepted) >= position)


def fit_temperatures(
    logits: ArrayLike, num_accepted: ArrayLike, num_verified: ArrayLike, grid: ArrayLike = DEFAULT_GRID
) -> Floats:
    """Fit one temperature a position, from left to right, so that survivals are calibrated.

    T_k = argmin_T ECE(c_1 ... c_{k-1} sigmoid(z_k / T), 1[the first k drafts are accepted]) over the grid,
    with T_1..T_{k-1} fixed; the smallest of equally good ones.

    Args:
        logits: float64 [n, K] raw confidence logits.
        num_accepted: int [n] drafts accepted.
        num_verified: int [n] drafts whose outcome is known; must be K everywhere.
        grid: float64 [G] temperatures to try, positive.

    Returns:
        float64 [K].

    Raises:
        ValueError: shapes that do not fit, no rounds, logits that are not finite, or truncated rounds: what
            the schedule left out tells nothing of what would have been accepted.

    Source: spec/dspark.md section 5.6.
    """
    table, accepted = np.asarray(logits, np.float64), np.asarray(num_accepted, np.int64)
    candidates = np.unique(np.asarray(grid, np.float64))
    check_rounds(table, accepted, np.asarray(num_verified, np.int64), candidates)
    prefix = np.ones(len(table), np.float64)
    chosen = []
    for k in range(table.shape[1]):
        confidences = confidences_of(table[:, k, None], candidates)
        errors = [
            round(expected_calibration_error(prefix * confidences[:, i], accepted > k), DIGITS)
            for i in range(len(candidates))
        ]
        # The first minimum: candidates rise.
        best = int(np.argmin(errors))
        chosen.append(candidates[best])
        prefix = prefix * confidences[:, best]
    return np.asarray(chosen, np.float64)


def check_rounds(logits: Floats, accepted: Integers, verified: Integers, grid: Floats) -> None:
    """Refuse rounds or temperatures that nothing can be fitted to.

    Args:
        logits: [n, K].
        accepted: [n].
        verified: [n].
        grid: [G], temperatures.

    Raises:
        ValueError: as `fit_temperatures`.
    """
    shapes = f"logits {logits.shape}, num_accepted {accepted.shape}, num_verified {verified.shape}"
    is_table = logits.ndim == 2 and logits.size > 0
    if not (is_table and accepted.shape == verified.shape == logits.shape[:1]):
        raise ValueError(
            f"calibration: got {shapes}, expected [n, K], [n] and [n] with n >= 1; pass one entry a round"
        )
    block = logits.shape[1]
    num_truncated = int(np.count_nonzero(verified != block))
    if num_truncated:
        raise ValueError(
            f"calibration: got {num_truncated} of {len(verified)} rounds with fewer than {block} drafts "
            "verified, expected fully verified traffic (what is left out has no label); generate with the "
            "schedule off and leave out rounds that a stop token cut"
        )
    if not np.isfinite(logits).all():
        raise ValueError("calibration: got logits that are not finite, expected numbers; check the draft")
    if accepted.min() < 0 or accepted.max() > block:
        raise ValueError(
            f"calibration: got num_accepted {accepted.min()}..{accepted.max()}, expected 0..{block}; count "
            "drafts only"
        )
    if not (grid.size and np.isfinite(grid).all() and grid.min() > 0):
        raise ValueError(
            "calibration: got a grid that is empty or not positive, expected temperatures; pass some"
        )
