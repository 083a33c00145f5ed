"""Greedy drafts, their logits and confidences are those of the golden files, at every position.

Separate from `../test_speculate.py` because an independent implementation says here what is right.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import Array
from deepinfer_jax.checkpoint import load_weights
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.backbone import backbone
from deepinfer_jax.model.cache import Cache, empty_cache, with_own_pages
from deepinfer_jax.model.numerics import FLOAT32, Numerics
from deepinfer_jax.model.rows import Rows
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.sampling.randomness import SAMPLE_TOKEN
from deepinfer_jax.sampling.state import empty_sampler
from deepinfer_jax.spec_decode.draft import Anchors, draft_states, draft_tokens
from deepinfer_jax.spec_decode.heads import base_logits, markov_bias
from deepinfer_jax.testing.golden import make_rows, read_golden
from deepinfer_jax.testing.tolerances import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = read_config(GOLDEN / "tiny_bf16")
PREFILL, LENGTH, BATCH = 13, 40, 2
SIZE = CONFIG.draft.block_size
NUMERICS = {"off": FLOAT32, "on": replace(FLOAT32, name="float32, cache quantised", cache_format="fp4")}
TOLERANCE = {"off": "golden_float32", "on": "golden_cache_quantized"}


class Step(NamedTuple):
    """Drafts [B, K], their logits [B, K, V] with the Markov bias, and confidences [B, K]."""

    token_ids: np.ndarray
    logits: np.ndarray
    confidences: np.ndarray


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_weights(GOLDEN / "tiny_bf16", CONFIG, jnp.float32)


def empty(numerics: Numerics, slots: int = BATCH) -> Cache:
    sizes = CacheConfig(slots, 1, slots, window_slack=3 * SIZE, num_draft_layers=CONFIG.draft.num_stages)
    return with_own_pages(empty_cache(CONFIG, sizes, numerics))


@partial(jax.jit, static_argnames="numerics")
def draft(
    weights: Weights, anchor_ids: Array, length: Array, cache: Cache, numerics: Numerics
) -> tuple[Array, Array, Array]:
    slots = anchor_ids.shape[0]
    anchors = Anchors(anchor_ids, jnp.full(slots, length, jnp.int32), jnp.ones(slots, bool))
    states = draft_states(weights, CONFIG, anchors, cache, numerics)
    sampler, is_forbidden = empty_sampler(slots, CONFIG.vocab_size), jnp.zeros(CONFIG.vocab_size, bool)
    drafts = draft_tokens(
        *(states, weights, CONFIG, anchors, sampler, is_forbidden, numerics), purpose=SAMPLE_TOKEN
    )
    is_used = jnp.ones(slots * SIZE, bool)
    base = base_logits(states.reshape(slots * SIZE, -1), is_used, weights, CONFIG, numerics)
    previous = jnp.concatenate([anchor_ids[:, None], drafts.token_ids[:, :-1]], axis=1)
    bias = markov_bias(previous.reshape(-1), weights.draft, numerics)
    return drafts.token_ids, (base + bias).reshape(slots, SIZE, -1), drafts.confidences


@partial(jax.jit, static_argnames="numerics")
def run(weights: Weights, rows: Rows, cache: Cache, numerics: Numerics) -> Cache:
    return backbone(weights, CONFIG, rows, cache, numerics)[2]


def drafted(weights: Weights, mode: str) -> list[Step]:
    """Decode the golden tokens and draft after each."""
    numerics, golden = NUMERICS[mode], read_golden(GOLDEN, f"decode_kvquant_{mode}")
    tokens = read_golden(GOLDEN, "full_kvquant_off")["input_ids"]
    cache, steps = run(weights, make_rows(tokens[:, :PREFILL]), empty(numerics), numerics), []
    for position in range(PREFILL, LENGTH):
        rows = make_rows(tokens[:, position : position + 1], start=position)
        cache = run(weights, rows, cache, numerics)
        anchor_ids = jnp.asarray(golden["dspark_anchor_ids"][:, position - PREFILL])
        drafts = draft(weights, anchor_ids, jnp.int32(position + 1), cache, numerics)
        steps.append(Step(*map(np.asarray, drafts)))
    return steps


@pytest.mark.parametrize("mode", ["off", "on"], ids=["kvquant_off", "kvquant_on"])
def test_drafts_are_the_golden_ones(weights: Weights, mode: str) -> None:
    golden = read_golden(GOLDEN, f"decode_kvquant_{mode}")
    steps = drafted(weights, mode)
    token_ids = np.stack([step.token_ids for step in steps], axis=1)
    np.testing.assert_array_equal(token_ids, golden["dspark_output_ids"][:, :, 1:])
    assert_close(np.stack([step.logits for step in steps], axis=1), golden["dspark_logits"], TOLERANCE[mode])
    confidences = np.stack([step.confidences for step in steps], axis=1)
    assert_close(confidences, golden["dspark_confidence"], TOLERANCE[mode])


def test_a_block_is_bitwise_the_same_in_any_company(weights: Weights) -> None:
    """Alone, and in the second tile of many slots."""
    tokens = np.random.default_rng(1).integers(3, 120, (FLOAT32.slot_tile + 2, 20))
    many = run(weights, make_rows(tokens), empty(FLOAT32, FLOAT32.slot_tile + 2), FLOAT32)
    alone = run(weights, make_rows(tokens[-1:]), empty(FLOAT32, 1), FLOAT32)
    anchors, length = jnp.asarray(tokens[:, 0], jnp.int32), jnp.int32(20)
    together = draft(weights, anchors, length, many, FLOAT32)
    for one, other in zip(draft(weights, anchors[-1:], length, alone, FLOAT32), together, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[0], np.asarray(other)[-1])
