"""A sequence gives bitwise the same however it is cut, padded, batched and placed.

The reference is always one step over the whole sequence from an empty cache; `test_golden.py`
compares that step with the golden files. The reference's blocks are whole sequences while chunks run
in blocks of 1 row (window 8) and 16 rows (window 128), and its pages hold 128 tokens while the chunks'
hold 16, so blocks and pages must not matter either. In float32 numerics: `test_invariance.py` has the
official ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import ONE_OF_EACH_WINDOW_128, TINY, random_weights
from deepinfer_jax.testing.references import engram_table_rows

WINDOW = TINY.sliding_window
RATIOS = (1, 2)

DECODED = 8  # a whole window, so every ring entry is written by decode steps too
PROMPTS = range(1, 41)
TOTAL = max(PROMPTS) + DECODED
CHUNK = 12  # rows of a slot in the compiled step: more than a window
PAD_TOKEN = 127

TOKENS = np.random.default_rng(11).integers(0, PAD_TOKEN, 512).astype(np.int32)


TAPS = frozenset(
    {f"layers.{layer}.out" for layer in range(TINY.num_hidden_layers)}
    | {f"layers.{layer}.engram.hash_ids" for layer in TINY.engram_layer_ids}
    | {f"layers.{layer}.indexer.score_masked" for layer in TINY.kv_source_layer_ids}
)


class Reference:
    """Logits of the whole sequence and the live state after chosen lengths, from one step each."""

    def __init__(self, weights, config, lengths: Sequence[int]) -> None:
        longest = max(lengths)
        runner = ChunkRunner(
            weights,
            config,
            FLOAT32,
            slots=len(lengths),
            capacity=longest,
            chunk=longest,
            rows_per_block=longest,
        )
        logits = runner.feed([TOKENS[:length] for length in lengths])
        self.prompt_logits = dict(zip(lengths, logits, strict=True))
        self.logits = self.prompt_logits[longest]
        self.states = {length: runner.live_state(slot) for slot, length in enumerate(lengths)}


def assert_same_state(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for part, values in expected.items():
        np.testing.assert_array_equal(found[part], values, err_msg=part)


def check_prefill_then_decode(
    runner: ChunkRunner, prompts, sizes, decoded: int, reference: Reference
) -> None:
    """Prefill every prompt length in chunks, decode one token at a time, compare all of it."""
    prefill = runner.feed_all([TOKENS[:length] for length in prompts], sizes)
    for logits, length in zip(prefill, prompts, strict=True):
        np.testing.assert_array_equal(logits, reference.logits[:length])
    for slot, length in enumerate(prompts):
        assert_same_state(runner.live_state(slot), reference.states[length])
    steps = [
        runner.feed([TOKENS[length + step : length + step + 1] for length in prompts])
        for step in range(decoded)
    ]
    found = np.stack([np.concatenate(step) for step in steps], axis=1)
    expected = np.stack([reference.logits[length : length + decoded] for length in prompts])
    np.testing.assert_array_equal(found, expected)
    for slot, length in enumerate(prompts):
        assert_same_state(runner.live_state(slot), reference.states[length + decoded])


@pytest.fixture(scope="module")
def reference(tiny_weights) -> Reference:
    return Reference(tiny_weights, TINY, range(1, TOTAL + 1))


def make_runner(weights) -> ChunkRunner:
    """One shape, and one set of taps, for the whole file: every runner of window 8 shares its executable."""
    options = dict(slots=len(PROMPTS), capacity=TOTAL, chunk=CHUNK, pad_token=PAD_TOKEN, page_tokens=16)
    return ChunkRunner(weights, TINY, FLOAT32, **options, taps=TAPS)


CHUNKINGS = {
    **{f"chunks_of_{size}": (size,) for size in (*range(1, 9), 11, 12)},
    "odd_then_even": (3, 4),
    "even_then_odd": (2, 7),
    "all_odd": (1, 5, 9),
    "long_then_single": (12, 1),
    "mixed": (1, 2, 3, 8, 5, 12, 7),
}


@pytest.mark.parametrize("sizes", CHUNKINGS.values(), ids=CHUNKINGS)
def test_every_prompt_length_in_chunks_then_decode(tiny_weights, reference, sizes) -> None:
    check_prefill_then_decode(make_runner(tiny_weights), PROMPTS, sizes, DECODED, reference)


@pytest.mark.parametrize("length", range(1, 3 * max(RATIOS) * WINDOW + 1))
def test_bc01_prompt_length_residue(reference, length: int) -> None:
    np.testing.assert_array_equal(reference.prompt_logits[length], reference.logits[:length])


LENGTHS_128 = (1, 2, 127, 128, 129, 130, 255, 256, 257, 300)
DECODED_128 = 5


@pytest.fixture(scope="module")
def weights_128() -> Weights:
    return random_weights(ONE_OF_EACH_WINDOW_128, jax.random.key(2))


@pytest.fixture(scope="module")
def reference_128(weights_128) -> Reference:
    lengths = {length + extra for length in LENGTHS_128 for extra in (0, DECODED_128)}
    return Reference(weights_128, ONE_OF_EACH_WINDOW_128, sorted(lengths))


@pytest.mark.parametrize(
    "sizes",
    [(160,), (64,), (37,), (128, 1), (127, 2), (63, 64, 33)],
    ids=lambda sizes: "chunks_of_" + "_".join(str(size) for size in sizes),
)
def test_bc05_window_128_in_chunks_then_decode(weights_128, reference_128, sizes) -> None:
    runner = ChunkRunner(
        weights_128,
        ONE_OF_EACH_WINDOW_128,
        FLOAT32,
        slots=len(LENGTHS_128),
        capacity=306,
        chunk=160,
        rows_per_block=16,
    )
    check_prefill_then_decode(runner, LENGTHS_128, sizes, DECODED_128, reference_128)


@pytest.fixture(scope="module")
def greedy(tiny_weights) -> np.ndarray:
    """Greedy continuation of the first token, decoded one at a time: 2 W + 2 ids."""
    runner, tokens = make_runner(tiny_weights), [int(TOKENS[0])]
    nobody = [[]] * (len(PROMPTS) - 1)
    while len(tokens) < 2 * WINDOW + 2:
        logits = runner.feed([tokens[-1:], *nobody])[0]
        tokens.append(int(logits[-1].argmax()))
    return np.array(tokens, np.int32)


@pytest.mark.parametrize(
    "length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 1]
)
def test_bc05_greedy_decode_past_the_window(tiny_weights, greedy, length: int) -> None:
    # The shape of the reference, so its executable serves.
    runner = ChunkRunner(
        tiny_weights, TINY, FLOAT32, slots=TOTAL, capacity=TOTAL, chunk=TOTAL, rows_per_block=TOTAL
    )
    logits = runner.feed([greedy[:length], *[[]] * (TOTAL - 1)])[0]
    assert int(logits[-1].argmax()) == greedy[length]


@pytest.fixture(scope="module")
def tapped_steps(tiny_weights):
    """Taps of every position of 40 tokens in chunks of 1, 7 and 12."""
    found = {}
    for size in (1, 7, 12):
        runner, parts = make_runner(tiny_weights), []
        for start in range(0, 40, size):
            runner.feed([TOKENS[start : min(start + size, 40)], *[[]] * (len(PROMPTS) - 1)])
            parts.append(runner.tapped[0])
        found[size] = {name: np.concatenate([part[name] for part in parts]) for name in TAPS}
    return found


each_size = pytest.mark.parametrize("size", [1, 7, 12], ids=lambda size: f"chunks_of_{size}")


@each_size
@pytest.mark.parametrize("layer", TINY.kv_source_layer_ids, ids=lambda layer: f"layer_{layer}")
def test_bc03_query_sees_whole_groups_only(tapped_steps, size: int, layer: int) -> None:
    scores = tapped_steps[size][f"layers.{layer}.indexer.score_masked"]
    visible = np.isfinite(scores).sum(axis=-1)
    np.testing.assert_array_equal(visible, (np.arange(40) + 1) // TINY.compress_ratios[layer])


@each_size
@pytest.mark.parametrize("layer", TINY.engram_layer_ids, ids=lambda layer: f"layer_{layer}")
def test_bc61_engram_rows_at_chunk_edges(tiny_weights, tapped_steps, size: int, layer: int) -> None:
    """Prefix hits and rejected drafts are tested where they are implemented."""
    expected = engram_table_rows(TOKENS[:40], np.zeros(40, bool), tiny_weights.token_map, TINY)
    found = tapped_steps[size][f"layers.{layer}.engram.hash_ids"]
    np.testing.assert_array_equal(found, expected[:, TINY.engram_layer_ids.index(layer)])


@pytest.mark.parametrize("layer", range(TINY.num_hidden_layers), ids=lambda layer: f"layer_{layer}")
def test_streams_do_not_depend_on_chunks(tapped_steps, layer: int) -> None:
    name = f"layers.{layer}.out"
    np.testing.assert_array_equal(tapped_steps[1][name], tapped_steps[12][name])


def test_slots_at_different_stages_share_a_step(tiny_weights, reference) -> None:
    """Some slots prefill while others decode, and the rows' order differs from the slots' order."""
    random = np.random.default_rng(5)
    runner = make_runner(tiny_weights)
    found: list[list[np.ndarray]] = [[] for _ in PROMPTS]
    for _ in range(24):
        starts = runner.lengths.copy()
        counts = random.choice([0, 1, 1, 1, 2, 5, CHUNK], len(PROMPTS))
        chunks = [TOKENS[start : min(start + n, TOTAL)] for start, n in zip(starts, counts, strict=True)]
        for slot, logits in enumerate(runner.feed(chunks, order=random.permutation(len(PROMPTS)))):
            found[slot].append(logits)
    for slot, parts in enumerate(found):
        length = int(runner.lengths[slot])
        np.testing.assert_array_equal(np.concatenate(parts), reference.logits[:length])
        assert_same_state(runner.live_state(slot), reference.states[length])


def test_image_tokens_in_chunks(tiny_weights) -> None:
    is_image = np.zeros(40, bool)
    is_image[[3, 4, 10, 11, 12, 13, 25]] = True
    results = []
    for size in (12, 1, 5):
        runner = make_runner(tiny_weights)
        parts = [
            runner.feed(
                [TOKENS[start : min(start + size, 40)]] * len(PROMPTS),
                [is_image[start : min(start + size, 40)]] * len(PROMPTS),
            )[0]
            for start in range(0, 40, size)
        ]
        results.append(np.concatenate(parts))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
