"""Verified lengths against the cases file: exhaustive optimum, sorted prefix, Algorithm 1, stale capacity.

Separate because these give drafts to requests; `test_budgets.py` chooses the number of rows.
Read next: `test_exact_laws.py`, which shows what these rules do to the output's law.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from deepinfer_jax.spec_decode import schedule
from deepinfer_jax.testing.tolerances import assert_close

CASES = json.loads((Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json").read_text())

SLOTS, DRAFTS = 8, 5
FIRST = 1
"""Slot of a case's first request: one idle slot is before them, some are after, all with confidence 1."""

survivals = jax.jit(schedule.survivals)
cap_survivals = jax.jit(schedule.cap_survivals)
top_lengths = jax.jit(schedule.top_lengths)
full_lengths = jax.jit(schedule.full_lengths)
threshold_lengths = jax.jit(schedule.threshold_lengths)
early_stop_lengths = jax.jit(schedule.early_stop_lengths)
best_num_drafts = jax.jit(schedule.best_num_drafts)
best_lengths = jax.jit(schedule.best_lengths)

by_id = pytest.mark.parametrize("case", CASES["scheduler_cases"], ids=lambda case: case["id"])


def step_ms(profile: dict[str, Any]) -> np.ndarray:
    """Milliseconds of a step by its number of rows; index 0 and what a table lacks are infinite."""
    rows = np.arange(1, SLOTS * (DRAFTS + 1) + 1)
    if profile["kind"] == "table":
        verify = np.array([profile["ms_by_tokens"].get(str(count), np.inf) for count in rows])
    elif profile["kind"] == "staircase":
        edges, ms = np.array(profile["edges"]), np.array(profile["ms"])
        assert edges[-1] >= rows[-1]
        verify = ms[np.searchsorted(edges, rows)]
    else:
        points, ms = np.array(profile["tokens"]), np.array(profile["ms"])
        assert points[-1] >= rows[-1]
        verify = np.interp(rows, points, ms)
    return np.concatenate([[np.inf], profile["draft_ms"] + verify])


def in_slots(rows: Any, filler: float, dtype: type) -> np.ndarray:
    values = np.asarray(rows, dtype)
    found = np.full((SLOTS, *values.shape[1:]), filler, dtype)
    found[FIRST : FIRST + len(values)] = values
    return found


def prepare(confidences: list[list[float]], caps: list[int] | None = None) -> tuple[Any, np.ndarray, Any]:
    """Capped survivals, active slots and caps of a case's requests among idle slots."""
    is_active = in_slots([True] * len(confidences), False, bool)
    slot_caps = in_slots(caps or [DRAFTS] * len(confidences), DRAFTS, np.int32)
    products = survivals(in_slots(confidences, 1.0, np.float32))
    return cap_survivals(products, slot_caps, is_active), is_active, slot_caps


def tau(survival: list[list[float]], lengths: list[int]) -> float:
    return sum(1 + sum(row[:length]) for row, length in zip(survival, lengths, strict=True))


def assert_gives(lengths: Any, expected: dict[str, Any], survival: list[list[float]], ms: np.ndarray) -> None:
    count = len(expected["lengths"])
    used = np.asarray(lengths)
    assert used[FIRST : FIRST + count].tolist() == expected["lengths"]
    assert used.sum() == sum(expected["lengths"])
    if "tau" in expected:
        found = tau(survival, expected["lengths"])
        assert_close(found, expected["tau"], "formula_float32")
        assert_close(found / ms[count + used.sum()], expected["theta_tok_per_ms"], "formula_float32")


def every_choice(survival: list[list[float]], caps: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and expected tokens of all lengths that the caps allow."""
    rows, tokens = np.zeros(1, int), np.zeros(1)
    for row, cap in zip(survival, caps, strict=True):
        gains = 1 + np.concatenate([[0], np.cumsum(row[:cap])])
        rows = (rows[:, None] + np.arange(1, cap + 2)).reshape(-1)
        tokens = (tokens[:, None] + gains).reshape(-1)
    return rows, tokens


@by_id
def test_best_prefix_of_the_sorted_survivals_is_the_optimum_over_all_lengths(case: dict[str, Any]) -> None:
    expect, ms = case["expect"], step_ms(CASES["profiles"][case["profile"]])
    capped, is_active, _ = prepare(case["confidences"], case["caps"])
    lengths = best_lengths(capped, is_active, ms.astype(np.float32))
    assert_gives(lengths, expect["sorted_argmax"], case["survival"], ms)
    assert np.asarray(lengths).sum() == expect["sorted_argmax"]["K"]
    assert_close(
        best_num_drafts(capped, is_active, ms.astype(np.float32)), np.sum(lengths), "formula_float32"
    )
    rows, tokens = every_choice(case["survival"], case["caps"] or [DRAFTS] * len(case["survival"]))
    assert_close((tokens / ms[rows]).max(), expect["sorted_argmax"]["theta_tok_per_ms"], "formula_float32")
    assert_close(expect["exhaustive"]["theta_tok_per_ms"], (tokens / ms[rows]).max(), "formula_float32")
    if expect["exhaustive"]["optimum_is_unique"]:
        assert expect["exhaustive"]["lengths"] == expect["sorted_argmax"]["lengths"]


@by_id
def test_algorithm_1_stops_where_the_paper_stops(case: dict[str, Any]) -> None:
    expect, ms = case["expect"], step_ms(CASES["profiles"][case["profile"]])
    capped, is_active, _ = prepare(case["confidences"], case["caps"])
    lengths = early_stop_lengths(capped, is_active, ms.astype(np.float32))
    assert_gives(lengths, expect["paper_greedy_early_stop"], case["survival"], ms)
    is_optimal = expect["paper_greedy_early_stop"]["theta_tok_per_ms"] >= expect["exhaustive"][
        "theta_tok_per_ms"
    ] * (1 - 1e-9)
    assert is_optimal == expect["greedy_is_optimal"]


@by_id
def test_full_block_takes_every_draft_that_the_caps_allow(case: dict[str, Any]) -> None:
    capped, is_active, caps = prepare(case["confidences"], case["caps"])
    lengths = full_lengths(caps, is_active)
    assert_gives(
        lengths,
        case["expect"]["fixed_full"],
        case["survival"],
        step_ms(CASES["profiles"][case["profile"]]),
    )
    inside = np.asarray(capped)[FIRST : FIRST + len(case["survival"])]
    for row, expected, length in zip(inside, case["survival"], np.asarray(lengths)[FIRST:], strict=False):
        assert_close(row[:length], expected[:length], "formula_float32")
        assert not row[length:].any()


@pytest.mark.parametrize("case", CASES["stale_capacity_cases"], ids=lambda case: case["id"])
def test_capacity_of_old_confidences_is_filled_with_current_ones(case: dict[str, Any]) -> None:
    expect, ms = case["expect"], step_ms(CASES["profiles"][case["profile"]])
    stale, is_active, _ = prepare(case["confidences_stale"])
    current, _, _ = prepare(case["confidences_current"])
    capacity = best_num_drafts(stale, is_active, ms.astype(np.float32))
    assert int(capacity) == expect["K_from_stale"]
    survival = np.cumprod(case["confidences_current"], axis=1).tolist()
    lengths = top_lengths(current, capacity)
    assert_gives(lengths, expect["applied"], survival, ms)
    assert_gives(lengths, {"lengths": expect["lengths"]}, survival, ms)
    fresh = best_lengths(current, is_active, ms.astype(np.float32))
    assert_gives(fresh, expect["fresh_optimum"], survival, ms)
    assert np.asarray(fresh).sum() == expect["fresh_optimum"]["K"]


# Quarters: many equal survivals, which rounding cannot part.
quarters = st.lists(
    st.lists(st.integers(0, 4).map(lambda n: n / 4), min_size=DRAFTS, max_size=DRAFTS),
    min_size=SLOTS,
    max_size=SLOTS,
)


@given(
    confidences=quarters,
    caps=st.lists(st.integers(0, DRAFTS), min_size=SLOTS, max_size=SLOTS),
    is_active=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS),
    num_drafts=st.integers(-1, SLOTS * DRAFTS + 1),
)
def test_equal_survivals_go_by_position_then_by_request(
    confidences: list[list[float]], caps: list[int], is_active: list[bool], num_drafts: int
) -> None:
    rows = np.array(confidences, np.float32)
    capped = cap_survivals(survivals(rows), np.array(caps, np.int32), np.array(is_active))
    found = np.asarray(top_lengths(capped, np.int32(num_drafts)))
    candidates = [
        (-float(np.prod(rows[request, : position + 1])), position, request)
        for request, position in itertools.product(range(SLOTS), range(DRAFTS))
        if is_active[request] and position < caps[request] and np.prod(rows[request, : position + 1]) > 0
    ]
    chosen = [request for _, _, request in sorted(candidates)[: max(num_drafts, 0)]]
    assert found.tolist() == [chosen.count(request) for request in range(SLOTS)]


def test_later_draft_never_ranks_before_an_earlier_one_however_products_round(key: jax.Array) -> None:
    keys = jax.random.split(key)
    drawn = jax.random.uniform(keys[0], (20_000, 16), jnp.float32, 0.5, 1.0)
    confidences = jnp.where(jax.random.bernoulli(keys[1], 0.4, drawn.shape), 1.0, drawn)
    assert (np.diff(survivals(confidences), axis=1) <= 0).all()
    # Products of a parallel scan, as some devices have them, do rise.
    assert (np.diff(lax.associative_scan(jnp.multiply, confidences, axis=1), axis=1) > 0).any()


def test_draft_that_cannot_survive_is_no_candidate_even_where_more_rows_take_less_time() -> None:
    capped, is_active, _ = prepare([[0.5, 0.5, 0.0, 0.0, 0.0]])
    ms = np.array([np.inf, 1.0, 2.0, 2.5, 0.1, *[9.0] * (SLOTS * (DRAFTS + 1) - 4)], np.float32)
    assert int(best_num_drafts(capped, is_active, ms)) == 0


def test_threshold_stops_at_the_first_confidence_below_it() -> None:
    confidences = np.array([[0.9, 0.4, 0.9], [0.5, 0.5, 0.5], [0.9, 0.9, 0.9], [1, 1, 1]], np.float32)
    caps = np.array([3, 3, 2, 3], np.int32)
    lengths = threshold_lengths(confidences, np.float32(0.5), caps, np.array([True, True, True, False]))
    assert np.asarray(lengths).tolist() == [1, 3, 2, 0]


def test_confidence_that_is_no_number_is_no_candidate() -> None:
    confidences = np.array([[0.5, np.nan, 0.5], [0.5, 0.5, 0.5]], np.float32)
    capped = cap_survivals(survivals(confidences), np.full(2, 3, np.int32), np.ones(2, bool))
    assert np.asarray(top_lengths(capped, np.int32(6))).tolist() == [1, 3]
    assert np.asarray(top_lengths(capped, np.int32(2))).tolist() == [1, 1]


def test_nothing_runs_where_no_slot_is_active() -> None:
    capped, _, _ = prepare([[1.0] * DRAFTS])
    nobody = np.zeros(SLOTS, bool)
    idle = cap_survivals(capped, np.full(SLOTS, DRAFTS, np.int32), nobody)
    ms = step_ms(CASES["profiles"]["flat"]).astype(np.float32)
    assert not np.asarray(best_lengths(idle, nobody, ms)).any()
    assert not np.asarray(early_stop_lengths(idle, nobody, ms)).any()
