"""The assertion that all numerical tests use can fail, and says where and by how much.

Read next: `deepinfer_jax/testing/tolerances.py`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.testing.tolerances import TOLERANCES, assert_close

EXPECTED = np.arange(6, dtype=np.float32).reshape(2, 3)


def with_error(size: float) -> np.ndarray:
    changed = EXPECTED.copy()
    changed[1, 2] += size
    return changed


def test_equal_arrays_of_any_dtype_pass() -> None:
    for name in TOLERANCES:
        assert_close(EXPECTED.astype(ml_dtypes.bfloat16), EXPECTED, name)
    assert_close(np.zeros((0, 3)), np.zeros((0, 3)), "golden_float32")


def test_failure_shows_position_and_values() -> None:
    with pytest.raises(AssertionError, match=r"largest at \(1, 2\) .*got 5\.5, expected 5; 1 of 6 elements"):
        assert_close(with_error(0.5), EXPECTED, "golden_float32")


@pytest.mark.parametrize("name", sorted(TOLERANCES))
def test_each_limit_separates(name: str) -> None:
    measure, limit = TOLERANCES[name].measure, TOLERANCES[name].limit
    scale = {"max_abs": 1.0, "max_relative": 5.0, "relative_l2": float(np.linalg.norm(EXPECTED))}[measure]
    zeros = EXPECTED.astype(np.float64)
    below, above = zeros.copy(), zeros.copy()
    below[1, 2] += 0.99 * limit * scale
    above[1, 2] += 1.01 * limit * scale
    assert_close(below, zeros, name)
    with pytest.raises(AssertionError, match=name):
        assert_close(above, zeros, name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_side_fails(value: float) -> None:
    for found, wanted in ((with_error(value), EXPECTED), (EXPECTED, with_error(value))):
        with pytest.raises(AssertionError, match="golden_float32"):
            assert_close(found, wanted, "golden_float32")


def test_equal_infinities_pass_and_equal_nans_do_not() -> None:
    assert_close(with_error(np.inf), with_error(np.inf), "golden_float32")
    with pytest.raises(AssertionError):
        assert_close(with_error(np.nan), with_error(np.nan), "golden_float32")


def test_other_shapes_fail() -> None:
    with pytest.raises(AssertionError, match=r"shape \(3, 2\), expected \(2, 3\)"):
        assert_close(EXPECTED.reshape(3, 2), EXPECTED, "golden_float32")


def test_unknown_tolerance_is_refused() -> None:
    with pytest.raises(KeyError, match="loose"):
        assert_close(EXPECTED, EXPECTED, "loose")
