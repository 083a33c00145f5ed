"""The switch between implementations, and the words of refused operands."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from deepinfer_jax.kernels import ImplementationError, RowGeometry
from deepinfer_jax.kernels.checks import Operand, check_geometry, check_operands
from deepinfer_jax.kernels.dispatch import Unavailable, choose


def fast() -> str:
    return "fast"


def slow() -> str:
    return "slow"


BOTH = {"fast": fast, "slow": slow}
NO_DEVICE = {"fast": Unavailable("needs a GPU of compute capability 9.0"), "slow": slow}


def test_best_comes_first() -> None:
    assert choose("op", None, BOTH) is fast


def test_best_that_can_run_is_chosen() -> None:
    assert choose("op", None, NO_DEVICE) is slow


def test_named_one_is_chosen() -> None:
    assert choose("op", "slow", BOTH) is slow


def test_unknown_name_is_refused_with_what_exists() -> None:
    with pytest.raises(ImplementationError, match=r"op: got implementation 'other'.*'fast', 'slow'"):
        choose("op", "other", BOTH)


def test_name_that_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ImplementationError, match=r"op: implementation 'fast' cannot run: needs a GPU.*'slow'"
    ):
        choose("op", "fast", NO_DEVICE)


def test_nothing_that_can_run_is_refused_with_the_reasons() -> None:
    with pytest.raises(
        ImplementationError, match=r"op: no implementation can run: 'fast' \(not here: busy\)"
    ):
        choose("op", None, {"fast": Unavailable("busy")})


def test_error_is_a_value_error() -> None:
    assert issubclass(ImplementationError, ValueError)


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((3, 4), "R D", r"op: y: got shape \(3, 4\), expected \[R=2, D=4\]"),
        ((2, 4, 1), "R D", r"op: y: got shape \(2, 4, 1\), expected \[R=2, D=4\]"),
        ((2,), "R D", r"op: y: got shape \(2,\), expected \[R=2, D=4\]"),
        ((), "R D", r"op: y: got shape \(\), expected \[R=2, D=4\]"),
    ],
    ids=["size", "more_dimensions", "fewer_dimensions", "scalar"],
)
def test_shapes_that_do_not_fit_are_refused(shape, dims: str, message: str) -> None:
    operands = {"x": Operand(jnp.zeros((2, 4)), "R D"), "y": Operand(jnp.zeros(shape), dims)}
    with pytest.raises(ValueError, match=message):
        check_operands("op", operands)


def test_dtypes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="op: x: got dtype int32, expected float32 or bfloat16"):
        check_operands("op", {"x": Operand(jnp.zeros(2, jnp.int32), "R", ("float32", "bfloat16"))})


def test_sizes_are_found() -> None:
    operands = {"x": Operand(jnp.zeros((2, 4)), "R D"), "y": Operand(jnp.zeros((4, 5)), "D F")}
    assert check_operands("op", operands) == {"R": 2, "D": 4, "F": 5}


@pytest.mark.parametrize("per_block", [0, 4], ids=["none", "no_divisor"])
def test_blocks_that_do_not_divide_the_rows_are_refused(per_block: int) -> None:
    zeros = jnp.zeros(6, jnp.int32)
    geometry = RowGeometry(zeros, zeros, zeros > 0, zeros, rows_per_block=per_block)
    with pytest.raises(
        ValueError, match=f"rows_per_block: got {per_block}, expected a positive divisor of 6"
    ):
        check_geometry("op", geometry, 6)
