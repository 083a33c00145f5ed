"""Rows and the rings they read and write, against sequences kept in plain lists."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.config import CacheConfig, ConfigError
from deepinfer_jax.model.cache import empty_cache, read_ring, with_own_pages, write_ring
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.rows import Rows, is_among_last, own_rows, row_geometry, row_tiles
from deepinfer_jax.testing.golden import make_rows
from deepinfer_jax.testing.presets import TINY

SLOTS, CHUNK = 3, 4
ORDER = (2, 0, 1)  # of the slots' rows in the step

# For each slot: tokens before the step, and valid rows of it in the step.
steps = st.lists(st.tuples(st.integers(0, 9), st.integers(0, CHUNK)), min_size=SLOTS, max_size=SLOTS)
# Whether padding stands before the valid rows, and so pretends to be the tokens before them.
is_padded_in_front = st.booleans()


def rows_of(step: list[tuple[int, int]], in_front: bool) -> Rows:
    starts, counts = (np.array(part) for part in zip(*step, strict=True))
    tokens = np.zeros((SLOTS, CHUNK), np.int32)
    if not in_front:
        return make_rows(tokens, start=starts, lengths=counts, slots=ORDER)
    rows = make_rows(tokens, start=starts - (CHUNK - counts), slots=ORDER)
    is_valid = np.arange(CHUNK)[None, :] >= CHUNK - counts[:, None]
    return rows.replace(is_valid=jnp.asarray(is_valid.reshape(-1)))


def valid_places(rows: Rows) -> dict[tuple[int, int], int]:
    """Row index of every (slot, position) of the step."""
    slots, positions, valid = (np.asarray(part) for part in (rows.slots, rows.positions, rows.is_valid))
    return {(int(slots[i]), int(positions[i])): i for i in np.flatnonzero(valid)}


@given(steps, is_padded_in_front)
def test_offsets_reach_exactly_the_rows_of_the_step(step, in_front: bool) -> None:
    rows = rows_of(step, in_front)
    places = valid_places(rows)
    offsets = np.asarray(row_geometry(rows).slot_offsets)
    for (slot, position), row in places.items():
        for distance in range(CHUNK + 2):
            expected = places.get((slot, position - distance))
            assert (row - distance >= offsets[row]) == (expected is not None)
            if expected is not None:
                assert row - distance == expected


@given(steps, st.integers(1, 5))
def test_tiles_keep_every_row_and_pad_the_last(step, tile: int) -> None:
    rows = rows_of(step, in_front=False)
    tiles, total = row_tiles(rows, tile), SLOTS * CHUNK
    assert tiles.token_ids.shape == (-(-total // tile), tile)
    for name in ("slots", "positions", "is_valid"):
        flat = np.asarray(getattr(tiles, name)).reshape(-1)
        np.testing.assert_array_equal(flat[:total], getattr(rows, name))
        assert not flat[total:].any()


@given(steps, is_padded_in_front, st.integers(1, 5))
def test_last_rows_of_each_slot(step, in_front: bool, count: int) -> None:
    rows = rows_of(step, in_front)
    places, expected = valid_places(rows), np.zeros(SLOTS * CHUNK, bool)
    for slot in range(SLOTS):
        for position in sorted(p for s, p in places if s == slot)[-count:]:
            expected[places[slot, position]] = True
    np.testing.assert_array_equal(is_among_last(row_geometry(rows), count), expected)


@given(steps, is_padded_in_front, st.integers(1, 5))
def test_ring_keeps_the_latest_positions(step, in_front: bool, entries: int) -> None:
    rows = rows_of(step, in_front)
    values = np.arange(SLOTS * CHUNK, dtype=np.float32) + 1000
    history = {(slot, p): 100 * slot + p for slot in range(SLOTS) for p in range(20)}
    starts = dict(zip(ORDER, [start for start, _ in step], strict=True))
    ring, expected = (np.full((SLOTS, entries), -1.0, np.float32) for _ in range(2))
    for slot, start in starts.items():
        for position in range(max(0, start - entries), start):
            ring[slot, position % entries] = expected[slot, position % entries] = history[slot, position]
    for (slot, position), row in sorted(valid_places(rows).items()):
        expected[slot, position % entries] = values[row]
    found = write_ring(jnp.asarray(ring), jnp.asarray(values), row_geometry(rows))
    np.testing.assert_array_equal(found, expected)


@given(steps, is_padded_in_front, st.integers(1, 5))
def test_ring_and_step_together_give_the_latest_positions(step, in_front: bool, entries: int) -> None:
    rows = rows_of(step, in_front)
    places = valid_places(rows)
    values = np.arange(SLOTS * CHUNK, dtype=np.float32) + 1000
    ring = np.full((SLOTS, entries), np.nan, np.float32)
    for slot, (start, _) in zip(ORDER, step, strict=True):
        for position in range(max(0, start - entries), start):
            ring[slot, position % entries] = 100 * slot + position
    distances = jnp.arange(entries, dtype=jnp.int32)
    found = read_ring(jnp.asarray(ring), jnp.asarray(values), row_geometry(rows), distances)
    found = np.asarray(found)
    for (slot, position), row in places.items():
        for distance in range(entries):
            at = position - distance
            if at >= 0:
                expected = values[places[slot, at]] if (slot, at) in places else 100 * slot + at
                assert found[row, distance] == expected


def test_rows_of_equal_positions_in_other_slots_are_no_neighbours() -> None:
    rows = make_rows(np.zeros((2, 1)), start=[4, 5])
    assert int(row_geometry(rows).slot_offsets[1]) == 1


def test_devices_share_a_tile_in_the_order_of_its_rows() -> None:
    rows = make_rows(np.arange(12).reshape(3, 4), start=[4, 5, 6], rows_per_block=4)
    assert own_rows(rows, 1, 0).own is rows
    shares = [own_rows(rows, 3, device) for device in range(3)]
    assert np.concatenate([share.own.token_ids for share in shares]).tolist() == list(range(12))
    assert [int(share.earlier_mask.sum()) for share in shares] == [0, 4, 8]
    assert all(share.shared is rows and share.own.rows_per_block == 4 for share in shares)
    assert own_rows(rows, 2, 1).own.rows_per_block == 2


def test_blocks_that_do_not_divide_the_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks of 6, expected a multiple of rows_per_block=4"):
        make_rows(np.zeros((1, 6)), rows_per_block=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, "cache num_slots: got 0, expected a positive integer"),
        ({"num_pages": -1}, "cache num_pages: got -1, expected a positive integer"),
        ({"window_slack": -1}, "cache window_slack: got -1, expected 0 or more"),
        ({"page_tokens": 7}, "cache page_tokens: got 7, expected an even number"),
    ],
)
def test_cache_sizes_that_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**{"num_slots": 1, "pages_per_slot": 1, "num_pages": 1, **changes})


def test_too_few_pages_for_all_slots_are_refused() -> None:
    cache = empty_cache(TINY, CacheConfig(num_slots=2, pages_per_slot=3, num_pages=5), FLOAT32)
    with pytest.raises(ValueError, match="cache pages: got 5, expected at least 2 slots x 3"):
        with_own_pages(cache)
