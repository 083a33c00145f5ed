"""The training forward is the model's own, its losses are the plain formulas, its rounding is the file's.

Separate because training has its own attention over whole sequences; everything else must not differ.
Read next: `test_lm.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import QuantArray, Storage, spec_leaves
from deepinfer_jax.checkpoint import load_weights, write_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import parse_config
from deepinfer_jax.kernels import weight_values
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights, weight_specs
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import SMALLEST, random_weights
from deepinfer_jax.testing.tolerances import assert_close
from deepinfer_jax.training.forward import Batch, TrainingMode, forward, segment_positions
from deepinfer_jax.training.losses import BALANCE_LOSS, INDEX_LOSS, Z_LOSS, token_losses, training_loss
from deepinfer_jax.training.optimizer import balance_biases, compute_weights, initial_weights

CONFIG = replace(
    SMALLEST,
    num_hidden_layers=5,
    compress_ratios=(0, 2, 2, 1, 1),
    kv_source_layer_ids=(1, 3),
    index_source_layer_ids=(1, 3, 4),
    candidate_source_layer_id=3,
)
"""A window layer, both kinds of source, one that reuses a selection, one that restricts it."""

LENGTH = 48
SPARSE = TrainingMode(FLOAT32, is_sparse=True)
DENSE = TrainingMode(FLOAT32, is_sparse=False)
TOKENS = np.random.default_rng(3).integers(3, CONFIG.vocab_size, (3, LENGTH)).astype(np.int32)
END_OF_FIRST = 19  # of row 2: the second segment starts at 20, after one token of padding


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(CONFIG, jax.random.key(2))


def make_batch() -> Batch:
    """One segment; one segment and padding; two segments with padding between and after."""
    segments = np.ones((3, LENGTH), np.int32)
    segments[1, 37:] = 0
    segments[2, END_OF_FIRST:20] = 0
    segments[2, 20:44] = 2
    segments[2, 44:] = 0
    loss_weights = (segments > 0).astype(np.float32)
    loss_weights[:, 0] = loss_weights[2, 20] = 0.0
    loss_weights[1, 5:9] = 0.3
    return Batch(jnp.asarray(TOKENS), jnp.asarray(segments), jnp.asarray(loss_weights))


run = jax.jit(forward, static_argnums=(2, 3))


@pytest.fixture(scope="module")
def sparse(weights: Weights):
    return run(weights, make_batch(), CONFIG, SPARSE)


@pytest.fixture(scope="module")
def runner(weights: Weights):
    """Run one segment through the backbone, from a fresh cache: logits [T, V]."""

    def logits(tokens: np.ndarray, config: ModelConfig = CONFIG) -> np.ndarray:
        options = {"slots": 1, "capacity": LENGTH, "chunk": LENGTH}
        return ChunkRunner(weights, config, FLOAT32, **options).feed([tokens])[0]

    return logits


def logits_of(hidden: jax.Array, weights: Weights) -> np.ndarray:
    return np.asarray(hidden) @ np.asarray(weights.head).T


def test_a_single_segment_equals_the_backbone(weights, sparse, runner) -> None:
    assert_close(logits_of(sparse.hidden[0], weights), runner(TOKENS[0]), "equivalence_float32")


def test_padding_after_a_segment_changes_nothing(weights, sparse, runner) -> None:
    expected = runner(TOKENS[1, :37])
    assert_close(logits_of(sparse.hidden[1, :37], weights), expected, "equivalence_float32")


@pytest.mark.parametrize("place", [slice(0, END_OF_FIRST), slice(20, 44)], ids=["first", "second"])
def test_each_of_two_segments_equals_the_backbone(weights, sparse, runner, place: slice) -> None:
    """The second starts where a candidate block does: blocks are counted from the row's start."""
    found = logits_of(sparse.hidden[2, place], weights)
    assert_close(found, runner(TOKENS[2, place]), "equivalence_float32")


@pytest.fixture(scope="module")
def everything_visible() -> ModelConfig:
    """A configuration whose selection takes all there is, so that sparse and dense agree."""
    return replace(CONFIG, index_topk=LENGTH, candidate_topk_blocks=LENGTH)


@pytest.mark.slow
def test_segments_do_not_see_each_other_and_dense_mode_sees_all(
    weights, runner, everything_visible: ModelConfig
) -> None:
    dense = run(weights, make_batch(), CONFIG, DENSE).hidden
    for row, place in ((0, slice(0, LENGTH)), (2, slice(0, END_OF_FIRST)), (2, slice(20, 44))):
        expected = runner(TOKENS[row, place], everything_visible)
        assert_close(logits_of(dense[row, place], weights), expected, "equivalence_float32")


def test_dense_and_sparse_differ_where_selection_bites(weights, sparse) -> None:
    dense = run(weights, make_batch(), CONFIG, DENSE).hidden
    difference = np.abs(np.asarray(dense[0]) - np.asarray(sparse.hidden[0])).max(axis=-1)
    # Ratio 1 shows its fifth entry at position 4, and four are chosen.
    assert difference[:4].max() < 1e-5
    assert difference[16:].min() > 1e-4


def test_positions_count_from_each_segment() -> None:
    segments = jnp.array([[1, 1, 1, 0, 2, 2, 3, 3], [1, 0, 2, 2, 2, 0, 0, 0]])
    assert segment_positions(segments).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 0, 1, 2, 0, 1, 2]]


def plain_losses(logits: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nats and squared log normaliser of each token after the first, in float64."""
    shifted = logits[:-1].astype(np.float64)
    normaliser = np.log(np.exp(shifted - shifted.max(1, keepdims=True)).sum(1)) + shifted.max(1)
    chosen = shifted[np.arange(len(shifted)), tokens[1:]]
    return np.append(0.0, normaliser - chosen), np.append(0.0, normaliser**2)


def test_token_losses_are_cross_entropies(weights, sparse) -> None:
    nats, squares = token_losses(sparse.hidden, make_batch(), weights)
    assert nats.shape == squares.shape == TOKENS.shape
    for row in range(len(TOKENS)):
        expected = plain_losses(logits_of(sparse.hidden[row], weights), TOKENS[row])
        np.testing.assert_allclose(nats[row], expected[0], atol=1e-5)
        np.testing.assert_allclose(squares[row], expected[1], rtol=1e-5)


def plain_balance(scores: np.ndarray, ids: np.ndarray, is_token: np.ndarray) -> tuple[float, np.ndarray]:
    """Balance term and loads, one layer, sequence and token at a time."""
    layers, experts, chosen = scores.shape[0], scores.shape[2], ids.shape[2]
    terms, counts = [], np.zeros((layers, experts))
    for layer in range(layers):
        for row, mask in enumerate(is_token):
            places = row * LENGTH + np.flatnonzero(mask)
            frequency, share = np.zeros(experts), np.zeros(experts)
            for place in places:
                for expert in ids[layer, place]:
                    frequency[expert] += 1
                share += scores[layer, place] / scores[layer, place].sum()
            counts[layer] += frequency
            terms.append((frequency * experts / chosen / len(places)) @ (share / len(places)))
    return float(np.mean(terms)), counts / counts.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def loss_and_gradients(weights: Weights):
    """Loss parts and gradients of the batch in sparse mode."""

    def loss(arrays: Weights, batch: Batch):
        return training_loss(arrays.replace(token_map=weights.token_map), batch, CONFIG, SPARSE)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return gradient(weights.replace(token_map=None), make_batch())


@pytest.mark.slow
def test_the_loss_is_the_sum_of_its_terms(weights, sparse, loss_and_gradients) -> None:
    (total, parts), _ = loss_and_gradients
    batch = make_batch()
    nats, squares = (np.asarray(values) for values in token_losses(sparse.hidden, batch, weights))
    targets = np.asarray(batch.loss_weights)
    mean, z_loss = ((values * targets).sum() / targets.sum() for values in (nats, squares))
    balance, loads = plain_balance(
        np.asarray(sparse.router_scores), np.asarray(sparse.router_ids), np.asarray(batch.segments) > 0
    )
    np.testing.assert_allclose(parts.nats, mean, rtol=1e-5)
    np.testing.assert_allclose(parts.balance, balance, rtol=1e-5)
    np.testing.assert_allclose(parts.loads, loads, atol=1e-6)
    np.testing.assert_allclose(parts.index_divergence, sparse.index_divergence, rtol=1e-4)
    assert float(parts.index_divergence) > 0
    expected = mean + Z_LOSS * z_loss + INDEX_LOSS * float(parts.index_divergence) + BALANCE_LOSS * balance
    np.testing.assert_allclose(total, expected, rtol=1e-5)


@pytest.mark.slow
def test_every_weight_has_a_finite_gradient_and_all_but_the_biases_move(loss_and_gradients) -> None:
    _, gradients = loss_and_gradients
    for path, value in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        assert np.isfinite(np.asarray(value)).all(), name
        # Selection by the biases is piecewise constant; the loss-free balance moves them.
        is_bias = name.endswith(("ffn.bias", "ffn.bias_vl"))
        assert np.any(np.asarray(value)) != is_bias, name


round_as_stored = jax.jit(compute_weights, static_argnums=(1, 2, 3))


@pytest.fixture(scope="module")
def quantized(smallest_document: dict) -> tuple[dict, ModelConfig]:
    """Document and configuration of `SMALLEST` in mixed storage."""
    return smallest_document, parse_config(smallest_document)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_quantized_weights_are_what_a_written_checkpoint_reads_back(quantized, tmp_path: Path, dtype) -> None:
    document, config = quantized
    masters = random_weights(config, jax.random.key(7))
    write_checkpoint(tmp_path, document, round_as_stored(masters, config, jnp.float32, True), config)
    found = load_weights(tmp_path, config, dtype)
    expected = round_as_stored(masters, config, dtype, True)
    np.testing.assert_array_equal(found.token_map, expected.token_map)
    leaves = [
        jax.tree.leaves(tree.replace(token_map=None), is_leaf=is_resident) for tree in (found, expected)
    ]
    for (name, spec), left, right in zip(spec_leaves(weight_specs(config)), *leaves, strict=True):
        assert is_resident(left) == spec.storage.is_quantized, name
        # In the compute dtype, which a tensor that is not quantised has already.
        left = values_of(left, dtype) if is_resident(left) else left
        assert left.dtype == right.dtype, name
        # A bfloat16 tensor is rounded by the file alone when the compute dtype is float32.
        stored = right.astype(jnp.bfloat16) if spec.storage is Storage.BF16 else right
        np.testing.assert_array_equal(left.astype(jnp.float32), stored.astype(jnp.float32), err_msg=name)


values_of = jax.jit(weight_values, static_argnames="dtype")


def is_resident(leaf: object) -> bool:
    return isinstance(leaf, QuantArray)


def test_rounding_reaches_what_the_file_stores_rounded_and_nothing_else(quantized) -> None:
    _, config = quantized
    masters = random_weights(config, jax.random.key(7))
    plain = round_as_stored(masters, config, jnp.float32, False)
    rounded = round_as_stored(masters, config, jnp.float32, True)
    specs = [spec for _, spec in spec_leaves(weight_specs(config))]
    leaves = [jax.tree.leaves(tree.replace(token_map=None)) for tree in (masters, plain, rounded)]
    for spec, master, kept, changed in zip(specs, *leaves, strict=True):
        np.testing.assert_array_equal(kept, master, err_msg=spec.name)
        assert np.array_equal(changed, master) != spec.storage.is_quantized, spec.name


def test_gradients_pass_the_rounding_unchanged(quantized) -> None:
    _, config = quantized
    masters = random_weights(config, jax.random.key(7)).replace(token_map=None)

    def total(weights: Weights) -> jax.Array:
        rounded = compute_weights(weights, config, jnp.float32, is_quantized=True)
        return jnp.sum(jnp.stack([jnp.sum(leaf) for leaf in jax.tree.leaves(rounded)]))

    for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(masters)):
        np.testing.assert_array_equal(leaf, np.ones(leaf.shape, np.float32))


def test_initial_weights_repeat_by_seed() -> None:
    first, again, other = (initial_weights(CONFIG, seed) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.embed, other.embed)
    assert {leaf.dtype for leaf in jax.tree.leaves(first)} == {np.dtype(np.float32)}


def test_initial_weights_have_flat_norms_and_even_biases() -> None:
    weights = initial_weights(CONFIG, 1)
    assert (np.asarray(weights.norm) == 1).all()
    for stack in weights.layers.values():
        assert not np.asarray(stack.ffn.bias).any()
    streams = CONFIG.hc_mult
    base = np.asarray(next(iter(weights.layers.values())).hc_attn.base)
    assert ((base[:, :streams] > 0).sum(axis=1) == 1).all()
    np.testing.assert_array_equal(base[0, 2 * streams :].reshape(streams, streams), 3 * np.eye(streams))


def test_balancing_moves_every_bias_against_its_load() -> None:
    weights = initial_weights(CONFIG, 1)
    experts, layers = CONFIG.n_routed_experts, CONFIG.num_hidden_layers
    loads = np.random.default_rng(1).dirichlet(np.ones(experts), layers).astype(np.float32)
    moved = balance_biases(weights, jnp.asarray(loads), CONFIG, jnp.float32(0.25))
    for name, spec in spec_leaves(weight_specs(CONFIG)):
        if not name.endswith("ffn.bias"):
            continue
        kind = name.split(".")[1]
        expected = 0.25 * np.sign(1 / experts - loads[list(spec.layers)])
        np.testing.assert_array_equal(moved.layers[kind].ffn.bias, expected)
        np.testing.assert_array_equal(moved.layers[kind].ffn.bias_vl, expected)
        assert spec.storage is Storage.F32


def test_balancing_evens_out_a_router() -> None:
    """Scores that favour some experts: after enough steps every expert has its share."""
    random = np.random.default_rng(2)
    experts, chosen = CONFIG.n_routed_experts, CONFIG.num_experts_per_tok
    scores = random.uniform(0.2, 0.8, (2000, experts)) + np.linspace(0, 0.3, experts)
    weights = initial_weights(CONFIG, 1)
    kind = next(iter(weights.layers))

    def shares(bias: np.ndarray) -> np.ndarray:
        best = np.argsort(-(scores + bias), axis=1)[:, :chosen]
        return np.bincount(best.reshape(-1), minlength=experts) / best.size

    before = shares(np.zeros(experts))
    for _ in range(60):
        share = shares(np.asarray(weights.layers[kind].ffn.bias[0])).astype(np.float32)
        loads = jnp.asarray(np.tile(share, (CONFIG.num_hidden_layers, 1)))
        weights = balance_biases(weights, loads, CONFIG, jnp.float32(0.01))
    after = shares(np.asarray(weights.layers[kind].ffn.bias[0]))
    assert np.abs(before - 1 / experts).max() > 0.1
    assert np.abs(after - 1 / experts).max() < 0.02
