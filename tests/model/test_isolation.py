"""What must not matter to a sequence: garbage in the cache, padding, its neighbours in the batch.

Separate from `test_equivalence.py`, which cuts sequences in chunks, so that two workers share them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.golden import ChunkRunner, fresh_cache, make_rows, model_step
from deepinfer_jax.testing.presets import TINY

CHUNK = 13  # rows of a slot in the compiled step: more than a window
PAD_TOKEN = 127
CAPACITY = 130
PROMPTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 33, 40)
TOKENS = np.random.default_rng(11).integers(0, PAD_TOKEN, 512).astype(np.int32)


def assert_bitwise(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for slot, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"slot {slot}")


def make_runner(weights) -> ChunkRunner:
    return ChunkRunner(
        weights, TINY, FLOAT32, slots=len(PROMPTS), capacity=CAPACITY, chunk=CHUNK, pad_token=PAD_TOKEN
    )


def filled_with_garbage(cache):
    """NaN in every float entry, ids of nothing real in every integer entry; the page table stays."""
    filled = jax.tree.map(
        lambda values: jnp.full_like(values, jnp.nan if values.dtype == jnp.float32 else 123456), cache
    )
    return filled.replace(page_table=cache.page_table, decoder_starts=cache.decoder_starts)


@pytest.mark.parametrize("sizes", [(12,), (5,), (1,)], ids=["chunks_of_12", "chunks_of_5", "chunks_of_1"])
def test_garbage_in_unused_cache_entries_changes_nothing(tiny_weights, sizes) -> None:
    prompts = [TOKENS[:length] for length in PROMPTS]
    clean, dirty = make_runner(tiny_weights), make_runner(tiny_weights)
    dirty.cache = filled_with_garbage(dirty.cache)
    assert_bitwise(dirty.feed_all(prompts, sizes), clean.feed_all(prompts, sizes))


def test_what_an_earlier_sequence_left_in_a_slot_changes_nothing(tiny_weights) -> None:
    prompts = [TOKENS[:length] for length in PROMPTS]
    fresh, used = make_runner(tiny_weights), make_runner(tiny_weights)
    used.feed_all([TOKENS[100:148]] * len(PROMPTS), (12,))
    used.lengths = np.zeros_like(used.lengths)
    assert_bitwise(used.feed_all(prompts, (7,)), fresh.feed_all(prompts, (7,)))


def run_with_padding(weights) -> tuple[list[np.ndarray], ChunkRunner]:
    runner = make_runner(weights)
    return runner.feed_all([TOKENS[:length] for length in PROMPTS], (5, 1, 8)), runner


def test_nan_in_padding_rows_changes_no_logits(tiny_weights) -> None:
    poisoned = tiny_weights.replace(embed=tiny_weights.embed.at[PAD_TOKEN].set(jnp.nan))
    assert_bitwise(run_with_padding(poisoned)[0], run_with_padding(tiny_weights)[0])


def test_nan_in_padding_rows_changes_no_cache(tiny_weights) -> None:
    poisoned = tiny_weights.replace(embed=tiny_weights.embed.at[PAD_TOKEN].set(jnp.nan))
    found, expected = run_with_padding(poisoned)[1].cache, run_with_padding(tiny_weights)[1].cache
    jax.tree.map(np.testing.assert_array_equal, found, expected)


MIXED_LENGTHS = (1, 7, 8, 9, 129)


def mixed_prompt(length: int) -> np.ndarray:
    return TOKENS[200 + length : 200 + 2 * length]


@pytest.fixture(scope="module")
def alone(tiny_weights) -> dict[int, np.ndarray]:
    """Logits of each prompt while no other slot holds anything."""
    nobody, found = [[]] * (len(PROMPTS) - 1), {}
    for length in MIXED_LENGTHS:
        found[length] = make_runner(tiny_weights).feed_all([mixed_prompt(length), *nobody], (CHUNK,))[0]
    return found


def run_together(weights, cache, lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Logits of the prompts in one step, rows packed without padding between, slots in the given order."""
    parts = [make_rows(mixed_prompt(length)[None], slots=[slot]) for slot, length in enumerate(lengths)]
    # Filled up to the shape of the other steps of this file.
    rest = len(PROMPTS) * CHUNK - sum(lengths)
    parts.append(make_rows(np.full((1, rest), PAD_TOKEN), lengths=[0], slots=[0]))
    rows = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    logits, _, _ = model_step(weights, TINY, rows, cache, FLOAT32)
    return dict(zip(lengths, np.split(np.asarray(logits), np.cumsum(lengths))[:-1], strict=True))


@pytest.fixture(scope="module")
def together(tiny_weights) -> list[dict[int, np.ndarray]]:
    """Logits of the batch in each of the 120 orders."""
    cache = fresh_cache(TINY, len(PROMPTS), CAPACITY, FLOAT32)
    return [run_together(tiny_weights, cache, lengths) for lengths in itertools.permutations(MIXED_LENGTHS)]


each_length = pytest.mark.parametrize("length", MIXED_LENGTHS, ids=lambda length: f"length_{length}")


@each_length
def test_bc16_batch_of_mixed_lengths_in_all_orders(alone, together, length: int) -> None:
    for results in together:
        np.testing.assert_array_equal(results[length], alone[length])
