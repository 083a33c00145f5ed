"""The draft's training forward is the released maths: golden drafts, and no block sees what it must not.

Separate because it needs the golden draft stages, which the trainer's own tests do not.
Read next: `test_draft_losses.py`, `deepinfer_jax/training/draft_forward.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import random_arrays
from deepinfer_jax.checkpoint import load_weights
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.draft_weights import draft_weight_specs
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.testing.golden import ChunkRunner, read_golden
from deepinfer_jax.testing.presets import TINY, random_weights
from deepinfer_jax.testing.tolerances import assert_close
from deepinfer_jax.training.draft_forward import DraftContext, draft_forward, take_places
from deepinfer_jax.training.forward import Batch, TrainingMode, forward

GOLDEN = Path(__file__).parents[1] / "golden"

PROMPT = 13
LENGTH = 40
PADDED = 48
"""Places of a row: the last golden block begins at 40 and ends at 42."""

NUMERICS = {
    "off": FLOAT32,
    "on": replace(FLOAT32, name="quantized_cache", cache_format="fp4"),
}

run = jax.jit(draft_forward, static_argnums=(4, 5))


@pytest.fixture(scope="module")
def golden_weights() -> Weights:
    folder = GOLDEN / "tiny_bf16"
    return load_weights(folder, read_config(folder), jnp.float32)


@pytest.fixture(scope="module", params=["off", "on"])
def golden_case(request: pytest.FixtureRequest):
    """Name of the cache quantisation, its decode file, and the trunk's means of row 0 [40, 192]."""
    name = request.param
    main = read_golden(GOLDEN, f"full_kvquant_{name}")["main_hidden"][0]
    return name, read_golden(GOLDEN, f"decode_kvquant_{name}"), main


def test_golden_drafts(golden_weights: Weights, golden_case) -> None:
    """27 blocks of one sequence at once, each from a context of one prompt and what followed."""
    name, golden, main = golden_case
    assert_close(main[PROMPT:], golden["dspark_main_hidden"][0], "golden_float32")
    steps = golden["dspark_anchor_ids"].shape[1]
    context = DraftContext(
        inputs=jnp.pad(jnp.asarray(main), ((0, PADDED - LENGTH), (0, 0)))[None],
        segments=jnp.ones((1, PADDED), jnp.int32),
        anchors=jnp.arange(PROMPT + 1, PROMPT + 1 + steps, dtype=jnp.int32)[None],
        tokens=jnp.asarray(golden["dspark_output_ids"][:1, :, :-1], jnp.int32),
    )
    found = run(
        *(golden_weights.draft, golden_weights.embed, golden_weights.head, context, TINY, NUMERICS[name])
    )
    tolerance = {"off": "golden_float32", "on": "golden_cache_quantized"}[name]
    assert_close(found.logits[0], golden["dspark_logits"][0], tolerance)
    assert_close(found.confidence[0], golden["dspark_confidence"][0], tolerance)
    np.testing.assert_array_equal(np.argmax(found.logits[0], -1), golden["dspark_output_ids"][0, :, 1:])


class Setting(NamedTuple):
    """Random stages, two packed rows and blocks in them."""

    weights: Weights
    context: DraftContext


BLOCKS = [[9, 21, 30], [3, 20, 31]]
"""Anchors: the second row's first segment ends at 19, its second begins at 20."""


@pytest.fixture(scope="module")
def setting() -> Setting:
    draft = random_arrays(draft_weight_specs(TINY), jax.random.key(5), jnp.float32)
    weights = random_weights(replace(TINY, is_quantized=False), jax.random.key(6)).replace(draft=draft)
    segments = np.ones((2, PADDED), np.int32)
    segments[1, 19], segments[1, 20:], segments[1, 40:] = 0, 2, 0
    shape = (2, PADDED, 3 * TINY.hidden_size)
    anchors = jnp.asarray(BLOCKS, jnp.int32)
    places = anchors[..., None] + jnp.arange(3, dtype=jnp.int32)[None, None, :]
    tokens = jax.random.randint(jax.random.key(8), (2, PADDED), 3, TINY.vocab_size)
    inputs = jax.random.normal(jax.random.key(7), shape, jnp.float32)
    return Setting(weights, DraftContext(inputs, jnp.asarray(segments), anchors, take_places(tokens, places)))


def logits(setting: Setting, **changes: jax.Array) -> np.ndarray:
    weights, context = setting.weights, setting.context._replace(**changes)
    result = run(weights.draft, weights.embed, weights.head, context, TINY, FLOAT32)
    return np.asarray(result.logits)


def test_a_block_reads_the_window_before_its_anchor_and_nothing_else(setting: Setting) -> None:
    """Every trunk row is changed in turn: a block moves if it is one of the 8 before, of its sequence."""
    before = logits(setting)
    for place in (0, 2, 3, 8, 9, 12, 13, 18, 20, 22, 23, 30, 31, 40):
        changed = logits(setting, inputs=setting.context.inputs.at[:, place].add(1.0))
        moved = np.abs(changed - before).max(axis=(2, 3)) > 1e-6
        expected = [
            [
                anchor - 8 <= place < anchor and (row == 0 or (place < 20) == (anchor < 20))
                for anchor in anchors
            ]
            for row, anchors in enumerate(BLOCKS)
        ]
        assert moved.tolist() == expected, place


def test_a_block_at_the_start_of_a_sequence_has_its_own_positions(setting: Setting) -> None:
    """The second segment alone in a row gives the same as behind another one."""
    context = setting.context
    moved = DraftContext(
        inputs=jnp.roll(context.inputs[1:], -20, axis=1),
        segments=jnp.where(jnp.arange(PADDED)[None, :] < 20, 1, 0),
        anchors=context.anchors[1:, 1:] - 20,
        tokens=context.tokens[1:, 1:],
    )
    result = run(*(setting.weights.draft, setting.weights.embed, setting.weights.head, moved, TINY, FLOAT32))
    assert_close(result.logits[0], logits(setting)[1, 1:], "equivalence_float32")


def test_only_the_anchor_token_enters_the_stages(setting: Setting) -> None:
    """A later token moves its own row's logits, by the Markov head, and no other row's."""
    before = logits(setting)
    tokens = setting.context.tokens.at[:, :, 1].add(-1)
    moved = np.abs(logits(setting, tokens=tokens) - before).max(axis=(0, 1, 3)) > 1e-6
    assert moved.tolist() == [False, True, False]


def test_every_stage_weight_has_a_gradient(setting: Setting) -> None:
    """All but the router's biases, which choose and do not weigh."""
    weights = setting.weights

    def total(draft):
        result = draft_forward(draft, weights.embed, weights.head, setting.context, TINY, FLOAT32)
        return jnp.sum(jnp.square(result.logits)) + jnp.sum(jnp.square(result.confidence))

    for path, value in jax.tree_util.tree_flatten_with_path(jax.jit(jax.grad(total))(weights.draft))[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        assert np.isfinite(np.asarray(value)).all(), name
        assert np.any(np.asarray(value)) != name.endswith(("ffn.bias", "ffn.bias_vl")), name


def test_the_trunk_gives_what_a_decode_step_leaves_for_the_draft(setting: Setting) -> None:
    """Means of the streams that enter the target layers, from whole sequences and through the cache."""
    tokens = jax.random.randint(jax.random.key(9), (1, PADDED), 3, TINY.vocab_size)
    batch = Batch(tokens, jnp.ones((1, PADDED), jnp.int32), jnp.ones((1, PADDED), jnp.float32))
    weights = setting.weights.replace(draft=None)
    mode = TrainingMode(FLOAT32, is_sparse=True)
    found = jax.jit(forward, static_argnums=(2, 3))(weights, batch, TINY, mode).draft_inputs
    names = [f"layers.{layer}.draft_input" for layer in TINY.draft.target_layer_ids]
    runner = ChunkRunner(
        weights, TINY, FLOAT32, slots=1, capacity=PADDED, chunk=PADDED, taps=frozenset(names)
    )
    runner.feed([np.asarray(tokens[0])])
    assert len(found) == len(names)
    for inputs, name in zip(found, names, strict=True):
        assert_close(inputs[0], runner.tapped[0][name], "equivalence_float32")
