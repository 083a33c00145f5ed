"""Attention over gathered keys: edges of visibility, and indices that point nowhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.attention import attend, gather_entries
from deepinfer_jax.testing.references import attention
from deepinfer_jax.testing.tolerances import assert_close

ROWS, HEADS, KEYS, CHANNELS = 4, 3, 6, 32

SINKS = {"with_sink": np.array([-1.0, 0.5, 2.0]), "without_sink": np.full(HEADS, -1e30)}
each_sink = pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)


def draw(seed: int = 14) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys, and visibility with at least one key in every row."""
    random = np.random.default_rng(seed)
    q = random.normal(size=(ROWS, HEADS, CHANNELS)).astype(np.float32)
    keys = random.normal(size=(ROWS, KEYS, CHANNELS)).astype(np.float32) * 2
    is_visible = random.random((ROWS, KEYS)) < 0.5
    is_visible[:, 1] = True
    return q, keys, is_visible


def run(q, keys, is_visible, sink) -> np.ndarray:
    arrays = jnp.asarray(q), jnp.asarray(keys), jnp.asarray(is_visible), jnp.asarray(sink, jnp.float32)
    return np.asarray(jax.jit(attend)(*arrays))


@each_sink
def test_attention_equals_a_loop(sink) -> None:
    q, keys, is_visible = draw()
    expected = attention(q, keys, is_visible, sink)
    assert_close(run(q, keys, is_visible, sink), expected, "equivalence_float32")


@each_sink
def test_bc09_row_that_sees_nothing_gives_zero(sink) -> None:
    q, keys, is_visible = draw()
    is_visible[2] = False
    np.testing.assert_array_equal(run(q, keys, is_visible, sink)[2], 0.0)


@each_sink
def test_bc09_row_that_sees_nothing_leaves_the_others(sink) -> None:
    q, keys, is_visible = draw()
    expected = run(q, keys, is_visible, sink)
    is_visible[2] = False
    others = [0, 1, 3]
    np.testing.assert_array_equal(run(q, keys, is_visible, sink)[others], expected[others])


@each_sink
def test_bc09_no_keys_at_all_give_zero(sink) -> None:
    q, keys, is_visible = draw()
    np.testing.assert_array_equal(run(q, keys[:, :0], is_visible[:, :0], sink), np.zeros_like(q))


@each_sink
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30], ids=str)
def test_bc09_invisible_keys_may_hold_anything(sink, garbage: float) -> None:
    q, keys, is_visible = draw()
    expected = run(q, keys, is_visible, sink)
    keys[~is_visible] = garbage
    np.testing.assert_array_equal(run(q, keys, is_visible, sink), expected)


def test_large_scores_do_not_overflow() -> None:
    q, keys, is_visible = draw()
    found = run(q * 1e3, keys * 1e3, is_visible, SINKS["with_sink"])
    assert np.isfinite(found).all()


INT32_MAX = 2**31 - 1
SLOTS = np.array([1, 0, 1], np.int32)


def entries_with_a_loud_last_row() -> np.ndarray:
    entries = np.random.default_rng(15).normal(size=(2, 5, CHANNELS)).astype(np.float32)
    entries[:, -1] = 1e4
    return entries


@pytest.mark.parametrize("bad", [-1, -2, 5, 10, INT32_MAX, -(2**31)], ids=str)
def test_bc69_index_out_of_range_selects_nothing(bad: int) -> None:
    selection = np.array([[0, bad, 2], [bad, bad, 3], [1, 2, bad]], np.int32)
    entries = jnp.asarray(entries_with_a_loud_last_row())
    gathered, is_there = gather_entries(entries, jnp.asarray(SLOTS), jnp.asarray(selection))
    np.testing.assert_array_equal(is_there, selection != bad)
    assert np.abs(np.asarray(gathered)).max() < 1e4


@pytest.mark.parametrize("bad", [-2, 5, 10, INT32_MAX], ids=str)
def test_bc69_index_out_of_range_attends_as_minus_one(bad: int) -> None:
    entries, q = jnp.asarray(entries_with_a_loud_last_row()), draw()[0][:3]
    results = []
    for nothing in (-1, bad):
        selection = np.array([[0, nothing, 2], [nothing, nothing, nothing], [1, 2, nothing]], np.int32)
        keys, is_there = gather_entries(entries, jnp.asarray(SLOTS), jnp.asarray(selection))
        results.append(run(q, keys, is_there, SINKS["with_sink"]))
    np.testing.assert_array_equal(results[1], results[0])


def test_bc69_valid_indices_read_their_own_slot() -> None:
    entries = entries_with_a_loud_last_row()
    selection = np.array([[0, 4], [3, 1], [2, 2]], np.int32)
    gathered, is_there = gather_entries(jnp.asarray(entries), jnp.asarray(SLOTS), jnp.asarray(selection))
    assert np.asarray(is_there).all()
    np.testing.assert_array_equal(gathered, entries[SLOTS[:, None], selection])
