"""Grouped experts: every implementation on every case against a loop over rows and choices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arithmetic import contract
from deepinfer_jax.arrays import NOTHING, QuantArray, Storage
from deepinfer_jax.kernels import (
    ImplementationError,
    clamped_swiglu,
    dequantize,
    grouped_experts,
    quantize_dequantize_fp8,
)
from deepinfer_jax.kernels.pallas.grouped_experts.api import IMPLEMENTATIONS
from deepinfer_jax.kernels.pallas.grouped_experts.cases import CASES, ExpertsCase
from deepinfer_jax.testing import references
from deepinfer_jax.testing.battery import call_op, draw_case, tiny_cases
from deepinfer_jax.testing.tolerances import assert_close

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
BY_NAME = {case.name: case for case in CASES}
draw = partial(draw_case, grouped_experts)
WEIGHTS = ("w1", "w3", "w2")

_values = jax.jit(dequantize, static_argnames="dtype")
_rounded = jax.jit(quantize_dequantize_fp8)


def by_loop(operands: dict, keywords: dict) -> np.ndarray:
    layer = int(operands["layer"])
    w1, w3, w2 = (
        np.asarray(_values(weight, dtype=jnp.float32) if isinstance(weight, QuantArray) else weight)[layer]
        for weight in (operands[name] for name in WEIGHTS)
    )
    x, limit = np.asarray(operands["x"]).astype(np.float32), keywords["swiglu_limit"]
    ids, routing = np.asarray(operands["expert_ids"]), np.asarray(operands["routing_weights"])
    output = np.zeros((*ids.shape, x.shape[1]))
    if not keywords["quantizes_input"]:
        for row, choice in np.ndindex(*ids.shape):
            expert = ids[row, choice]
            if expert != NOTHING:
                found = references.expert(x[row], w1[expert], w3[expert], w2[expert], limit)
                output[row, choice] = routing[row, choice] * found
        return output
    x = np.asarray(_rounded(x)).astype(np.float64)
    hidden = np.zeros((*ids.shape, w1.shape[1]))
    for row, choice in np.ndindex(*ids.shape):
        expert = ids[row, choice]
        identity = np.eye(w1.shape[1])
        if expert != NOTHING:
            found = references.expert(x[row], w1[expert], w3[expert], identity, limit)
            hidden[row, choice] = routing[row, choice] * found
    hidden = np.asarray(_rounded(hidden.astype(np.float32))).astype(np.float64)
    for row, choice in np.ndindex(*ids.shape):
        output[row, choice] = w2[ids[row, choice]] @ hidden[row, choice]
    return output


@each_implementation
@pytest.mark.parametrize("case", tiny_cases(CASES), ids=lambda case: case.name)
def test_bc58_case_equals_the_loop(case: ExpertsCase, implementation: str, key) -> None:
    operands, keywords = draw(case, key)
    found = call_op(grouped_experts, operands, keywords, implementation)
    assert found.dtype == case.dtype
    tolerance = "operation_float32" if case.dtype == "float32" else "operation_fp8_flips"
    assert_close(found, by_loop(operands, keywords), tolerance)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.fixture(scope="module")
def plain() -> tuple[dict, dict]:
    return draw(BY_NAME["plain"], jax.random.key(3))


@each_implementation
def test_bc58_nan_in_experts_that_no_row_chose_has_no_effect(implementation: str, key) -> None:
    operands, keywords = draw(BY_NAME["idle_experts"], key)
    poisoned = {name: operands[name].at[:, 3:].set(jnp.nan).at[0].set(jnp.nan) for name in WEIGHTS}
    expected, found = (
        call_op(grouped_experts, values, keywords, implementation)
        for values in (operands, operands | poisoned)
    )
    np.testing.assert_array_equal(found, expected)


@each_implementation
def test_nan_in_an_expert_of_another_row_has_no_effect(plain, implementation: str) -> None:
    operands, keywords = plain
    ids = np.asarray(operands["expert_ids"])
    poisoned = {name: operands[name].at[1, ids[0, 0]].set(jnp.nan) for name in WEIGHTS}
    found = call_op(grouped_experts, operands | poisoned, keywords, implementation)
    expected = call_op(grouped_experts, operands, keywords, implementation)
    is_poisoned = ids == ids[0, 0]
    assert 0 < is_poisoned.sum() < is_poisoned.size
    assert np.isnan(found[is_poisoned]).all()
    np.testing.assert_array_equal(found[~is_poisoned], expected[~is_poisoned])


@each_implementation
@pytest.mark.parametrize("bad", [-2, 6, 2**31 - 1], ids=str)
def test_id_outside_the_experts_chooses_none(plain, implementation: str, bad: int) -> None:
    operands, keywords = plain
    ids = operands["expert_ids"].at[2].set(bad)
    found = call_op(grouped_experts, operands | {"expert_ids": ids}, keywords, implementation)
    expected = call_op(grouped_experts, operands, keywords, implementation)
    np.testing.assert_array_equal(found[2], 0.0)
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(expected, 2, 0))


@jax.jit
@jax.grad
def dense_gradient(parts: dict, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The plain formula over gathered weights of one layer, without scan and cond."""
    w1, w3, w2 = (parts[name][ids] for name in WEIGHTS)
    gate, up = (contract("rd,rkfd->rkf", parts["x"], weight) for weight in (w1, w3))
    hidden = clamped_swiglu(gate, up, parts["routing_weights"][:, :, None], CASES[0].limit)
    return jnp.sum(cotangent * contract("rkf,rkdf->rkd", hidden, w2))


@pytest.mark.parametrize("name", ["plain", "one_layer"])
def test_gradient_equals_that_of_the_dense_formula(name: str, key) -> None:
    operands, keywords = draw(BY_NAME[name], key)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(7, 2, 64)).astype(np.float32))
    parts = {part: operands[part] for part in ("x", "routing_weights", *WEIGHTS)}

    def total(parts: dict) -> jax.Array:
        return jnp.sum(cotangent * grouped_experts(**operands | parts, **keywords))

    found = jax.jit(jax.grad(total))(parts)
    layer = int(operands["layer"])
    expected = dense_gradient(
        parts | {part: parts[part][layer] for part in WEIGHTS}, operands["expert_ids"], cotangent
    )
    for part in WEIGHTS:
        assert not np.delete(found[part], layer, 0).any()
        found[part] = found[part][layer]
    for part in parts:
        assert np.asarray(expected[part]).any()
        assert_close(found[part], expected[part], "operation_float32")


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (9.0, 1.0, 1.5 / (1 + np.exp(-1.5))),
        (-9.0, 1.0, -9.0 / (1 + np.exp(9.0))),
        (1.0, 9.0, 1.5 / (1 + np.exp(-1.0))),
        (1.0, -9.0, -1.5 / (1 + np.exp(-1.0))),
    ],
    ids=["gate_above", "gate_below_is_not_clamped", "up_above", "up_below"],
)
def test_swiglu_clamps(gate: float, up: float, expected: float) -> None:
    found = clamped_swiglu(jnp.array([gate]), jnp.array([up]), None, 1.5)
    assert_close(found, [expected], "formula_float32")


STEP = ExpertsCase("step_of_64", rows=64, width=96, hidden=64, choices=3)


@pytest.fixture(scope="module", params=["float32", "mxfp4"])
def step(request) -> tuple[ExpertsCase, dict, dict]:
    case = STEP
    if request.param == "mxfp4":
        case = replace(STEP, dtype="bfloat16", storage=Storage.MXFP4, quantizes_input=True)
    return case, *draw(case, jax.random.key(4))


@pytest.fixture(scope="module")
def step_result(step) -> np.ndarray:
    return call_op(grouped_experts, step[1], step[2])


ROW_OPERANDS = ("x", "expert_ids", "routing_weights")


def test_order_of_rows_changes_no_bit(step, step_result) -> None:
    _, operands, keywords = step
    order = np.random.default_rng(5).permutation(64)
    moved = operands | {name: operands[name][order] for name in ROW_OPERANDS}
    np.testing.assert_array_equal(call_op(grouped_experts, moved, keywords), step_result[order])


@pytest.mark.parametrize("row", [0, 29, 63])
def test_neighbours_change_no_bit(step, step_result, row: int) -> None:
    case, operands, keywords = step
    others = draw(case, jax.random.key(6))[0]
    changed = {name: others[name].at[row].set(operands[name][row]) for name in ROW_OPERANDS}
    found = call_op(grouped_experts, operands | changed, keywords)
    np.testing.assert_array_equal(found[row], step_result[row])
    alone = {
        "expert_ids": jnp.full_like(operands["expert_ids"], NOTHING).at[row].set(operands["expert_ids"][row])
    }
    np.testing.assert_array_equal(call_op(grouped_experts, operands | alone, keywords)[row], step_result[row])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x.astype(jnp.float16), "x: got dtype float16, expected float32 or bfloat16"),
        ("expert_ids", lambda ids: ids[1:], r"expert_ids: got shape \(6, 2\), expected \[R=7, K\]"),
        (
            "routing_weights",
            lambda a: a[:, :1],
            r"routing_weights: got shape \(7, 1\), expected \[R=7, K=2\]",
        ),
        ("w1", lambda w1: w1[0], r"w1: got shape \(6, 32, 64\), expected \[L, E, F, D=64\]"),
        ("w3", lambda w3: w3[:, 1:], r"w3: got shape .* expected \[L=2, E=6, F=32, D=64\]"),
        ("w2", lambda w2: w2.swapaxes(2, 3), r"w2: got shape .* expected \[L=2, E=6, D=64, F=32\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(plain, name: str, change, message: str) -> None:
    operands, keywords = plain
    with pytest.raises(ValueError, match=f"grouped_experts: {message}"):
        grouped_experts(**operands | {name: change(operands[name])}, **keywords)


def test_unknown_implementation_is_refused(plain) -> None:
    operands, keywords = plain
    with pytest.raises(ImplementationError, match="grouped_experts: got implementation 'cuda'"):
        grouped_experts(**operands, **keywords, implementation="cuda")


@pytest.mark.parametrize("rows", [1, 20, 130])
def test_tiles_of_rows_give_the_bits_of_a_call_of_one_tile(step, step_result, rows: int) -> None:
    _, operands, keywords = step
    # Some rows of the step, several times over, as they meet on a device that holds their experts.
    chosen = np.random.default_rng(rows).integers(0, 64, rows)
    gathered = operands | {name: operands[name][chosen] for name in ROW_OPERANDS}
    found = call_op(grouped_experts, gathered, keywords | {"row_tile": 64})
    np.testing.assert_array_equal(found, step_result[chosen])
