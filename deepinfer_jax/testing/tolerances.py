"""The one table of numerical tolerances, by name, and the assertion that reads it.

Separate so that no test carries a number of its own and every number says where it comes from.
Read next: the tests; `assert_close(actual, expected, "golden_float32")` is how they compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from what is expected.

    Args:
        measure: "max_abs" is max |a - e|; "max_relative" is that over max |e|; "relative_l2" is
            ||a - e|| / ||e|| over the whole array.
        limit: largest value of the measure that passes, inclusive.
        source: where the limit comes from.
    """

    measure: Literal["max_abs", "max_relative", "relative_l2"]
    limit: float
    source: str


TOLERANCES: dict[str, Tolerance] = {
    "golden_float32": Tolerance(
        "max_abs", 1e-4, "golden README, `*_kvquant_off`: two implementations differ by 6e-6 to 1.2e-5"
    ),
    "golden_cache_quantized": Tolerance(
        "max_abs", 1e-4, "golden README, `*_kvquant_on`: noise of 3e-7 in the weights gave < 2e-5, no flips"
    ),
    "golden_dequantized_weights": Tolerance(
        "max_abs", 1e-4, "golden README, `logits_f32_weights_dequantized_*`: agree to 6e-6 without flips"
    ),
    "golden_quantized_activations": Tolerance(
        "max_abs", 1e-3, "golden README, `logits_f32_actquant_*`, where no rounding flips"
    ),
    "golden_bf16_smoke": Tolerance(
        "relative_l2", 0.06, "golden README, `bf16_all_quant.layers.0.out`: 0.9 to 6 % a token between two"
    ),
    "equivalence_float32": Tolerance(
        "max_abs", 1e-4, "golden README: decode and one-shot forward of one implementation agree to 8e-6"
    ),
    "formula_float32": Tolerance(
        "max_abs", 1e-6, "a few float32 roundings (6e-8 each) of a value near 1, against float64"
    ),
    "formula_float64": Tolerance(
        "max_abs",
        1e-9,
        "float64 means of some hundred values below 100; dspark_scheduler_cases.json asks 1e-9",
    ),
    "operation_float32": Tolerance(
        "max_abs", 1e-5, "float32 sums of some tens of products near 1, against float64"
    ),
    "operation_bfloat16": Tolerance(
        "relative_l2", 1e-2, "two or three roundings to bfloat16, of 2^-9 at most each, against float64"
    ),
    "operation_fp8_flips": Tolerance(
        "relative_l2", 3e-2, "bfloat16 as above; a hidden value that flips to its e4m3 neighbour moves by 6 %"
    ),
    "rotation_at_5000": Tolerance(
        "max_abs", 1e-3, "an angle of 5000 is a float32 product: half a unit in its last place is 2.4e-4"
    ),
    "gradient_finite_difference": Tolerance(
        "max_relative", 2e-2, "float32 central differences: truncation and rounding errors meet near 1 %"
    ),
}
"""Every tolerance of the tests. A limit is widened only with a measured reason in its source."""


def assert_close(actual: ArrayLike, expected: ArrayLike, tolerance_name: str) -> None:
    """Fail unless two arrays agree within a named tolerance.

    Infinities must be equal in place; a NaN on either side fails.

    Args:
        actual: the computed array, of any numeric dtype.
        expected: the reference, of the same shape.
        tolerance_name: a key of `TOLERANCES`.

    Raises:
        AssertionError: the shapes differ, or the error exceeds the limit; the message shows the
            position of the largest error and both values there.
        KeyError: the tolerance is not in the table.
    """
    tolerance = TOLERANCES[tolerance_name]
    found, wanted = _as_float64(actual), _as_float64(expected)
    if found.shape != wanted.shape:
        raise AssertionError(f"{tolerance_name}: shape {found.shape}, expected {wanted.shape}")
    if not found.size:
        return
    error = _elementwise_error(found, wanted)
    measured = _measure(error, wanted, tolerance.measure)
    if measured <= tolerance.limit:
        return
    position = tuple(int(index) for index in np.unravel_index(np.argmax(error), error.shape))
    raise AssertionError(
        f"{tolerance_name}: {tolerance.measure} error {measured:.3g} exceeds {tolerance.limit:g}; "
        f"largest at {position} of shape {found.shape}: got {found[position]:.9g}, "
        f"expected {wanted[position]:.9g}; {np.count_nonzero(error)} of {error.size} elements differ "
        f"(limit from: {tolerance.source})"
    )


def _as_float64(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(values).astype(np.float64)


def _elementwise_error(found: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    # Equal infinities subtract to NaN, and a NaN must count as the largest error, not vanish in a max.
    with np.errstate(invalid="ignore"):
        error = np.where(found == wanted, 0.0, np.abs(found - wanted))
    return np.where(np.isnan(error), np.inf, error)


def _measure(error: NDArray[np.float64], wanted: NDArray[np.float64], measure: str) -> float:
    if not error.any():
        return 0.0
    finite = np.where(np.isfinite(wanted), wanted, 0.0)
    with np.errstate(divide="ignore"):
        match measure:
            case "max_abs":
                return float(error.max())
            case "max_relative":
                return float(error.max() / np.abs(finite).max())
            case _:
                return float(np.linalg.norm(error) / np.linalg.norm(finite))
