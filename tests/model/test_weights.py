"""The declarations of all weights: sizes, names, and random draws that leave no path idle."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import Storage, spec_leaves
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.draft_weights import all_weight_specs
from deepinfer_jax.model.weights import count_parameters, take_layer, weight_specs
from deepinfer_jax.testing.presets import TINY, random_weights


@pytest.fixture(scope="module")
def released(released_folder: Path) -> ModelConfig:
    return read_config(released_folder)


def leaves(tree) -> dict[str, np.ndarray]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in found}


def test_released_parameter_count(released) -> None:
    """By hand from the table of spec/model.md section 16, backbone without draft stages."""
    d, head_dim, ffn, experts = 5120, 512, 2304, 384
    attention = 1280 * d + 1280 + 32768 * 1280 + head_dim * d + head_dim + 8192 * 4096 + d * 8192 + 64
    hyper = 2 * (24 * 4 * d + 24 + 3)
    moe = experts * d + 2 * experts + (experts + 1) * 3 * ffn * d
    layers = 40 * (attention + hyper + moe + 2 * d)
    compressors = 7 * head_dim * d + 4 * head_dim
    indexers = 8 * (4096 * 1280 + 32 * d) + 4 * (128 * head_dim + 128)
    tables = (384006168 + 384016682) * 256
    engram = tables + 2 * (25600 * 6144 + 2 * 4 * d)
    total = layers + compressors + indexers + engram + 2 * 129280 * d + d
    assert count_parameters(weight_specs(released)) == total
    # The published 552 billion leave out the Engram tables.
    assert round((total - tables) / 1e9) == 552


def test_every_tensor_has_a_name_of_its_own(released) -> None:
    names = [name for _, spec in spec_leaves(weight_specs(released)) for _, name in spec.tensors()]
    assert len(set(names)) == len(names)


def test_random_weights_have_the_declared_shapes() -> None:
    specs = dict(spec_leaves(all_weight_specs(TINY)))
    drawn = leaves(random_weights(TINY, jax.random.key(0)))
    assert drawn.pop("token_map").shape == (TINY.vocab_size,)
    assert {name: array.shape for name, array in drawn.items()} == {
        name: spec.stacked_shape for name, spec in specs.items()
    }


def test_random_weights_have_no_idle_leaf() -> None:
    """Every bias, scale and norm differs from element to element, from 0 and from 1."""
    for name, array in leaves(random_weights(TINY, jax.random.key(0))).items():
        assert array.std() > 0, name
        assert not np.isin(array, (0.0, 1.0)).all(), name


def test_random_weights_in_bfloat16_keep_float32_where_declared() -> None:
    specs = dict(spec_leaves(all_weight_specs(TINY)))
    drawn = leaves(random_weights(TINY, jax.random.key(0), jnp.bfloat16))
    for name, spec in specs.items():
        assert drawn[name].dtype == (np.float32 if spec.storage is Storage.F32 else jnp.bfloat16), name


def test_random_token_map_uses_every_compressed_id() -> None:
    token_map = np.asarray(random_weights(TINY, jax.random.key(0)).token_map)
    np.testing.assert_array_equal(np.unique(token_map), np.arange(TINY.engram_compressed_vocab_size))


def test_take_layer_takes_all_but_the_routed_experts(tiny_weights) -> None:
    """The routed experts stay stacked: the operation that reads them takes the layer's place itself."""
    stack = tiny_weights.layers["reuse_1"]
    taken, whole = leaves(take_layer(stack, 1)), leaves(stack)
    assert taken.keys() == whole.keys()
    for name, array in taken.items():
        expected = whole[name] if name.startswith("ffn.experts.") else whole[name][1]
        np.testing.assert_array_equal(array, expected, err_msg=name)
