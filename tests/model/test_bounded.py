"""Bounded prefill: the decoder half on the last rows of a prompt, against the golden files and itself.

Separate because it is the one mode whose result differs from the full forward by design.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.reader import load_weights
from deepinfer_jax.model.backbone import backbone, encode, head_logits
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.golden import fresh_cache, live_state, make_rows, read_golden
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.tolerances import assert_close

FOLDER = Path(__file__).parents[1] / "golden"
PROMPT, LENGTH, KEPT = 32, 40, TINY.sliding_window
MIDDLE = TINY.kv_source_layer_ids[-1]
ENCODER_LAYERS = {"from_last_kv_source": MIDDLE, "after_last_kv_source": MIDDLE + 1}

# The engine replays from the last KV source on; the other variant compiles two programs of its own.
each_variant = pytest.mark.parametrize(
    "variant",
    ["from_last_kv_source", pytest.param("after_last_kv_source", marks=pytest.mark.slow)],
)


@pytest.fixture(scope="module")
def weights():
    return load_weights(FOLDER / "tiny_bf16", TINY, jnp.float32)


@pytest.fixture(scope="module")
def golden():
    return read_golden(FOLDER, "bounded_replay_kvquant_off")


def cache_of(decoder_start: int):
    cache = fresh_cache(TINY, 2, LENGTH, FLOAT32, page_tokens=8)
    return cache.replace(decoder_starts=jnp.full(2, decoder_start, jnp.int32))


@partial(jax.jit, static_argnames="encoder_layers")
def encode_chunk(weights, rows, cache, encoder_layers):
    return encode(weights, TINY, rows, cache, FLOAT32, encoder_layers)


@partial(jax.jit, static_argnames="encoder_layers")
def run_chunk(weights, rows, cache, encoder_layers):
    hidden, _, cache = backbone(weights, TINY, rows, cache, FLOAT32, encoder_layers=encoder_layers)
    return head_logits(hidden, weights, FLOAT32), cache


def rows_of(tokens: np.ndarray, start: int, stop: int):
    """Rows start..stop of both sequences, padded to one shape."""
    part = np.zeros((2, KEPT), np.int32)
    part[:, : stop - start] = tokens[:, start:stop]
    return make_rows(part, start=start, lengths=stop - start)


def run(weights, tokens: np.ndarray, start: int, stop: int, cache, encoder_layers: int):
    """Run rows start..stop through all layers: logits [2, rows, V], cache."""
    logits, cache = run_chunk(weights, rows_of(tokens, start, stop), cache, encoder_layers)
    return np.asarray(logits).reshape(2, KEPT, -1)[:, : stop - start], cache


def replay(weights, tokens: np.ndarray, encoder_layers: int, chunk: int = KEPT):
    """Encode all but the last rows of the prompt, run those, then decode one by one."""
    cache, parts = cache_of(PROMPT - KEPT), []
    for start in range(0, PROMPT - KEPT, chunk):
        rows = rows_of(tokens, start, min(start + chunk, PROMPT - KEPT))
        cache = encode_chunk(weights, rows, cache, encoder_layers)
    after_prompt = None
    for start in [PROMPT - KEPT, *range(PROMPT, LENGTH)]:
        stop = PROMPT if start < PROMPT else start + 1
        logits, cache = run(weights, tokens, start, stop, cache, encoder_layers)
        parts.append(logits)
        after_prompt = after_prompt or cache
    return np.concatenate(parts, axis=1), after_prompt


@each_variant
def test_bounded_replay(weights, golden, variant: str) -> None:
    logits, _ = replay(weights, golden["input_ids"], ENCODER_LAYERS[variant])
    assert_close(logits, golden[f"logits_{variant}"], "golden_float32")


def test_the_variants_differ_from_each_other_and_from_the_full_forward(golden) -> None:
    one, other = (golden[f"logits_{variant}"] for variant in ENCODER_LAYERS)
    assert np.abs(one - other).max() > 1e-3
    full = read_golden(FOLDER, "full_kvquant_off")
    np.testing.assert_array_equal(full["input_ids"], golden["input_ids"])
    assert np.abs(one - full["logits"][:, PROMPT - KEPT :]).max() > 1e-3


def test_chunks_of_the_encoder_do_not_matter(weights, golden) -> None:
    tokens = golden["input_ids"]
    expected, _ = replay(weights, tokens, MIDDLE)
    found, _ = replay(weights, tokens, MIDDLE, chunk=5)
    np.testing.assert_array_equal(found, expected)


def test_what_is_global_is_exact(weights, golden) -> None:
    """Compressed entries, index keys, pending halves, Engram ids, and the encoder's windows."""
    tokens = golden["input_ids"]
    _, bounded = replay(weights, tokens, MIDDLE)
    exact = cache_of(0)
    for start in range(0, PROMPT, KEPT):
        _, exact = run(weights, tokens, start, start + KEPT, exact, MIDDLE)
    found, expected = (live_state(cache, TINY, FLOAT32, 0, PROMPT) for cache in (bounded, exact))
    np.testing.assert_array_equal(found["window"][:MIDDLE], expected["window"][:MIDDLE])
    assert (found.pop("window")[MIDDLE:] != expected.pop("window")[MIDDLE:]).any()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_prompt_no_longer_than_what_is_kept_is_exact(weights, golden) -> None:
    logits, _ = run(weights, golden["input_ids"], 0, KEPT, cache_of(0), MIDDLE)
    full = read_golden(FOLDER, "full_kvquant_off")["logits"][:, :KEPT]
    assert_close(logits, full, "golden_float32")
