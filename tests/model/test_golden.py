"""The golden files of the text backbone, array by array.

The files come from an independent implementation; what each holds and the tolerances are in the
README beside them in the source project. To regenerate: they are data, there is no generator here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import QuantArray, spec_leaves
from deepinfer_jax.checkpoint.reader import load_weights
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.backbone import NO_TAPS, Taps
from deepinfer_jax.model.draft_weights import all_weight_specs
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.testing.golden import (
    ChunkRunner,
    read_golden,
)
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.tolerances import TOLERANCES, assert_close

FOLDER = Path(__file__).parents[1] / "golden"

CACHE_QUANTIZED = replace(FLOAT32, name="float32, cache quantised", cache_format="fp4")
ACTIVATIONS_QUANTIZED = replace(
    CACHE_QUANTIZED, name="float32, activations and cache quantised", quantizes_activations=True
)
WITHOUT_TILES = replace(ACTIVATIONS_QUANTIZED, batch_invariant=False)
NUMERICS = {"off": FLOAT32, "on": CACHE_QUANTIZED}
TOLERANCE = {"off": "golden_float32", "on": "golden_cache_quantized"}

LENGTH = 40
SIZES = {"slots": 2, "capacity": LENGTH, "page_tokens": 8}
"""Five pages a sequence, so that every golden sequence crosses pages."""

NOT_TAPS = ("input_ids", "logits", "main_hidden")


def array_names(file: str) -> list[str]:
    with np.load(FOLDER / f"{file}.npz") as archive:
        return list(archive.files)


FULL_NAMES = [name for name in array_names("full_kvquant_off") if name not in NOT_TAPS]
DRAFT_INPUTS = [f"layers.{layer}.draft_input" for layer in TINY.draft.target_layer_ids]

# Layer 8 selects with its own queries among the keys of layer 6.
OTHER_NAMES = {"layers.8.indexer.k": "layers.6.indexer.k"}

ALL_TAPS = frozenset({OTHER_NAMES.get(name, name) for name in FULL_NAMES} | set(DRAFT_INPUTS))


def make_runner(weights, numerics: Numerics, config=TINY, taps: Taps = NO_TAPS, chunk: int = LENGTH):
    """Both golden sequences in slots of their own; one shape for steps of any length."""
    return ChunkRunner(weights, config, numerics, **SIZES, chunk=chunk, taps=taps)


def one_shot(
    weights, numerics: Numerics, token_ids: np.ndarray, is_image=None, config=TINY, taps: Taps = NO_TAPS
):
    """Run both golden sequences in one step: logits [2, T, V] and taps [2, T, ...]."""
    runner = make_runner(weights, numerics, config, taps)
    logits = np.stack(runner.feed(list(token_ids), None if is_image is None else list(is_image)))
    return logits, {name: np.stack([tapped[name] for tapped in runner.tapped]) for name in taps}


def as_stored(name: str, value: np.ndarray) -> np.ndarray:
    """Bring a tap into the shape of its golden array: whole groups only, candidates by group."""
    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    if name.endswith((".compressed_kv", ".compressor.latent", ".indexer.k")):
        ratio = TINY.compress_ratios[layer]
        return value[:, ratio - 1 :: ratio]
    if name.endswith(".candidates"):
        return np.repeat(value, TINY.candidate_block_size, axis=-1)
    return value


def assert_as_golden(name: str, value: np.ndarray, golden: dict[str, np.ndarray], tolerance: str) -> None:
    expected, value = golden[name], as_stored(name, value)
    if name.endswith((".topk_ids", ".gate.ids")):
        np.testing.assert_array_equal(np.sort(value, axis=-1), np.sort(expected, axis=-1))
    elif name.endswith(".candidates"):
        # The last of the candidate blocks may reach past the newest visible group.
        groups = np.arange(value.shape[-1])
        is_visible = groups[None, :] <= np.arange(LENGTH)[:, None]
        np.testing.assert_array_equal(value & is_visible, expected & is_visible)
    elif expected.dtype.kind in "ib":
        np.testing.assert_array_equal(value, expected)
    else:
        assert_close(value, expected, tolerance)


def by_expert(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Order routing weights by expert id: the order of choice has no meaning."""
    return np.take_along_axis(weights, np.argsort(ids, axis=-1), axis=-1)


@pytest.fixture(scope="module")
def bf16_weights():
    return load_weights(FOLDER / "tiny_bf16", TINY, jnp.float32)


@pytest.fixture(scope="module")
def quantized_config():
    return read_config(FOLDER / "tiny_fp8fp4")


@pytest.fixture(scope="module")
def quantized_weights(quantized_config):
    return load_weights(FOLDER / "tiny_fp8fp4", quantized_config, jnp.float32)


@pytest.fixture(scope="module")
def full(bf16_weights):
    """Golden arrays, logits and taps of each mode of the cache."""
    results = {}
    for mode, numerics in NUMERICS.items():
        golden = read_golden(FOLDER, f"full_kvquant_{mode}")
        results[mode] = golden, *one_shot(bf16_weights, numerics, golden["input_ids"], taps=ALL_TAPS)
    return results


@pytest.fixture(scope="module")
def masked_span(bf16_weights):
    golden = read_golden(FOLDER, "masked_span_kvquant_off")
    return golden, *one_shot(bf16_weights, FLOAT32, golden["input_ids"], golden["image_mask"], taps=ALL_TAPS)


@pytest.fixture(scope="module")
def decoded(bf16_weights):
    """Golden arrays, logits and row 0's states after 13 and 40 tokens, by mode: prefill, then decode."""
    results = {}
    for mode, numerics in NUMERICS.items():
        golden = read_golden(FOLDER, f"decode_kvquant_{mode}")
        tokens, prefill = golden["input_ids"], int(golden["prefill_len"])
        runner = make_runner(bf16_weights, numerics, taps=ALL_TAPS)
        parts, states = [runner.feed(list(tokens[:, :prefill]))], {}
        states[prefill] = runner.live_state(0)
        for position in range(prefill, LENGTH):
            parts.append(runner.feed(list(tokens[:, position : position + 1])))
        states[LENGTH] = runner.live_state(0)
        logits = np.stack([np.concatenate([part[slot] for part in parts]) for slot in range(2)])
        results[mode] = golden, logits, states
    return results


each_mode = pytest.mark.parametrize("mode", ["off", "on"], ids=["kvquant_off", "kvquant_on"])


def test_preset_is_the_golden_configuration() -> None:
    assert read_config(FOLDER / "tiny_bf16") == TINY


def test_quantized_golden_differs_in_storage_only(quantized_config) -> None:
    assert replace(quantized_config, is_quantized=False) == TINY


@each_mode
@pytest.mark.parametrize("name", FULL_NAMES)
def test_full(full, mode: str, name: str) -> None:
    golden, _, taps = full[mode]
    value = taps[OTHER_NAMES.get(name, name)][:1]
    if name.endswith(".gate.weights"):
        ids = name.replace("weights", "ids")
        expected = by_expert(golden[ids], golden[name])
        assert_close(by_expert(taps[ids][:1], value), expected, TOLERANCE[mode])
    else:
        assert_as_golden(name, value, golden, TOLERANCE[mode])


@each_mode
def test_full_logits(full, mode: str) -> None:
    golden, logits, _ = full[mode]
    assert_close(logits, golden["logits"], TOLERANCE[mode])


@each_mode
def test_full_main_hidden(full, mode: str) -> None:
    golden, _, taps = full[mode]
    main_hidden = np.concatenate([taps[name][:1] for name in DRAFT_INPUTS], axis=-1)
    assert_close(main_hidden, golden["main_hidden"], TOLERANCE[mode])


def test_masked_span_logits(masked_span) -> None:
    golden, logits, _ = masked_span
    assert_close(logits, golden["logits"], "golden_float32")


@pytest.mark.parametrize(
    "name",
    [name for name in array_names("masked_span_kvquant_off") if name.startswith("layers.")],
)
def test_masked_span(masked_span, name: str) -> None:
    golden, _, taps = masked_span
    if name.endswith(".gate.weights"):
        ids = name.replace("weights", "ids")
        assert_close(by_expert(taps[ids], taps[name]), by_expert(golden[ids], golden[name]), "golden_float32")
    else:
        assert_as_golden(name, taps[name], golden, "golden_float32")


@each_mode
def test_decode_logits(decoded, mode: str) -> None:
    golden, logits, _ = decoded[mode]
    assert_close(logits, golden["logits"], TOLERANCE[mode])


STATE_NAMES = [name for name in array_names("decode_kvquant_off") if name.startswith("state_")]


@each_mode
@pytest.mark.parametrize("name", STATE_NAMES)
def test_decode_state(decoded, mode: str, name: str) -> None:
    golden, _, states = decoded[mode]
    state, _, layer, part = name.split(".", 3)[0], *name.split(".")[1:]
    length, layer = int(state.removeprefix("state_")), int(layer)
    live, ratio = states[length], TINY.compress_ratios[layer]
    expected = golden[name]
    if part == "window_kv":
        # The file holds a ring, entry = position mod window; the live rows are in order of position.
        window = TINY.sliding_window
        found, expected = live["window"][layer], expected[0, np.arange(length - window, length) % window]
    elif part in ("compressed_kv", "index_k"):
        name = "compressed" if part == "compressed_kv" else "index_keys"
        found, expected = live[f"{name}_{ratio}"][0], expected[0]
    else:
        # Entry 0 of an odd length waits for its group's second token; nothing else is live.
        found, expected = live[part][0], expected[0, : length % 2]
        assert len(found) == length % 2
    assert_close(found, expected, TOLERANCE[mode])


@each_mode
@pytest.mark.parametrize(
    "sizes", [(8,), (5, 2), (1,)], ids=["chunks_of_8", "chunks_of_5_and_2", "chunks_of_1"]
)
def test_decode_logits_in_other_chunks(bf16_weights, mode: str, sizes: tuple[int, ...]) -> None:
    golden = read_golden(FOLDER, f"decode_kvquant_{mode}")
    runner = make_runner(bf16_weights, NUMERICS[mode], taps=ALL_TAPS)
    logits = np.stack(runner.feed_all(list(golden["input_ids"]), sizes))
    assert_close(logits, golden["logits"], TOLERANCE[mode])


@each_mode
def test_quantized_model_dequantized_weights(quantized_weights, mode: str) -> None:
    golden = read_golden(FOLDER, "full_tiny_fp8fp4")
    # TINY does not quantise activations, so that the weights' bytes are all that is different.
    logits, _ = one_shot(quantized_weights, NUMERICS[mode], golden["input_ids"])
    expected = golden[f"logits_f32_weights_dequantized_kvquant_{mode}"]
    assert_close(logits, expected, "golden_dequantized_weights")


def test_quantized_weights_are_resident_as_bytes(quantized_weights) -> None:
    """What the tests of the quantised model run on: its matrices are not widened anywhere before a step."""
    specs = dict(spec_leaves(all_weight_specs(TINY)))
    leaves = jax.tree_util.tree_leaves_with_path(quantized_weights, is_leaf=is_quantized)
    found = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert {name for name, leaf in found.items() if is_quantized(leaf)} == {
        name for name, spec in specs.items() if spec.storage.is_quantized
    }


def is_quantized(leaf: object) -> bool:
    return isinstance(leaf, QuantArray)


NOISE, MOST_RUNS = 1e-6, 128
"""Relative noise of the float32 weights, some roundings of a sum, and runs with noise of their own."""


def with_noise(weights, seed: int):
    """Multiply each float32 weight by 1 + NOISE times a normal draw."""
    random = np.random.default_rng(seed)

    def multiply(array):
        if array.dtype != jnp.float32:
            return array
        return (np.asarray(array) * (1 + NOISE * random.standard_normal(array.shape))).astype(np.float32)

    return jax.tree.map(multiply, weights)


@pytest.mark.parametrize(
    "numerics",
    [WITHOUT_TILES, pytest.param(ACTIVATIONS_QUANTIZED, marks=pytest.mark.slow)],
    ids=["rows_as_they_come", "in_tiles"],
)
def test_quantized_model_quantized_activations(quantized_weights, quantized_config, numerics) -> None:
    """Each position's logits are those of the file in a run that rounds all activations as the file's did.

    Which values round otherwise is decided by the order of sums, and so by the processor and the number of
    rows: none of them on some processors, one at position 5 of row 0 and one at 33 on others, each with all
    that reads it. Noise of some roundings in the weights moves them back, but seldom all in one run, so
    positions are compared one by one. Anything but a flip is off in every run (other rounding: 5.3).
    """
    golden = read_golden(FOLDER, "full_tiny_fp8fp4")
    expected = golden["logits_f32_actquant_kvquant_on"]
    limit, best = TOLERANCES["golden_quantized_activations"].limit, np.full(expected.shape[:2], np.inf)
    for seed in range(MOST_RUNS + 1):
        weights = with_noise(quantized_weights, seed) if seed else quantized_weights
        runner = make_runner(weights, numerics, quantized_config, chunk=7)
        error = np.abs(np.stack(runner.feed_all(list(golden["input_ids"]), [7])) - expected).max(axis=-1)
        if not seed:
            # Without any noise; the golden README names these as what an independent JAX run agrees on.
            assert max(error[0, :5].max(), error[1].max()) <= limit
        best = np.minimum(best, error)
        if best.max() <= limit:
            break
    assert_close(best, np.zeros_like(best), "golden_quantized_activations")


@pytest.fixture(scope="module")
def official(quantized_config):
    """Golden arrays, logits and taps of the mode that everything is run in."""
    golden = read_golden(FOLDER, "full_tiny_fp8fp4")
    weights = load_weights(FOLDER / "tiny_fp8fp4", quantized_config, jnp.bfloat16)
    taps = frozenset({"layers.0.out"})
    return golden, *one_shot(weights, OFFICIAL, golden["input_ids"], config=quantized_config, taps=taps)


@pytest.mark.slow
def test_official_logits_are_finite(official) -> None:
    _, logits, _ = official
    assert np.isfinite(logits).all()


@pytest.mark.slow
def test_official_first_layer_smoke(official) -> None:
    golden, _, taps = official
    # At position 26 the README's second implementation, too, chooses other experts than the file.
    others = np.delete(np.arange(LENGTH), 26)
    found = taps["layers.0.out"][0].astype(np.float32)
    expected = golden["bf16_all_quant.layers.0.out"][0]
    assert_close(found[others], expected[others], "golden_bf16_smoke")
