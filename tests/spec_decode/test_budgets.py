"""The number of rows: filled buckets, one choice for all ranks, brute force over every length.

Separate because a budget is chosen from a cost table and its rows are then filled by `schedule.py`.
Read next: `test_draft_schedule.py`.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from deepinfer_jax.config import NOTHING
from deepinfer_jax.spec_decode import budgets as budgets_module
from deepinfer_jax.spec_decode.budgets import HYSTERESIS, NO_DRAFT, StepCosts
from deepinfer_jax.spec_decode.schedule import cap_survivals, survivals
from deepinfer_jax.testing.tolerances import assert_close

CASES = json.loads((Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json").read_text())

SLOTS, DRAFTS = 8, 5

capped_of = jax.jit(
    lambda confidences, caps, is_active: cap_survivals(survivals(confidences), caps, is_active)
)
numerators_of = jax.jit(budgets_module.budget_numerators, static_argnames="budgets")
thetas_of = jax.jit(budgets_module.budget_thetas)
choose = jax.jit(budgets_module.choose_budget)
lengths_of = jax.jit(budgets_module.chosen_lengths, static_argnames="budgets")

BUCKET_CASES = [case for case in CASES["scheduler_cases"] if "bucket_fill" in case["expect"]]


def in_slots(confidences: Any, slots: int = SLOTS) -> tuple[Any, np.ndarray, np.ndarray]:
    """Capped survivals, caps and active slots of requests in the first slots."""
    rows = np.ones((slots, DRAFTS), np.float32)
    rows[: len(confidences)] = confidences
    caps, is_active = np.full(slots, DRAFTS, np.int32), np.arange(slots) < len(confidences)
    return capped_of(rows, caps, is_active), caps, is_active


def costs_of(
    draft_ms: float, verify_ms: list[float], uniform_ms: float, slots: int = SLOTS, plain_ms: float = 1.0
) -> StepCosts:
    return StepCosts(
        draft_ms=jnp.full(slots + 1, draft_ms, jnp.float32),
        verify_ms=jnp.asarray([*verify_ms, uniform_ms], jnp.float32),
        plain_ms=jnp.full(slots + 1, plain_ms, jnp.float32),
    )


@pytest.mark.parametrize("case", BUCKET_CASES, ids=lambda case: case["id"])
def test_best_bucket_is_filled_with_the_largest_survivals(case: dict[str, Any]) -> None:
    profile, expect = CASES["profiles"][case["profile"]], case["expect"]["bucket_fill"]
    budgets = tuple(profile["edges"])
    capped, caps, is_active = in_slots(case["confidences"])
    numerators = numerators_of(capped, is_active, budgets=budgets)
    most = np.int32(is_active.sum())
    thetas = thetas_of(numerators, most, costs=costs_of(profile["draft_ms"], profile["ms"], np.inf))
    # The case knows neither the step without drafts nor the uniform one.
    choice = choose(thetas.at[NO_DRAFT].set(-np.inf), np.int32(NOTHING))
    assert budgets[int(choice) - 1] == expect["bucket"]
    assert_close(numerators[choice], expect["tau"], "operation_float32")
    assert_close(thetas[choice], expect["theta_tok_per_ms"], "formula_float32")
    lengths = np.asarray(lengths_of(choice, capped, caps, is_active, budgets=budgets))
    assert lengths[is_active].tolist() == expect["lengths"]
    assert lengths.sum() == expect["K"]


@pytest.mark.parametrize("case", CASES["multi_rank_bucket_cases"], ids=lambda case: case["id"])
def test_all_ranks_choose_one_bucket_from_summed_numerators(case: dict[str, Any]) -> None:
    expect, budgets = case["expect"], tuple(case["edges"])
    ranks = [in_slots(confidences) for confidences in case["confidences_by_rank"]]
    capped, caps, is_active = (jnp.concatenate(parts) for parts in zip(*ranks, strict=True))
    costs = costs_of(case["draft_ms"], case["ms"], np.inf)
    mesh = jax.make_mesh((2,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))
    slots, each = PartitionSpec("ranks"), PartitionSpec("ranks")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(slots, slots, slots), out_specs=(each, each, each, slots))
    def on_each_rank(capped: jax.Array, caps: jax.Array, is_active: jax.Array) -> tuple[jax.Array, ...]:
        numerators = budgets_module.budget_numerators(capped, is_active, budgets)
        summed = lax.psum(numerators, "ranks")
        most_active = lax.pmax(is_active.sum(dtype=jnp.int32), "ranks")
        thetas = budgets_module.budget_thetas(summed, most_active, costs)
        choice = budgets_module.choose_budget(thetas.at[NO_DRAFT].set(-jnp.inf), jnp.int32(NOTHING))
        lengths = budgets_module.chosen_lengths(choice, capped, caps, is_active, budgets)
        return numerators[None], thetas[None], choice[None], lengths

    numerators, thetas, choices, lengths = map(np.asarray, on_each_rank(capped, caps, is_active))
    table = expect["table"]
    assert_close(numerators[:, 1:-1], np.array([row["tau_per_rank"] for row in table]).T, "operation_float32")
    assert_close(thetas[0, 1:-1], [row["theta"] for row in table], "formula_float32")
    assert choices[0] == choices[1]
    assert budgets[choices[0] - 1] == expect["bucket"]
    by_rank = [
        lengths[rank * SLOTS :][: len(expected)].tolist()
        for rank, expected in enumerate(expect["lengths_by_rank"])
    ]
    assert by_rank == expect["lengths_by_rank"]


def best_gains(survival: np.ndarray) -> np.ndarray:
    """Most expected drafts for each total number of drafts, over all lengths of all requests."""
    best = np.zeros(1)
    for row in survival:
        gains = np.concatenate([[0], np.cumsum(row)])
        grown = np.full(len(best) + len(row), -np.inf)
        for length, gain in enumerate(gains):
            reach = grown[length : length + len(best)]
            np.maximum(reach, best + gain, out=reach)
        best = grown
    return best


@pytest.mark.parametrize("load", ["cheap rows", "steep second step", "steep third step"])
@pytest.mark.parametrize("requests", [3, 16, 60])
def test_chosen_rows_equal_brute_force_on_a_table_with_steps_at_64_and_128(
    requests: int, load: str, key: jax.Array
) -> None:
    """Every length of every request is tried, by one table over totals, and for few requests one by one."""
    slots, budgets = 64, (64, 128, 192, 256, 320, 384)
    ms = {
        "cheap rows": [10, 10.2, 10.4, 10.6, 10.8, 11.0],
        "steep second step": [8, 14, 20, 26, 32, 38],
        "steep third step": [10, 11.5, 19, 27, 35, 43],
    }[load]
    confidences = np.asarray(jax.random.uniform(key, (requests, DRAFTS), jnp.float32, 0.3, 0.98))
    capped, caps, is_active = in_slots(confidences, slots)
    costs = costs_of(1.5, [float(value) for value in ms], np.inf, slots, plain_ms=0.9 * ms[0])
    numerators = numerators_of(capped, is_active, budgets=budgets)
    thetas = thetas_of(numerators, np.int32(requests), costs=costs)
    choice = choose(thetas, np.int32(NOTHING))
    lengths = np.asarray(lengths_of(choice, capped, caps, is_active, budgets=budgets))

    survival = np.asarray(capped)[:requests].astype(np.float64)
    gains = best_gains(survival)
    if requests == 3:
        every = {count: 0.0 for count in range(len(gains))}
        for tried in itertools.product(range(DRAFTS + 1), repeat=requests):
            gain = sum(row[:length].sum() for row, length in zip(survival, tried, strict=True))
            every[sum(tried)] = max(every[sum(tried)], gain)
        assert_close(gains, list(every.values()), "formula_float32")
    verify_ms = np.array(ms)[np.searchsorted(budgets, requests + np.arange(len(gains)))]
    drafted = (requests + gains) / (1.5 + verify_ms)
    plain = requests / (0.9 * ms[0])
    best = int(np.argmax(drafted))
    assert_close(thetas[choice], max(plain, drafted[best]), "operation_float32")
    assert lengths.sum() == (0 if plain >= drafted[best] else best)
    chosen_gain = sum(row[:length].sum() for row, length in zip(survival, lengths, strict=False))
    assert_close(chosen_gain, gains[lengths.sum()], "operation_float32")


def test_step_without_drafts_pays_what_a_step_takes_that_knows_none() -> None:
    capped, caps, is_active = in_slots([[0.05] * DRAFTS] * 5)
    budgets = (4, 8, 16)
    numerators = numerators_of(capped, is_active, budgets=budgets)
    assert np.asarray(numerators)[:2].tolist() == [5.0, -np.inf]
    costs = costs_of(2.0, [5.0, 6.0, 9.0], 12.0, plain_ms=5.5)
    thetas = np.asarray(thetas_of(numerators, np.int32(5), costs=costs))
    assert_close(thetas[:3], [5 / 5.5, -np.inf, (5 + 0.15) / 8], "formula_float32")
    choice = choose(thetas, np.int32(NOTHING))
    assert int(choice) == NO_DRAFT
    assert not np.asarray(lengths_of(choice, capped, caps, is_active, budgets=budgets)).any()


def test_uniform_block_wins_where_its_own_time_is_lower_and_verifies_all() -> None:
    capped, caps, is_active = in_slots([[0.9, 0.8, 0.0, 0.5, 0.5]] * 4)
    budgets = (8, 16, 24)
    caps = caps - 1
    numerators = numerators_of(capped, is_active, budgets=budgets)
    costs = costs_of(1.0, [8.0, 8.5, 9.0], 7.0, plain_ms=8.0)
    thetas = thetas_of(numerators, np.int32(4), costs=costs)
    choice = choose(thetas, np.int32(NOTHING))
    assert int(choice) == len(budgets) + 1
    lengths = lengths_of(choice, capped, caps, is_active, budgets=budgets)
    assert np.asarray(lengths).tolist() == [DRAFTS - 1] * 4 + [0] * 4


@pytest.mark.parametrize(
    ("thetas", "previous", "expected"),
    [
        ([1.0, 2.0, 2.0, 1.0], NOTHING, 1),
        ([1.0, 2.0, 2.0, 1.0], 2, 2),
        ([1.0, 2.0, 2.0 * (1 + HYSTERESIS) * 0.999, 1.0], 1, 1),
        ([1.0, 2.0, 2.0 * (1 + HYSTERESIS) * 1.001, 1.0], 1, 2),
        ([1.0, 2.0, 2.01, 1.0], NOTHING, 2),
        ([1.0, -np.inf, 0.5, 0.2], 1, 0),
        ([0.0, 0.0, 0.0, 0.0], NOTHING, 0),
    ],
)
def test_choice_changes_only_for_a_gain_of_one_percent(
    thetas: list[float], previous: int, expected: int
) -> None:
    assert int(choose(np.array(thetas, np.float32), np.int32(previous))) == expected
