"""Engram: exact hashing against Python's integers, published constants, the gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.config import ConfigError, ModelConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.engram import _multiply_64, _remainder, engram, engram_constants, hash_rows
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import EngramWeights
from deepinfer_jax.testing.golden import read_golden
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.references import engram_table_rows
from deepinfer_jax.testing.tolerances import assert_close

MULTIPLIERS = [
    [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    [67716810739261, 51510806800915, 30921347202721, 82619226485591],
]
PRIMES = [
    [
        *(16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183),
        *(16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321),
        *(16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463),
    ],
    [
        *(16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627),
        *(16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769),
        *(16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889),
    ],
]


@pytest.fixture(scope="module")
def released(released_folder: Path) -> ModelConfig:
    return read_config(released_folder)


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> dict[str, np.ndarray]:
    return read_golden(golden_folder, "engram_constants")


def hash_sequence(token_ids, is_image, token_map, config: ModelConfig) -> np.ndarray:
    """Hash a whole sequence with the function under test: [T, Engram layers, C]."""
    compressed = np.where(is_image, NOTHING, np.asarray(token_map)[token_ids])
    size = config.engram_max_ngram_size
    padded = np.concatenate([np.full(size - 1, NOTHING), compressed])
    history = np.stack([padded[size - 1 - k : len(padded) - k] for k in range(size)], axis=1)
    pad_id = jnp.int32(int(np.asarray(token_map)[config.engram_pad_token_id]))
    hashed = jax.jit(hash_rows, static_argnums=1)(jnp.asarray(history, jnp.int32), config, pad_id)
    return np.asarray(hashed)


def test_released_multipliers(released) -> None:
    assert engram_constants(released).multipliers.tolist() == MULTIPLIERS


def test_released_primes(released) -> None:
    assert engram_constants(released).primes.tolist() == PRIMES


def test_released_table_sizes_are_the_sums_of_the_primes(released) -> None:
    assert released.engram_num_embeddings == tuple(sum(primes) for primes in PRIMES)
    assert released.engram_num_embeddings == (384006168, 384016682)


@pytest.mark.parametrize("name", ["multipliers", "offsets"])
def test_golden_constants(golden, name: str) -> None:
    np.testing.assert_array_equal(getattr(engram_constants(TINY), name), golden[name])


def test_golden_primes(golden) -> None:
    np.testing.assert_array_equal(
        engram_constants(TINY).primes, golden["primes"].reshape(len(TINY.engram_layer_ids), -1)
    )


@pytest.mark.parametrize("row", [0, 1])
def test_golden_hash_ids(golden, row: int) -> None:
    tokens = golden["example_ids"][row]
    found = hash_sequence(tokens, np.zeros(len(tokens), bool), golden["token_map"], TINY)
    np.testing.assert_array_equal(found, golden["example_hash_ids"][row])


def test_golden_pad_id(golden) -> None:
    assert golden["token_map"][TINY.engram_pad_token_id] == golden["pad_id"]


def test_table_sizes_that_are_no_sums_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engram_num_embeddings.*got \(304, 463\), expected \(304, 462\)"):
        engram_constants(replace(TINY, engram_num_embeddings=(304, 463)))


@pytest.mark.parametrize("size", ["tiny", "released"])
def test_hash_equals_python_integers(released, size: str) -> None:
    config = TINY if size == "tiny" else released
    random = np.random.default_rng(12)
    token_map = random.integers(0, config.engram_compressed_vocab_size, config.vocab_size)
    tokens = random.integers(0, config.vocab_size, 200)
    is_image = random.random(200) < 0.1
    expected = engram_table_rows(tokens, is_image, token_map, config)
    np.testing.assert_array_equal(hash_sequence(tokens, is_image, token_map, config), expected)


@given(st.lists(st.tuples(st.integers(0, 127), st.booleans()), min_size=24, max_size=24))
def test_hash_equals_python_integers_for_any_image_pattern(sequence: list[tuple[int, bool]]) -> None:
    tokens = np.array([token for token, _ in sequence])
    is_image = np.array([flag for _, flag in sequence])
    token_map = np.arange(128) % 100
    expected = engram_table_rows(tokens, is_image, token_map, TINY)
    np.testing.assert_array_equal(hash_sequence(tokens, is_image, token_map, TINY), expected)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1))
def test_64_bit_product_is_exact_modulo_2_to_64(token: int, multiplier: int) -> None:
    high, low = _multiply_64(jnp.array([token], jnp.uint32), np.array([multiplier], np.int64))
    assert (int(high[0]) << 32 | int(low[0])) == token * multiplier % 2**64


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(2, 2**24 - 1), min_size=3, max_size=3))
def test_remainder_is_exact(value: int, moduli: list[int]) -> None:
    high, low = (np.full(3, word, np.uint32) for word in (value >> 32, value & 0xFFFFFFFF))
    found = _remainder(jnp.asarray(high), jnp.asarray(low), np.array(moduli, np.int64))
    assert np.asarray(found).tolist() == [value % modulus for modulus in moduli]


def test_start_of_sequence_is_padded() -> None:
    """The first token's n-grams are those of the same token after three pads."""
    token_map, pad = np.arange(128) % 100, TINY.engram_pad_token_id
    first = hash_sequence(np.array([50]), np.zeros(1, bool), token_map, TINY)[0]
    after_pads = hash_sequence(np.array([pad, pad, pad, 50]), np.zeros(4, bool), token_map, TINY)[3]
    np.testing.assert_array_equal(first, after_pads)


@pytest.fixture(scope="module")
def gate_case():
    random = np.random.default_rng(13)
    streams, hidden = TINY.hc_mult, TINY.hidden_size

    def draw(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    weights = EngramWeights(
        embed=draw(TINY.engram_num_embeddings[0], TINY.engram_head_dim),
        wkv=draw((streams + 1) * hidden, TINY.engram_row_size) / 10,
        q_weight=1 + draw(streams, hidden) / 5,
        k_weight=1 + draw(streams, hidden) / 5,
    )
    columns = (TINY.engram_max_ngram_size - 1) * TINY.engram_n_heads
    table_rows = random.integers(0, TINY.engram_num_embeddings[0], (5, columns)).astype(np.int32)
    return draw(5, streams, hidden), table_rows, weights, np.array([False, False, True, False, False])


def run_gate(case) -> np.ndarray:
    streams, table_rows, weights, is_image = case
    weights = jax.tree.map(jnp.asarray, weights)
    arrays = jnp.asarray(streams), jnp.asarray(table_rows), weights, jnp.asarray(is_image)
    return np.asarray(engram(*arrays, TINY, FLOAT32))


def test_gated_value_is_added_to_every_stream(gate_case) -> None:
    streams, table_rows, weights, is_image = gate_case
    expected = streams.astype(np.float64)
    for row in np.flatnonzero(~is_image):
        kv = weights.wkv.astype(np.float64) @ weights.embed[table_rows[row]].reshape(-1)
        keys, value = kv[: -TINY.hidden_size].reshape(TINY.hc_mult, -1), kv[-TINY.hidden_size :]
        for stream in range(TINY.hc_mult):
            h, key = streams[row, stream].astype(np.float64), keys[stream]
            dot = (h * weights.q_weight[stream] * weights.k_weight[stream] * key).sum()
            dot /= np.sqrt((h**2).mean() * (key**2).mean() * TINY.hidden_size)
            gate = 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(max(abs(dot), 1e-6))))
            expected[row, stream] += gate * value
    assert_close(run_gate(gate_case), expected, "equivalence_float32")


def test_image_tokens_get_nothing(gate_case) -> None:
    np.testing.assert_array_equal(run_gate(gate_case)[2], gate_case[0][2])


def test_streams_of_zero_stay_finite(gate_case) -> None:
    streams, table_rows, weights, is_image = gate_case
    assert np.isfinite(run_gate((np.zeros_like(streams), table_rows, weights, is_image))).all()
