"""The cache's memory, to the byte, and what shortening a sequence must not leave behind.

Read next: `test_rows.py` (rings), `test_isolation.py` (garbage in unused entries).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import NOTHING, CacheConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.kernels import CACHE_FORMATS
from deepinfer_jax.model.cache import empty_cache
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import TINY

PAGES = 10
KV_BYTES_OF_A_TOKEN = {"fp4": 890, "fp8": 1650, "bf16": 3200, "float32": 6400}
"""Spec/serving.md section 2: 2.5 entries a token, each of 288 + 68, 528 + 132 or 1024 + 256 bytes."""


def released_cache(released_folder, numerics: Numerics, slack: int = 0):
    config = read_config(released_folder)
    sizes = CacheConfig(num_slots=3, pages_per_slot=4, num_pages=PAGES, window_slack=slack)
    return jax.eval_shape(lambda: empty_cache(config, sizes, numerics))


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_bytes_of_a_token(released_folder, cache_format: str) -> None:
    numerics = Numerics("any", OFFICIAL.compute_dtype, True, cache_format)
    cache = released_cache(released_folder, numerics)
    assert num_bytes(cache.compressed) == PAGES * 128 * KV_BYTES_OF_A_TOKEN[cache_format]


def test_bytes_of_a_request(released_folder) -> None:
    cache = released_cache(released_folder, OFFICIAL)
    assert num_bytes(cache.window) == 3 * 40 * 67_584
    # Of a ratio-2 source: value and score of one token, 512 float32 each.
    assert num_bytes((cache.pending_kv, cache.pending_score)) == 3 * 3 * 4096


def test_bytes_of_a_request_with_slack(released_folder) -> None:
    cache = released_cache(released_folder, OFFICIAL, slack=6)
    assert num_bytes(cache.window) == 3 * 40 * 134 * 528
    assert num_bytes((cache.pending_kv, cache.pending_score)) == 3 * 3 * 7 * 4096


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_format: got 'int8', expected one of"):
        Numerics("any", OFFICIAL.compute_dtype, True, "int8")


SLACK, CHUNK, LENGTH = 5, 8, 44
TOKENS = np.random.default_rng(23).integers(0, TINY.vocab_size, LENGTH).astype(np.int32)
LENGTHS = (3, 8, 9, 16, 17, 30, 31)
"""Of the sequences when tokens are rejected: both halves of a group, the window's borders."""


def make_runner(weights) -> ChunkRunner:
    return ChunkRunner(
        weights, TINY, FLOAT32, slots=len(LENGTHS), capacity=LENGTH, chunk=CHUNK, slack=SLACK, page_tokens=8
    )


@pytest.fixture(scope="module")
def straight(tiny_weights):
    """Logits and states after every further token of sequences that were never shortened."""
    runner = make_runner(tiny_weights)
    runner.feed_all([TOKENS[:length] for length in LENGTHS], (CHUNK,))
    states, logits = [states_of(runner)], []
    for step in range(SLACK + 4):
        logits.append(runner.feed([TOKENS[length + step :][:1] for length in LENGTHS]))
        states.append(states_of(runner))
    return logits, states


def states_of(runner: ChunkRunner) -> list[dict]:
    return [runner.live_state(slot) for slot in range(len(LENGTHS))]


@pytest.mark.parametrize("rejected", [1, 2, SLACK])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_rejected_tokens_leave_no_trace(tiny_weights, straight, rejected: int, kept: int) -> None:
    """Run `kept` right tokens and `rejected` wrong ones, shorten by length, go on: state and logits agree."""
    logits, states = straight
    runner = make_runner(tiny_weights)
    runner.feed_all([TOKENS[:length] for length in LENGTHS], (CHUNK,))
    wrong = (TOKENS[:SLACK] + 1) % TINY.vocab_size
    runner.feed([np.concatenate([TOKENS[length:][:kept], wrong[:rejected]]) for length in LENGTHS])
    runner.lengths = runner.lengths - rejected
    jax.tree.map(np.testing.assert_array_equal, states_of(runner), states[kept])
    for step in range(kept, kept + 3):
        found = runner.feed([TOKENS[length + step :][:1] for length in LENGTHS])
        jax.tree.map(np.testing.assert_array_equal, found, logits[step])
    jax.tree.map(np.testing.assert_array_equal, states_of(runner), states[kept + 3])


def test_more_rejected_tokens_than_slack_are_noticed_here(tiny_weights, straight) -> None:
    """The slack is what the test above relies on: one token more and the window has lost a row."""
    runner = make_runner(tiny_weights)
    runner.feed_all([TOKENS[:length] for length in LENGTHS], (CHUNK,))
    runner.feed([(TOKENS[: SLACK + 1] + 1) % TINY.vocab_size for _ in LENGTHS])
    runner.lengths = runner.lengths - (SLACK + 1)
    longest = len(LENGTHS) - 1
    found, expected = runner.live_state(longest)["window"], straight[1][0][longest]["window"]
    assert (found != expected).any()


def test_pages_may_lie_anywhere(tiny_weights, straight) -> None:
    """A page table in random order, with pages that nobody owns between, changes nothing."""
    runner = make_runner(tiny_weights)
    table = np.asarray(runner.cache.page_table)
    shuffled = np.random.default_rng(3).permutation(table.reshape(-1)).reshape(table.shape)
    runner.cache = runner.cache.replace(page_table=jnp.asarray(shuffled))
    runner.feed_all([TOKENS[:length] for length in LENGTHS], (CHUNK,))
    logits, states = straight
    jax.tree.map(np.testing.assert_array_equal, states_of(runner), states[0])
    found = runner.feed([TOKENS[length:][:1] for length in LENGTHS])
    jax.tree.map(np.testing.assert_array_equal, found, logits[0])


def test_a_slot_without_pages_writes_into_nobody_elses(tiny_weights, straight) -> None:
    """Entries without a page are dropped."""
    runner = make_runner(tiny_weights)
    homeless = len(LENGTHS) - 1
    runner.cache = runner.cache.replace(page_table=runner.cache.page_table.at[homeless].set(NOTHING))
    before = {ratio: pages.kv for ratio, pages in runner.cache.compressed.items()}
    runner.feed([*[[]] * homeless, TOKENS[:CHUNK]])
    after = {ratio: pages.kv for ratio, pages in runner.cache.compressed.items()}
    jax.tree.map(np.testing.assert_array_equal, after, before)
