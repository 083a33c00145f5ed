"""Prompts cut into steps, and the buckets of step shapes, on the host alone.

Read next: `test_step.py`, the device side; `test_sampling_params.py`, what a request may ask for.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.config import PAGE_TOKENS
from deepinfer_jax.plans import (
    LOGPROB_BUCKETS,
    PAGE_BUCKETS,
    ROW_BUCKETS,
    ROWS_PER_BLOCK,
    SLOT_BUCKETS,
    PrefillPlan,
    PromptSpan,
    StepPlan,
    bucket_for,
    pack_rows,
    padded_rows,
    prefill_plans,
)
from deepinfer_jax.sampling_params import MAX_LOGPROBS, RequestError

SLOTS = 5


def make_span(slot: int, length: int, start: int = 0, stop: int | None = None) -> PromptSpan:
    """A span of a prompt whose tokens tell slot and position."""
    token_ids = np.arange(length, dtype=np.int32) + 10_000 * (slot + 1)
    return PromptSpan(slot, token_ids, start, length if stop is None else stop)


@st.composite
def span_lists(draw: st.DrawFn) -> list[PromptSpan]:
    """At most one span a slot, in any order; some empty, some that end before their prompt does."""
    spans = []
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(0, SLOTS))]:
        length = draw(st.integers(1, 600))
        start, stop = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        spans.append(make_span(slot, length, start, length if draw(st.booleans()) else stop))
    return spans


max_rows = st.sampled_from(ROW_BUCKETS)
max_chunks = st.sampled_from([None, 1, 5, 16, 17, 100, 1000])


def rows_of(plan: PrefillPlan, slot: int) -> np.ndarray:
    return np.flatnonzero(plan.is_valid & (plan.slots == slot))


@given(spans=span_lists(), rows=max_rows, chunk=max_chunks)
def test_every_token_comes_once_and_in_order(spans: list[PromptSpan], rows: int, chunk: int | None) -> None:
    plans = prefill_plans(spans, SLOTS, rows, chunk)
    for span in spans:
        places = [(plan, row) for plan in plans for row in rows_of(plan, span.slot)]
        assert [int(plan.positions[row]) for plan, row in places] == list(range(span.start, span.stop))
        tokens = [int(plan.token_ids[row]) for plan, row in places]
        assert tokens == span.token_ids[span.start : span.stop].tolist()
    total = sum(int(plan.is_valid.sum()) for plan in plans)
    assert total == sum(span.stop - span.start for span in spans)


@given(spans=span_lists(), rows=max_rows, chunk=max_chunks)
def test_every_row_knows_the_token_after_it(spans: list[PromptSpan], rows: int, chunk: int | None) -> None:
    prompts = {span.slot: span.token_ids.tolist() for span in spans}
    for plan in prefill_plans(spans, SLOTS, rows, chunk):
        for row, is_valid in enumerate(plan.is_valid):
            after = prompts[int(plan.slots[row])][int(plan.positions[row]) + 1 :] if is_valid else []
            assert plan.next_ids[row] == (after[0] if after else NOTHING)


@given(spans=span_lists(), rows=max_rows, chunk=max_chunks)
def test_rows_of_a_slot_are_adjacent_and_blocks_have_one_slot(
    spans: list[PromptSpan], rows: int, chunk: int | None
) -> None:
    for plan in prefill_plans(spans, SLOTS, rows, chunk):
        for slot in range(SLOTS):
            places = rows_of(plan, slot)
            if len(places):
                assert places[0] % ROWS_PER_BLOCK == 0
                np.testing.assert_array_equal(places, np.arange(places[0], places[0] + len(places)))
        # A block's padding stands behind its tokens and has their slot, too.
        valid = plan.is_valid.reshape(-1, ROWS_PER_BLOCK)
        slots = plan.slots.reshape(-1, ROWS_PER_BLOCK)
        assert (slots == slots[:, :1]).all()
        assert (valid[:, :-1] >= valid[:, 1:]).all()


@given(spans=span_lists(), rows=max_rows, chunk=max_chunks)
def test_last_rows_stand_where_prompts_end(spans: list[PromptSpan], rows: int, chunk: int | None) -> None:
    plans = prefill_plans(spans, SLOTS, rows, chunk)
    ends = {span.slot: span for span in spans if span.start < span.stop == len(span.token_ids)}
    found = [(slot, plan) for plan in plans for slot in range(SLOTS) if plan.last_rows[slot] != NOTHING]
    assert sorted(slot for slot, _ in found) == sorted(ends)
    for slot, plan in found:
        row = plan.last_rows[slot]
        assert plan.is_valid[row] and plan.slots[row] == slot
        assert plan.positions[row] == len(ends[slot].token_ids) - 1


@given(spans=span_lists(), rows=max_rows, chunk=max_chunks)
def test_steps_are_as_full_as_they_get_and_no_larger(
    spans: list[PromptSpan], rows: int, chunk: int | None
) -> None:
    plans = prefill_plans(spans, SLOTS, rows, chunk)
    for number, plan in enumerate(plans):
        counts = {slot: len(rows_of(plan, slot)) for slot in range(SLOTS)}
        assert max(counts.values()) <= (chunk or rows)
        used = sum(-(-count // ROWS_PER_BLOCK) * ROWS_PER_BLOCK for count in counts.values())
        assert 0 < used <= rows
        assert {len(array) for array in plan[:-1]} == {bucket_for(used, ROW_BUCKETS, "rows")}
        assert len(plan.last_rows) == SLOTS
        later = {slot for slot in range(SLOTS) if any(len(rows_of(p, slot)) for p in plans[number + 1 :])}
        assert used == rows or all(counts[slot] == chunk for slot in later)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([1], [64]),
        ([64], [64]),
        ([65], [256]),
        ([17, 17], [64]),
        ([17, 17, 1], [256]),
        ([256], [256]),
        ([257], [256, 64]),
        ([256, 300, 255], [256, 256, 256, 64]),
        ([1] * 17, [256, 64]),
    ],
)
def test_steps_have_the_smallest_bucket_that_fits(lengths: list[int], rows: list[int]) -> None:
    spans = [make_span(slot, length) for slot, length in enumerate(lengths)]
    assert [len(plan.token_ids) for plan in prefill_plans(spans, 17)] == rows


def test_a_prompt_that_fills_its_step_ends_there_and_not_in_the_next() -> None:
    plans = prefill_plans([make_span(0, 256), make_span(1, 3)], 2)
    assert [plan.last_rows.tolist() for plan in plans] == [[255, NOTHING], [NOTHING, 2]]


def test_a_prompt_that_samples_nothing_has_no_last_row() -> None:
    pieces = [make_span(0, 20), replace(make_span(1, 20), samples=False)]
    plan = pack_rows([pieces], 2, 64)
    assert plan.last_rows.tolist() == [19, NOTHING]
    sampling = pack_rows([[make_span(0, 20), make_span(1, 20)]], 2, 64)
    for found, expected in zip(plan[:-1], sampling[:-1], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("count", "rows"), [(0, 0), (1, 16), (16, 16), (17, 32), (250, 256)])
def test_a_piece_takes_whole_blocks(count: int, rows: int) -> None:
    assert padded_rows(make_span(0, 300, 7, 7 + count)) == rows


def test_a_step_without_pieces_changes_nothing() -> None:
    plan = pack_rows([[], []], 6, 64)
    assert not plan.is_valid.any()
    assert (plan.last_rows == NOTHING).all() and (plan.next_ids == NOTHING).all()
    # Each device knows its own slots only.
    assert plan.slots.tolist() == [0] * 64 + [3] * 64
    empty = StepPlan()
    empty.saves_before.append((0, 0))
    assert StepPlan() != empty and not StepPlan().saves_before


@pytest.mark.parametrize("buckets", [SLOT_BUCKETS, ROW_BUCKETS, PAGE_BUCKETS, LOGPROB_BUCKETS])
def test_buckets_are_the_smallest_that_hold(buckets: tuple[int, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in itertools.pairwise(buckets):
        assert bucket_for(smaller, buckets, "x") == smaller
        assert bucket_for(smaller + 1, buckets, "x") == larger
    with pytest.raises(RequestError, match=f"x: got {buckets[-1] + 1}, expected at most {buckets[-1]}"):
        bucket_for(buckets[-1] + 1, buckets, "x")


def test_buckets_fit_what_they_count() -> None:
    assert all(rows % ROWS_PER_BLOCK == 0 for rows in ROW_BUCKETS)
    assert LOGPROB_BUCKETS == (0, MAX_LOGPROBS)
    # The released model's positions.
    assert PAGE_BUCKETS[-1] * PAGE_TOKENS == 2**20


def test_shares_of_the_slots_run_side_by_side() -> None:
    spans = [make_span(slot, length) for slot, length in ((0, 3), (1, 70), (4, 20), (5, 1))]
    plans = prefill_plans(spans, 6, 64, slot_shares=3)
    # Two slots a share: the first share needs two steps of 64 rows, the second has nothing to run.
    assert [len(plan.token_ids) for plan in plans] == [192, 192]
    assert plans[0].slots[64:128].tolist() == [2] * 64
    assert not plans[0].is_valid[64:128].any()
    alone = prefill_plans([make_span(0, 3), make_span(1, 70)], 2, 64)
    last = prefill_plans([make_span(0, 20), make_span(1, 1)], 2, 64)
    for number, plan in enumerate(plans):
        for name in ("token_ids", "positions", "is_valid", "next_ids"):
            np.testing.assert_array_equal(getattr(plan, name)[:64], getattr(alone[number], name))
    np.testing.assert_array_equal(plans[0].slots[128:] - 4, last[0].slots)
    ends = {slot: (step, plan.last_rows[slot]) for step, plan in enumerate(plans) for slot in (0, 1, 4, 5)}
    assert plans[0].last_rows[4] == 128 + last[0].last_rows[0]
    assert plans[0].last_rows[5] == 128 + last[0].last_rows[1]
    assert plans[0].last_rows[0] == alone[0].last_rows[0]
    assert ends[1] == (1, alone[1].last_rows[1])


def test_devices_that_share_rows_have_steps_as_many_times_longer() -> None:
    plans = prefill_plans([make_span(0, 2000)], 1, 256, row_shares=4)
    assert [len(plan.token_ids) for plan in plans] == [1024, 1024]
    assert [len(plan.token_ids) for plan in prefill_plans([make_span(0, 65)], 1, row_shares=4)] == [256]
