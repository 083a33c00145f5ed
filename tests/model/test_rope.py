"""Rotary position embedding against complex numbers, and the frequencies of each kind of layer."""

from __future__ import annotations

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.rope import Rotation, rope_frequencies, rotate, rotate_heads, rotation
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.tolerances import assert_close

POSITIONS = (0, 127, 5000)

each_kind = pytest.mark.parametrize("is_compressed", [False, True], ids=["window_only", "compressed"])


@pytest.fixture(scope="module")
def released(released_folder: Path) -> ModelConfig:
    return read_config(released_folder)


def exact_frequencies(config: ModelConfig, is_compressed: bool) -> np.ndarray:
    """The frequencies in float64, straight from the formulas."""
    rope_dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if is_compressed else config.rope_theta
    frequencies = np.array([theta ** (-2 * i / rope_dim) for i in range(rope_dim // 2)])
    if not is_compressed:
        return frequencies
    yarn = config.rope_scaling

    def c(beta: float) -> float:
        rotations = yarn.original_max_position_embeddings / (2 * math.pi * beta)
        return rope_dim * math.log(rotations) / (2 * math.log(theta))

    low = max(math.floor(c(yarn.beta_fast)), 0)
    high = min(math.ceil(c(yarn.beta_slow)), rope_dim - 1)
    ramp = np.clip((np.arange(rope_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


@each_kind
@pytest.mark.parametrize("size", ["tiny", "released"])
def test_frequencies(released, size: str, is_compressed: bool) -> None:
    config = TINY if size == "tiny" else released
    theta = config.compress_rope_theta if is_compressed else config.rope_theta
    scaling = config.rope_scaling if is_compressed else None
    found = rope_frequencies(config.qk_rope_head_dim, theta, scaling)
    assert found.dtype == np.float32
    assert_close(found / exact_frequencies(config, is_compressed), np.ones_like(found), "formula_float32")


def test_released_yarn_ramp_runs_from_pair_15_to_25(released) -> None:
    yarn, theta, rope_dim = released.rope_scaling, released.compress_rope_theta, released.qk_rope_head_dim

    def c(beta: float) -> float:
        rotations = yarn.original_max_position_embeddings / (2 * math.pi * beta)
        return rope_dim * math.log(rotations) / (2 * math.log(theta))

    assert round(c(yarn.beta_fast), 3) == 15.453
    assert round(c(yarn.beta_slow), 3) == 24.708
    ratio = rope_frequencies(rope_dim, theta, yarn) / rope_frequencies(rope_dim, theta, None)
    assert np.flatnonzero(ratio == 1.0).tolist() == list(range(16))
    assert_close(ratio[15:26], 1 - np.arange(11) / 10 * (15 / 16), "formula_float32")
    assert_close(ratio[25:], np.full(7, 1 / 16), "formula_float32")


@pytest.mark.parametrize("position", POSITIONS)
@each_kind
def test_bc07_rotation_of_each_kind_of_layer(released, position: int, is_compressed: bool) -> None:
    table = rotation(released, jnp.array([position], jnp.int32), is_compressed)
    angles = position * exact_frequencies(released, is_compressed)
    assert_close(table.cos[0], np.cos(angles), "rotation_at_5000")
    assert_close(table.sin[0], np.sin(angles), "rotation_at_5000")


@pytest.mark.parametrize("position", [127, 5000])
def test_bc07_kinds_differ_where_it_is_tested(released, position: int) -> None:
    at = jnp.array([position], jnp.int32)
    plain, scaled = rotation(released, at, False), rotation(released, at, True)
    assert np.abs(np.asarray(plain.cos - scaled.cos)).max() > 1e-2


def random_case(seed: int = 0) -> tuple[np.ndarray, np.ndarray, Rotation]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(5, TINY.head_dim)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 1000], np.int32)
    return x, positions, rotation(TINY, jnp.asarray(positions), True)


def test_rotation_multiplies_adjacent_pairs_as_complex_numbers() -> None:
    x, _, table = random_case()
    rope_dim = TINY.qk_rope_head_dim
    pairs = x[:, -rope_dim::2].astype(np.float64) + 1j * x[:, -rope_dim + 1 :: 2]
    turned = pairs * (np.asarray(table.cos, np.float64) + 1j * np.asarray(table.sin, np.float64))
    expected = x.astype(np.float64)
    expected[:, -rope_dim::2], expected[:, -rope_dim + 1 :: 2] = turned.real, turned.imag
    assert_close(rotate(jnp.asarray(x), table), expected, "equivalence_float32")


def test_inverse_rotation_restores() -> None:
    x, _, table = random_case()
    back = rotate(rotate(jnp.asarray(x), table), table, is_inverse=True)
    assert_close(back, x, "equivalence_float32")


def test_position_zero_and_leading_channels_stay() -> None:
    x, _, table = random_case()
    found = np.asarray(rotate(jnp.asarray(x), table))
    np.testing.assert_array_equal(found[0], x[0])
    np.testing.assert_array_equal(found[:, : -TINY.qk_rope_head_dim], x[:, : -TINY.qk_rope_head_dim])


def test_scores_depend_on_the_distance_only() -> None:
    x, _, _ = random_case()
    scores = []
    for start in (0, 40):
        table = rotation(TINY, jnp.array([start, start + 9], jnp.int32), True)
        turned = np.asarray(rotate(jnp.asarray(x[:2]), table))
        scores.append(turned[0] @ turned[1])
    assert_close(scores[1], scores[0], "equivalence_float32")


def test_heads_share_a_rotation() -> None:
    x, _, table = random_case()
    heads = jnp.asarray(np.stack([x, 2 * x], axis=1))
    found = rotate_heads(heads, table)
    np.testing.assert_array_equal(found[:, 0], rotate(jnp.asarray(x), table))
    np.testing.assert_array_equal(found[:, 1], rotate(jnp.asarray(2 * x), table))


def test_bfloat16_is_rounded_once() -> None:
    x, _, table = random_case()
    small = jnp.asarray(x).astype(jnp.bfloat16)
    expected = rotate(small.astype(jnp.float32), table).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotate(small, table), expected)
