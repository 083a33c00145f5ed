"""A row's logits, selections and cache rows are bitwise the same in any step: the promise of the tiles.

Every row runs alone first, in a step of one row; then in steps of other sizes, orders and neighbours.
Read next: `test_equivalence.py`, where whole sequences are cut in other ways.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, ROW_TILE, Numerics
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.testing.golden import fresh_cache, live_state, make_rows, model_step
from deepinfer_jax.testing.presets import SMALLEST, as_resident, random_weights
from deepinfer_jax.testing.tolerances import assert_close

QUANTIZED = replace(SMALLEST, is_quantized=True)
SLOTS, PROMPT = 256, 11
LENGTHS = np.arange(SLOTS) % PROMPT + 1
TOKENS = np.random.default_rng(5).integers(0, SMALLEST.vocab_size, (SLOTS, PROMPT + 1)).astype(np.int32)
TAPS = frozenset({"layers.1.indexer.topk_ids", "layers.2.indexer.topk_ids", "layers.2.ffn.gate.ids"})
ALONE = (0, 1, 10, 63, 64, 100, 255)
"""Slots whose row is run alone: all lengths' residues, both sides of a tile's border."""

CASES = {"float32": (FLOAT32, SMALLEST), "official": (OFFICIAL, QUANTIZED)}
each_numerics = pytest.mark.parametrize("name", CASES)


class Prefilled(NamedTuple):
    """A model whose slots hold prompts of different lengths."""

    weights: Any
    cache: Any
    config: Any
    numerics: Numerics

    def step(self, slots: np.ndarray, numerics: Numerics | None = None):
        """Run the next token of each of some slots: logits, selections, cache."""
        tokens, starts = TOKENS[slots, LENGTHS[slots]][:, None], LENGTHS[slots]
        rows = make_rows(tokens, start=starts, slots=slots)
        return model_step(self.weights, self.config, rows, self.cache, numerics or self.numerics, TAPS)


@cache
def prefilled(name: str) -> Prefilled:
    numerics, config = CASES[name]
    weights = random_weights(SMALLEST, jax.random.key(4), numerics.compute_dtype)
    weights = as_resident(weights, config) if config.is_quantized else weights
    cache = fresh_cache(config, SLOTS, PROMPT + 1, numerics, page_tokens=12)
    # Token by token, in the shape of the largest step below.
    for start in range(PROMPT):
        rows = make_rows(TOKENS[:, start : start + 1], start=start, lengths=(start < LENGTHS).astype(int))
        _, _, cache = model_step(weights, config, rows, cache, numerics, TAPS)
    return Prefilled(weights, cache, config, numerics)


def left_behind(model: Prefilled, cache: Any, slot: int) -> dict[str, np.ndarray]:
    return live_state(cache, model.config, model.numerics, slot, int(LENGTHS[slot]) + 1)


@cache
def alone(name: str) -> dict[int, tuple[np.ndarray, dict, dict]]:
    """Logits, taps and what the slot holds afterwards, of single rows."""
    model, found = prefilled(name), {}
    for slot in ALONE:
        logits, taps, cache = model.step(np.array([slot]))
        row = {tap: np.asarray(values)[0] for tap, values in taps.items()}
        found[slot] = np.asarray(logits)[0], row, left_behind(model, cache, slot)
    return found


def check(name: str, slots: np.ndarray) -> None:
    model = prefilled(name)
    logits, taps, cache = model.step(slots)
    for slot, (expected, rows, state) in alone(name).items():
        for place in np.flatnonzero(slots == slot):
            np.testing.assert_array_equal(np.asarray(logits)[place], expected)
            for tap, values in rows.items():
                np.testing.assert_array_equal(np.asarray(taps[tap])[place], values, err_msg=tap)
            jax.tree.map(np.testing.assert_array_equal, left_behind(model, cache, slot), state)


@each_numerics
@pytest.mark.parametrize("count", [ROW_TILE, SLOTS])
def test_a_row_is_the_same_among_others(name: str, count: int) -> None:
    random = np.random.default_rng(count)
    for _ in range(3):
        others = np.setdiff1d(np.arange(SLOTS), ALONE)
        chosen = np.concatenate([random.permutation(ALONE), random.permutation(others)])[:count]
        check(name, random.permutation(chosen))


@each_numerics
def test_padding_does_not_matter(name: str) -> None:
    """Every number of valid rows from 1 to a tile, in one compiled shape."""
    model, slots = prefilled(name), np.array(ALONE)
    for count in range(1, len(ALONE) + 1):
        rows = padded(
            make_rows(TOKENS[slots, LENGTHS[slots]][:, None], start=LENGTHS[slots], slots=slots), count
        )
        logits, _, _ = model_step(model.weights, model.config, rows, model.cache, model.numerics, TAPS)
        for place in range(count):
            np.testing.assert_array_equal(np.asarray(logits)[place], alone(name)[ALONE[place]][0])


def padded(rows: Rows, count: int) -> Rows:
    """Keep `count` rows valid and give the others token ids of nothing in particular, up to a tile."""
    total = len(rows.token_ids)
    rows = jax.tree.map(lambda values: jnp.pad(values, (0, ROW_TILE - total), mode="edge"), rows)
    return rows.replace(is_valid=jnp.arange(ROW_TILE) < count)


def test_without_batch_invariance_rows_agree_up_to_rounding() -> None:
    model = prefilled("float32")
    logits, _, _ = model.step(np.array(ALONE), replace(FLOAT32, batch_invariant=False))
    expected = np.stack([alone("float32")[slot][0] for slot in ALONE])
    assert_close(logits, expected, "equivalence_float32")


def test_without_batch_invariance_there_are_no_tiles() -> None:
    """The lowered program of 3 rows multiplies 3 rows, not a tile of them."""
    model = prefilled("float32")
    rows = make_rows(np.zeros((3, 1)), slots=[0, 1, 2])

    def lowered(numerics: Numerics) -> str:
        return model_step.lower(model.weights, SMALLEST, rows, model.cache, numerics).as_text()

    head = f"x{SMALLEST.vocab_size}xf32>"
    assert f"tensor<{ROW_TILE}{head}" in lowered(FLOAT32)
    assert f"tensor<{ROW_TILE}{head}" not in lowered(replace(FLOAT32, batch_invariant=False))
    assert f"tensor<3{head}" in lowered(replace(FLOAT32, batch_invariant=False))
