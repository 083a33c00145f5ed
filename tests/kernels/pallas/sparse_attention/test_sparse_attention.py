"""Sparse attention: every implementation on every case against a look-up by slot and position."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.kernels import ImplementationError, sparse_attention
from deepinfer_jax.kernels.cases import Span, span_geometry
from deepinfer_jax.kernels.pallas.sparse_attention.api import IMPLEMENTATIONS
from deepinfer_jax.kernels.pallas.sparse_attention.cases import CASES, AttentionCase
from deepinfer_jax.testing import references
from deepinfer_jax.testing.battery import call_op, draw_case, tiny_cases, unpacked
from deepinfer_jax.testing.tolerances import assert_close

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
BY_NAME = {case.name: case for case in CASES}
draw = partial(draw_case, sparse_attention)


def by_look_up(operands: dict, keywords: dict) -> np.ndarray:
    formats, geometry = keywords["cache_format"], operands["geometry"]

    pages, selection = operands["entry_pages"], operands["selection"]
    return references.sparse_attention(
        np.asarray(operands["q"].astype(jnp.float32)),
        unpacked(operands["window_rings"][operands["layer"]], formats.window),
        unpacked(operands["window_rows"], formats.window),
        None if pages is None else unpacked(pages[operands["source"]], formats.entry),
        np.asarray(operands["page_table"]),
        None if selection is None else np.asarray(selection),
        np.asarray(operands["attn_sink"]),
        references.StepRows(*map(np.asarray, (geometry.slots, geometry.positions, geometry.is_valid))),
        np.asarray(operands["window_starts"]),
        keywords["window"],
    )


@each_implementation
@pytest.mark.parametrize("case", tiny_cases(CASES), ids=lambda case: case.name)
def test_case_equals_the_look_up(case: AttentionCase, implementation: str, key) -> None:
    operands, keywords = draw(case, key)
    found = call_op(sparse_attention, operands, keywords, implementation)
    assert found.dtype == case.dtype
    tolerance = "operation_float32" if case.dtype == "float32" else "operation_bfloat16"
    assert_close(found, by_look_up(operands, keywords), tolerance)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.fixture(scope="module")
def plain() -> tuple[dict, dict]:
    """A chunk over caches of plain float32, where any element can be made NaN."""
    return draw(BY_NAME["chunk_float32"], jax.random.key(3))


@each_implementation
def test_nan_where_nothing_can_be_reached_has_no_effect(plain, implementation: str) -> None:
    operands, keywords = plain
    slots, positions, is_valid = (
        np.asarray(values).tolist()
        for values in (
            operands["geometry"].slots,
            operands["geometry"].positions,
            operands["geometry"].is_valid,
        )
    )
    rings, pages = np.asarray(operands["window_rings"]), np.asarray(operands["entry_pages"])
    reach_ring, reach_page = np.zeros(rings.shape[:3], bool), np.zeros(pages.shape[:3], bool)
    table, entries = np.asarray(operands["page_table"]), pages.shape[2]
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if is_valid[row]:
            first = min(at for at, other in zip(positions, slots, strict=True) if other == slot)
            for wanted in range(max(position - keywords["window"] + 1, 0), first):
                reach_ring[1, slot, wanted % rings.shape[2]] = True
            for group in np.asarray(operands["selection"])[row].tolist():
                if 0 <= group < table.shape[1] * entries:
                    reach_page[1, table[slot, group // entries], group % entries] = True
    assert 0 < reach_ring.sum() < reach_ring[1].size
    poisoned = operands | {
        "window_rings": jnp.asarray(np.where(reach_ring[..., None], rings, np.nan)),
        "entry_pages": jnp.asarray(np.where(reach_page[..., None], pages, np.nan)),
        "window_rows": jnp.where(jnp.array(is_valid)[:, None], operands["window_rows"], jnp.nan),
        "q": jnp.where(jnp.array(is_valid)[:, None, None], operands["q"], jnp.nan),
    }
    expected = call_op(sparse_attention, operands, keywords, implementation)
    np.testing.assert_array_equal(call_op(sparse_attention, poisoned, keywords, implementation), expected)


@each_implementation
def test_bc09_rows_that_are_not_valid_give_zero(plain, implementation: str) -> None:
    operands, keywords = plain
    found = call_op(sparse_attention, operands, keywords, implementation)
    is_valid = np.asarray(operands["geometry"].is_valid)
    np.testing.assert_array_equal(found[~is_valid], 0.0)
    assert (found[is_valid] != 0).all()


@each_implementation
@pytest.mark.parametrize("bad", [-2, 8, 2**31 - 1, -(2**31)], ids=str)
def test_bc69_group_outside_the_slot_selects_nothing(plain, implementation: str, bad: int) -> None:
    operands, keywords = plain
    selection = operands["selection"].at[:, 1].set(NOTHING)
    expected = call_op(sparse_attention, operands | {"selection": selection}, keywords, implementation)
    selection = selection.at[:, 1].set(bad)
    found = call_op(sparse_attention, operands | {"selection": selection}, keywords, implementation)
    np.testing.assert_array_equal(found, expected)


SLOTS, OWN, PER_SLOT = 8, 3, 8
STEP = AttentionCase(
    *("step_of_64", tuple(Span(slot, 3 + 5 * slot, PER_SLOT - slot % 2, slot % 2) for slot in range(SLOTS))),
    slots=SLOTS, window=8, ring=10, num_pages=2 * SLOTS, top_k=6, heads=4,
)  # fmt: skip
ROW_OPERANDS = ("q", "window_rows", "selection", "window_starts")
OWN_ROWS = slice(OWN * PER_SLOT, (OWN + 1) * PER_SLOT)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def step(request) -> tuple[AttentionCase, dict, dict]:
    case = replace(STEP, dtype=request.param)
    return case, *draw(case, jax.random.key(4))


@pytest.fixture(scope="module")
def step_result(step) -> np.ndarray:
    return call_op(sparse_attention, step[1], step[2])


def test_order_of_slots_changes_no_bit(step, step_result) -> None:
    case, operands, keywords = step
    order = np.random.default_rng(5).permutation(SLOTS)
    rows = (order[:, None] * PER_SLOT + np.arange(PER_SLOT)).reshape(-1)
    moved = operands | {name: operands[name][rows] for name in ROW_OPERANDS}
    moved["geometry"] = span_geometry(tuple(case.spans[slot] for slot in order))
    np.testing.assert_array_equal(call_op(sparse_attention, moved, keywords), step_result[rows])


def test_neighbours_change_no_bit(step, step_result) -> None:
    case, operands, keywords = step
    others = draw(case, jax.random.key(6))[0]
    for name in ROW_OPERANDS:
        others[name] = others[name].at[OWN_ROWS].set(operands[name][OWN_ROWS])
    own_pages = operands["page_table"][OWN]
    for name in ("window_rings", "entry_pages"):
        index = OWN if name == "window_rings" else own_pages
        others[name] = others[name].at[:, index].set(operands[name][:, index])
    others["page_table"] = others["page_table"].at[OWN].set(own_pages)
    spans = [Span(span.slot, span.start + 2, span.tokens - 1, span.padding + 1) for span in case.spans]
    spans[OWN] = case.spans[OWN]
    others |= {"geometry": span_geometry(tuple(spans)), "attn_sink": operands["attn_sink"]}
    found = call_op(sparse_attention, others, keywords)
    np.testing.assert_array_equal(found[OWN_ROWS], step_result[OWN_ROWS])
    assert (found[:PER_SLOT] != step_result[:PER_SLOT]).any()


def test_capacity_changes_no_bit(step, step_result) -> None:
    _, operands, keywords = step
    table = jnp.pad(operands["page_table"], ((0, 0), (0, 14)), constant_values=NOTHING)
    selection = jnp.where(operands["selection"] < 8, operands["selection"], NOTHING)
    pages = jnp.pad(operands["entry_pages"], ((0, 0), (0, 112), (0, 0), (0, 0)))
    larger = operands | {"page_table": table, "selection": selection, "entry_pages": pages}
    np.testing.assert_array_equal(call_op(sparse_attention, larger, keywords), step_result)


def test_number_of_slots_changes_no_bit(step, step_result) -> None:
    case, operands, keywords = step
    alone = operands | {name: jnp.roll(operands[name], -OWN * PER_SLOT, axis=0) for name in ROW_OPERANDS}
    span = case.spans[OWN]
    rest = len(step_result) - PER_SLOT
    alone |= {
        "geometry": span_geometry((Span(0, span.start, span.tokens, span.padding + rest),)),
        "window_rings": operands["window_rings"][:, OWN : OWN + 1],
        "page_table": operands["page_table"][OWN : OWN + 1],
    }
    found = call_op(sparse_attention, alone, keywords)
    np.testing.assert_array_equal(found[:PER_SLOT], step_result[OWN_ROWS])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda q: q[0], r"q: got shape \(3, 64\), expected \[R, N, H\]"),
        ("q", lambda q: q.astype(jnp.float16), "q: got dtype float16, expected float32 or bfloat16"),
        ("window_rows", lambda rows: rows[:, :-1], r"window_rows: .*63\), expected \[R=15, width=64\]"),
        ("window_rings", lambda rings: rings.astype(jnp.uint8), "window_rings: got dtype uint8"),
        ("entry_pages", lambda _: None, "only one of entry_pages and selection"),
        ("selection", lambda groups: groups[1:], r"selection: got shape \(14, 5\), expected \[R=15, K\]"),
        ("page_table", lambda table: table[:1], r"page_table: got shape .* expected \[B=3, pages_per_slot"),
        ("attn_sink", lambda sink: sink[:1], r"attn_sink: got shape \(1,\), expected \[N=3\]"),
        ("window_starts", lambda starts: starts.astype(jnp.float32), "window_starts: got dtype float32"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused(plain, name: str, change, message: str) -> None:
    operands, keywords = plain
    with pytest.raises(ValueError, match=f"sparse_attention: .*{message}"):
        sparse_attention(**operands | {name: change(operands[name])}, **keywords)


def test_window_longer_than_the_ring_is_refused(plain) -> None:
    operands, keywords = plain
    with pytest.raises(ValueError, match=r"window: got 7, expected 1\.\.6"):
        sparse_attention(**operands, **keywords | {"window": 7})


def test_unknown_implementation_is_refused(plain) -> None:
    operands, keywords = plain
    with pytest.raises(ImplementationError, match="sparse_attention: got implementation 'cuda'"):
        sparse_attention(**operands, **keywords, implementation="cuda")
