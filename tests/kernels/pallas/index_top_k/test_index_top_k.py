"""Index top-k: every implementation on every case against a loop over groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.kernels import ImplementationError, RowFormat, index_scores, index_top_k
from deepinfer_jax.kernels.cases import Span, span_geometry
from deepinfer_jax.kernels.pallas.index_top_k.api import IMPLEMENTATIONS
from deepinfer_jax.kernels.pallas.index_top_k.cases import CASES, IndexCase
from deepinfer_jax.testing import references
from deepinfer_jax.testing.battery import call_op, draw_case, tiny_cases, unpacked
from deepinfer_jax.testing.tolerances import assert_close

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
BY_NAME = {case.name: case for case in CASES}
draw = partial(draw_case, index_top_k)


def call(operands: dict, keywords: dict, implementation: str | None = None, want_scores: bool = True):
    return call_op(index_top_k, operands, keywords | {"want_scores": want_scores}, implementation)


def by_loop(operands: dict, keywords: dict) -> np.ndarray:
    """Masked scores [R, G] before the restriction to candidates."""
    geometry = operands["geometry"]
    queries = np.asarray(operands["queries"].astype(jnp.float32))
    pages = unpacked(operands["key_pages"][operands["source"]], keywords["key_format"])
    heads, table = np.asarray(operands["head_weights"]), np.asarray(operands["page_table"])
    num_visible = np.where(geometry.is_valid, operands["num_visible"], 0)
    return np.stack(
        [
            references.index_scores(queries[row], heads[row], pages, table[slot], num_visible[row])
            for row, slot in enumerate(np.asarray(geometry.slots))
        ]
    )


def sets(selection: np.ndarray) -> list[set[int]]:
    assert all(len(set(row)) == len(row) for row in (row[row != NOTHING].tolist() for row in selection))
    return [set(row.tolist()) - {NOTHING} for row in selection]


@each_implementation
@pytest.mark.parametrize("case", tiny_cases(CASES), ids=lambda case: case.name)
def test_case_equals_the_loop(case: IndexCase, implementation: str, key) -> None:
    operands, keywords = draw(case, key)
    found = call(operands, keywords, implementation)
    expected = by_loop(operands, keywords)
    if case.role == "restricted":
        is_inside = np.repeat(operands["is_candidate"], case.block_size, axis=1)[:, : expected.shape[1]]
        expected = np.where(is_inside, expected, -np.inf)
    assert_close(found.masked_scores, expected, "operation_float32")
    is_finite = expected > -np.inf
    np.testing.assert_array_equal(found.scores[is_finite], found.masked_scores[is_finite])
    # From the computed scores, so that no rounding decides: their own error was checked above.
    assert sets(found.selection) == [references.best(row, case.top_k) for row in found.masked_scores]
    if case.role == "source":
        visible = np.where(operands["geometry"].is_valid, operands["num_visible"], 0)
        assert [set(np.flatnonzero(row).tolist()) for row in found.is_candidate] == [
            references.candidate_blocks(row, count, case.block_size, case.num_blocks)
            for row, count in zip(found.masked_scores, visible, strict=True)
        ]


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)


@pytest.fixture(scope="module")
def chunk() -> tuple[dict, dict]:
    return draw(BY_NAME["chunk"], jax.random.key(3))


@each_implementation
def test_ties_go_to_the_lower_group(implementation: str, key) -> None:
    operands, keywords = draw(BY_NAME["ties"], key)
    found = call(operands, keywords, implementation)
    visible = np.where(operands["geometry"].is_valid, operands["num_visible"], 0)
    assert sets(found.selection) == [set(range(min(count, 3))) for count in visible.tolist()]


@each_implementation
def test_scores_are_given_only_if_wanted(chunk, implementation: str) -> None:
    found = call(*chunk, implementation, want_scores=False)
    assert found.scores is None and found.masked_scores is None and found.is_candidate is None
    np.testing.assert_array_equal(found.selection, call(*chunk, implementation).selection)


@each_implementation
def test_candidates_that_are_not_used_are_handed_through(chunk, implementation: str) -> None:
    operands, keywords = chunk
    given = jnp.asarray(np.random.default_rng(8).random((12, 6)) < 0.5)
    found = call(operands | {"is_candidate": given}, keywords, implementation)
    np.testing.assert_array_equal(found.is_candidate, given)
    np.testing.assert_array_equal(found.selection, call(operands, keywords, implementation).selection)


@each_implementation
def test_nan_where_nothing_can_be_reached_has_no_effect(implementation: str, key) -> None:
    operands, keywords = draw(replace(BY_NAME["chunk"], key_format=RowFormat.FLOAT32), key)
    geometry = operands["geometry"]
    visible = np.where(geometry.is_valid, operands["num_visible"], 0)
    pages = np.full(operands["key_pages"].shape, np.nan, np.float32)
    for slot in (1, 2):
        for group in range(visible[np.asarray(geometry.slots) == slot].max()):
            place = (1, int(operands["page_table"][slot, group // 4]), group % 4)
            pages[place] = operands["key_pages"][place]
    poisoned = operands | {"key_pages": jnp.asarray(pages)}
    expected, found = (call(values, keywords, implementation) for values in (operands, poisoned))
    np.testing.assert_array_equal(found.masked_scores, expected.masked_scores)
    np.testing.assert_array_equal(found.selection, expected.selection)


def test_scores_have_no_gradient(chunk) -> None:
    operands, keywords = chunk

    def total(queries: jax.Array) -> jax.Array:
        result = index_top_k(**operands | {"queries": queries}, **keywords, want_scores=True)
        assert result.scores is not None
        return jnp.sum(result.scores)

    assert not np.asarray(jax.jit(jax.grad(total))(operands["queries"])).any()


def test_scores_are_weighted_relus() -> None:
    random = np.random.default_rng(17)
    queries = random.normal(size=(2, 3, 4, 8)).astype(np.float32)
    heads = random.normal(size=(2, 3, 4)).astype(np.float32)
    keys = random.normal(size=(2, 5, 8)).astype(np.float32)
    products = np.maximum(np.einsum("sqih,sgh->sqig", queries, keys, dtype=np.float64), 0)
    expected = np.einsum("sqi,sqig->sqg", heads, products)
    found = index_scores(jnp.asarray(queries), jnp.asarray(heads), jnp.asarray(keys))
    assert (expected < 0).any()
    assert_close(found, expected, "equivalence_float32")


SLOTS, OWN, PER_SLOT = 8, 3, 8
STEP = IndexCase(
    *("step_of_64", tuple(Span(slot, 1 + 3 * slot, PER_SLOT - slot % 2, slot % 2) for slot in range(SLOTS))),
    slots=SLOTS, pages_per_slot=2, num_pages=2 * SLOTS, entries=16, heads=8, top_k=6, role="source",
)  # fmt: skip
ROW_OPERANDS = ("queries", "head_weights", "num_visible")
OWN_ROWS = slice(OWN * PER_SLOT, (OWN + 1) * PER_SLOT)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def step(request) -> tuple[IndexCase, dict, dict]:
    case = replace(STEP, dtype=request.param)
    return case, *draw(case, jax.random.key(4))


@pytest.fixture(scope="module")
def step_result(step):
    return call(step[1], step[2])


def assert_same(found, expected, rows=slice(None), own=slice(None)) -> None:
    """Compare bitwise; where capacities differ, in the groups that both have."""
    groups = expected.masked_scores.shape[1]
    np.testing.assert_array_equal(found.masked_scores[rows][:, :groups], expected.masked_scores[own])
    np.testing.assert_array_equal(found.selection[rows], expected.selection[own])
    blocks = expected.is_candidate.shape[1]
    np.testing.assert_array_equal(found.is_candidate[rows][:, :blocks], expected.is_candidate[own])


def test_order_of_slots_changes_no_bit(step, step_result) -> None:
    case, operands, keywords = step
    order = np.random.default_rng(5).permutation(SLOTS)
    rows = (order[:, None] * PER_SLOT + np.arange(PER_SLOT)).reshape(-1)
    moved = operands | {name: operands[name][rows] for name in ROW_OPERANDS}
    moved["geometry"] = span_geometry(tuple(case.spans[slot] for slot in order))
    assert_same(call(moved, keywords), step_result, own=rows)


def test_neighbours_change_no_bit(step, step_result) -> None:
    case, operands, keywords = step
    others = draw(case, jax.random.key(6))[0]
    for name in ROW_OPERANDS:
        others[name] = others[name].at[OWN_ROWS].set(operands[name][OWN_ROWS])
    own_pages = operands["page_table"][OWN]
    others["key_pages"] = others["key_pages"].at[:, own_pages].set(operands["key_pages"][:, own_pages])
    others["page_table"] = others["page_table"].at[OWN].set(own_pages)
    found = call(others, keywords)
    assert_same(found, step_result, OWN_ROWS, OWN_ROWS)
    assert (found.selection != step_result.selection).any()


def test_capacity_changes_no_bit(step, step_result) -> None:
    _, operands, keywords = step
    added = 14
    table = jnp.pad(operands["page_table"], ((0, 0), (0, added)), constant_values=NOTHING)
    pages = jnp.pad(operands["key_pages"], ((0, 0), (0, SLOTS * added), (0, 0), (0, 0)))
    assert_same(call(operands | {"page_table": table, "key_pages": pages}, keywords), step_result)


def test_number_of_slots_changes_no_bit(step, step_result) -> None:
    case, operands, keywords = step
    alone = operands | {name: jnp.roll(operands[name], -OWN * PER_SLOT, axis=0) for name in ROW_OPERANDS}
    span = case.spans[OWN]
    rest = (SLOTS - 1) * PER_SLOT
    alone["geometry"] = span_geometry((Span(0, span.start, span.tokens, span.padding + rest),))
    alone["page_table"] = operands["page_table"][OWN : OWN + 1]
    assert_same(call(alone, keywords), step_result, slice(PER_SLOT), OWN_ROWS)


def test_rows_per_block_change_no_bit(step, step_result) -> None:
    _, operands, keywords = step
    geometry = operands["geometry"].replace(rows_per_block=PER_SLOT)
    assert_same(call(operands | {"geometry": geometry}, keywords), step_result)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("queries", lambda q: q[0], r"queries: got shape \(4, 32\), expected \[R, I, index_head_dim\]"),
        ("queries", lambda q: q.astype(jnp.int32), "queries: got dtype int32"),
        ("head_weights", lambda a: a[:, :1], r"head_weights: got shape \(12, 1\), expected \[R=12, I=4\]"),
        ("key_pages", lambda keys: keys[..., :-1], r"key_pages: .*16\), expected .*width=17\]"),
        ("page_table", lambda table: table[0], r"page_table: got shape \(3,\)"),
        ("num_visible", lambda count: count[1:], r"num_visible: got shape \(11,\), expected \[R=12\]"),
        ("is_candidate", lambda _: jnp.zeros((12, 7), bool), r"is_candidate: .* expected \[R=12, blocks=6\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(chunk, name: str, change, message: str) -> None:
    operands, keywords = chunk
    with pytest.raises(ValueError, match=f"index_top_k: {message}"):
        index_top_k(**operands | {name: change(operands[name])}, **keywords)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "target"}, "role: got 'target', expected one of"),
        ({"role": "restricted"}, "is_candidate: got None, expected bool"),
        ({"block_size": 0}, "block_size: got 0, expected a positive number"),
    ],
    ids=["role", "restricted", "block_size"],
)
def test_rules_that_do_not_fit_are_refused(chunk, change: dict, message: str) -> None:
    operands, keywords = chunk
    rule = keywords["candidates"]._replace(**change)
    with pytest.raises(ValueError, match=f"index_top_k: .*{message}"):
        index_top_k(**operands, **keywords | {"candidates": rule})


def test_unknown_implementation_is_refused(chunk) -> None:
    operands, keywords = chunk
    with pytest.raises(ImplementationError, match="index_top_k: got implementation 'cuda'"):
        index_top_k(**operands, **keywords, implementation="cuda")
