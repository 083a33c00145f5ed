"""Hyper-connections: every implementation on every case against NumPy float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.kernels import (
    ImplementationError,
    Mixes,
    collapse,
    enter_site,
    initial_streams,
    leave_site,
)
from deepinfer_jax.kernels.pallas.hyper_connection.api import ENTER_IMPLEMENTATIONS, LEAVE_IMPLEMENTATIONS
from deepinfer_jax.kernels.pallas.hyper_connection.cases import CASES, HyperCase
from deepinfer_jax.kernels.pallas.hyper_connection.ref import normalize_mix
from deepinfer_jax.testing import references
from deepinfer_jax.testing.battery import call_op, named_operands, tiny_cases
from deepinfer_jax.testing.tolerances import assert_close

each_case = pytest.mark.parametrize("case", tiny_cases(CASES), ids=lambda case: case.name)


def tolerance(case: HyperCase) -> str:
    return "operation_float32" if case.dtype == "float32" else "operation_bfloat16"


def as_float64(values) -> np.ndarray:
    return np.asarray(values).astype(np.float64)


@each_case
@pytest.mark.parametrize("implementation", ENTER_IMPLEMENTATIONS)
def test_entering_equals_the_formula(case: HyperCase, implementation: str, key) -> None:
    arguments = case.arguments(key)
    operands = named_operands(enter_site, arguments)
    x, mixes = call_op(enter_site, operands, arguments.keywords, implementation)
    streams, pre_mix, norm, fn, base, scale = map(as_float64, arguments.positional)
    folded = np.einsum("rmd,rm->rd", streams, pre_mix)
    expected = folded / np.sqrt((folded**2).mean(axis=1, keepdims=True) + 1e-20) * norm
    assert x.dtype == case.dtype
    assert_close(x, expected, tolerance(case))
    per_row = [references.hyper_mixes(row, fn, base, scale, case.iterations, 1e-6) for row in streams]
    for found, wanted in zip(mixes, map(np.stack, zip(*per_row, strict=True)), strict=True):
        assert found.dtype == np.float32
        assert_close(found, wanted, "operation_float32")


@each_case
@pytest.mark.parametrize("implementation", LEAVE_IMPLEMENTATIONS)
def test_leaving_mixes_from_the_first_index_to_the_second(case: HyperCase, implementation: str, key) -> None:
    arguments = case.leave_arguments(key)
    found = call_op(leave_site, named_operands(leave_site, arguments), {}, implementation)
    streams, update, mixes = arguments.positional
    post, comb = as_float64(mixes.post), as_float64(mixes.comb)
    written = post[:, :, None] * as_float64(update)[:, None, :]
    expected = written + np.einsum("rjk,rjd->rkd", comb, as_float64(streams))
    assert found.dtype == case.dtype
    assert_close(found, expected, tolerance(case))


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("axis", [-2, -1], ids=["columns", "rows"])
def test_comb_is_doubly_stochastic(axis: int) -> None:
    # Of moderate logits: with large ones 20 passes leave the rows 2 % off.
    matrices = jnp.asarray(np.random.default_rng(5).normal(size=(64, 4, 4)).astype(np.float32))
    comb = np.asarray(normalize_mix(matrices, 20, 1e-6))
    assert (comb > 0).all()
    assert_close(comb.sum(axis=axis), np.ones((64, 4)), "equivalence_float32")


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_first_pass_counts_as_an_iteration(iterations: int) -> None:
    matrix = np.random.default_rng(3).normal(size=(4, 4)).astype(np.float32) * 3
    found = normalize_mix(jnp.asarray(matrix)[None], iterations, 1e-6)[0]
    assert_close(found, references.sinkhorn(matrix, iterations, 1e-6), "formula_float32")


def test_first_site_reads_the_embedding() -> None:
    embedded = jnp.asarray(np.random.default_rng(6).normal(size=(3, 8)).astype(np.float32))
    streams, mix = initial_streams(embedded, 4)
    np.testing.assert_array_equal(streams, np.repeat(embedded[:, None], 4, axis=1))
    np.testing.assert_array_equal(collapse(streams, mix), embedded)


def test_neighbours_change_no_bit(key) -> None:
    case = HyperCase("step_of_64", rows=64, width=96)
    arguments, others = case.arguments(key), case.arguments(jax.random.fold_in(key, 1))
    operands, order = named_operands(enter_site, arguments), np.random.default_rng(7).permutation(64)
    changed = operands | {
        name: jnp.where((jnp.arange(64) % 2 == 0).reshape(64, *(1,) * (operands[name].ndim - 1)),
                        operands[name], others.positional[place])[order]
        for place, name in enumerate(("streams", "pre_mix"))
    }  # fmt: skip
    expected = call_op(enter_site, operands, arguments.keywords)
    found = call_op(enter_site, changed, arguments.keywords)
    is_kept = order % 2 == 0
    for values, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(values[is_kept], wanted[order][is_kept])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("streams", (6, 4), r"streams: got shape \(6, 4\), expected \[R, M, D\]"),
        ("pre_mix", (6, 3), r"pre_mix: got shape \(6, 3\), expected \[R=6, M=4\]"),
        ("norm_weight", (31,), r"norm_weight: got shape \(31,\), expected \[D=32\]"),
        ("fn", (23, 128), r"fn: got shape \(23, 128\), expected \[mix=24, flat=128\]"),
        ("base", (8,), r"base: got shape \(8,\), expected \[mix=24\]"),
        ("scale", (4,), r"scale: got shape \(4,\), expected \[three=3\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    arguments = CASES[0].arguments(jax.random.key(0))
    operands = named_operands(enter_site, arguments) | {name: jnp.zeros(shape)}
    with pytest.raises(ValueError, match=f"hyper_connection: {message}"):
        enter_site(**operands, **arguments.keywords)


def test_updates_and_mixes_that_do_not_fit_are_refused() -> None:
    streams, update, mixes = CASES[0].leave_arguments(jax.random.key(0)).positional
    with pytest.raises(ValueError, match=r"hyper_connection: update: got shape \(5, 32\)"):
        leave_site(streams, update[1:], mixes)
    with pytest.raises(ValueError, match=r"hyper_connection: mixes.comb: got shape \(6, 4, 3\)"):
        leave_site(streams, update, Mixes(mixes.pre, mixes.post, mixes.comb[:, :, 1:]))


def test_unknown_implementation_is_refused() -> None:
    arguments = CASES[0].leave_arguments(jax.random.key(0))
    with pytest.raises(ImplementationError, match="hyper_connection: got implementation 'cuda'"):
        leave_site(*arguments.positional, implementation="cuda")
