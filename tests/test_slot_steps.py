"""What moves a sequence moves all of it and nothing else.

Separate from `test_step.py` because nothing is computed here: states hold random bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.model.cache import SlotCache, slot_cache
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.slot_steps import (
    empty_snapshots,
    export_step,
    import_step,
    note_step,
    restore_step,
    save_step,
    slot_axis,
)
from deepinfer_jax.step import EngineState, initial_state
from deepinfer_jax.testing.presets import SMALLEST

SIZES = CacheConfig(num_slots=3, pages_per_slot=2, num_pages=5, window_slack=2)
STATIC: dict[str, Any] = {"config": SMALLEST, "numerics": OFFICIAL}
NAMES = list(
    vars(slot_cache(initial_state(jnp.zeros(SMALLEST.vocab_size, bool), sizes=SIZES, **STATIC).cache))
)


def scrambled[T](tree: T, seed: int) -> T:
    """The same shapes with random bytes."""
    random = np.random.default_rng(seed)

    def scramble(array: jax.Array) -> jax.Array:
        if array.dtype == bool:
            return jnp.asarray(random.integers(0, 2, array.shape).astype(bool))
        return jnp.asarray(random.integers(0, 100, array.shape).astype(array.dtype))

    return jax.tree.map(scramble, tree)


def state_of(seed: int) -> EngineState:
    return scrambled(initial_state(jnp.zeros(SMALLEST.vocab_size, bool), sizes=SIZES, **STATIC), seed)


def snapshots_of(seed: int) -> SlotCache:
    return scrambled(empty_snapshots(num_snapshots=4, sizes=SIZES, **STATIC), seed)


def host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def slot_of(rings: SlotCache, name: str, slot: int) -> np.ndarray:
    return np.asarray(getattr(rings, name)).take(slot, axis=slot_axis(name))


def numbers(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array(value, np.int32) for value in values)


def test_a_snapshot_and_back() -> None:
    state, snapshots = state_of(1), snapshots_of(2)
    before, others = host(slot_cache(state.cache)), host(snapshots)
    snapshots = save_step(snapshots, state, *numbers(3, 1))
    for name in NAMES:
        assert np.array_equal(slot_of(snapshots, name, 3), slot_of(before, name, 1))
        for snapshot in range(3):
            assert np.array_equal(slot_of(snapshots, name, snapshot), slot_of(others, name, snapshot))
    later = restore_step(state_of(7), snapshots, *numbers(2, 3))
    untouched = host(state_of(7))
    for name in NAMES:
        assert np.array_equal(slot_of(slot_cache(later.cache), name, 2), slot_of(before, name, 1))
        for slot in range(2):
            expected = slot_of(slot_cache(untouched.cache), name, slot)
            assert np.array_equal(slot_of(slot_cache(later.cache), name, slot), expected)
    jax.tree.map(np.testing.assert_array_equal, later.cache.compressed, untouched.cache.compressed)
    jax.tree.map(np.testing.assert_array_equal, later.sampler, untouched.sampler)


@pytest.mark.parametrize(("snapshot", "slot"), [(NOTHING, 0), (NOTHING, NOTHING)])
def test_nothing_is_saved_to_nowhere(snapshot: int, slot: int) -> None:
    saved = save_step(snapshots_of(2), state_of(1), *numbers(snapshot, slot))
    jax.tree.map(np.testing.assert_array_equal, host(saved), host(snapshots_of(2)))
    restored = restore_step(state_of(1), snapshots_of(2), *numbers(NOTHING, 0))
    jax.tree.map(np.testing.assert_array_equal, host(restored), host(state_of(1)))


def test_a_sequence_moves_to_another_slot_and_other_pages() -> None:
    source = state_of(1)
    sequence = export_step(source, *numbers(2), np.array([4, 1], np.int32))
    moved = import_step(state_of(9), sequence, *numbers(0), np.array([3, 0], np.int32))
    untouched = host(state_of(9))
    for name in NAMES:
        assert np.array_equal(
            slot_of(slot_cache(moved.cache), name, 0), slot_of(slot_cache(source.cache), name, 2)
        )
        for slot in (1, 2):
            expected = slot_of(slot_cache(untouched.cache), name, slot)
            assert np.array_equal(slot_of(slot_cache(moved.cache), name, slot), expected)

    def compare(new: np.ndarray, old: np.ndarray, before: np.ndarray) -> None:
        np.testing.assert_array_equal(new[:, [3, 0]], old[:, [4, 1]])
        np.testing.assert_array_equal(new[:, [1, 2, 4]], before[:, [1, 2, 4]])

    jax.tree.map(
        compare, host(moved.cache.compressed), host(source.cache.compressed), untouched.cache.compressed
    )


def test_pages_that_a_sequence_lacks_are_not_written() -> None:
    sequence = export_step(state_of(1), *numbers(2), np.array([4, NOTHING], np.int32))
    moved = import_step(state_of(9), sequence, *numbers(0), np.array([3, NOTHING], np.int32))
    before = host(state_of(9).cache.compressed)
    jax.tree.map(
        lambda new, old: np.testing.assert_array_equal(new[:, [0, 1, 2, 4]], old[:, [0, 1, 2, 4]]),
        host(moved.cache.compressed),
        before,
    )


def test_noted_tokens_count_as_prompt_or_output_by_their_place() -> None:
    state = initial_state(jnp.zeros(SMALLEST.vocab_size, bool), sizes=SIZES, **STATIC)
    state = state.replace(sampler=state.sampler.replace(prompt_lengths=jnp.array([9, 2, 9], jnp.int32)))
    ids = np.array([5, 6, 7, 7, 99], np.int32)
    sampler = note_step(state, *numbers(1), ids, *numbers(4)).sampler
    assert np.argwhere(np.asarray(sampler.in_prompt)).tolist() == [[1, 5], [1, 6]]
    assert np.argwhere(np.asarray(sampler.counts)).tolist() == [[1, 7]]
    assert sampler.counts[1, 7] == 2
    assert sampler.num_generated.tolist() == [0, 0, 0]
