"""Gradients through the backbone against central finite differences, one weight of each kind.

Selection of entries and of experts is piecewise constant: directions and steps are chosen so that
nothing flips, and what only selects has a gradient of exactly zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import spec_leaves
from deepinfer_jax.model.backbone import backbone, head_logits
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.schedule import make_schedule
from deepinfer_jax.model.weights import weight_specs
from deepinfer_jax.testing.golden import fresh_cache, make_rows, model_step
from deepinfer_jax.testing.presets import ONE_OF_EACH as CONFIG
from deepinfer_jax.testing.presets import random_weights
from deepinfer_jax.testing.tolerances import assert_close

LENGTH = 16
DIRECTIONS = 3
LARGEST_STEP = 1e-2  # relative to the root mean square of a leaf
LOSS_CHANGE = 0.02  # wanted from a step: the loss, a sum of 2048 products, is rounded by about 1e-5
SHORTENINGS = 8
SELECTIONS = frozenset(
    {f"layers.{layer}.indexer.topk_ids" for layer in CONFIG.index_source_layer_ids}
    | {f"layers.{layer}.ffn.gate.ids" for layer in range(CONFIG.num_hidden_layers)}
)

LEAVES = [name for name, _ in spec_leaves(weight_specs(CONFIG))]
SELECTS_ONLY = (
    ".indexer.wq_b",
    ".indexer.weights_proj",
    ".indexer.wk",
    ".indexer.k_norm",
    ".bias",
    ".bias_vl",
)
SELECTING = [name for name in LEAVES if name.endswith(SELECTS_ONLY)]
WEIGHING = [name for name in LEAVES if name not in SELECTING]


def to_leaves(tree) -> dict[str, Any]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def with_leaf(tree, name: str, value):
    """Replace one leaf of a tree."""

    def replaced(path, leaf):
        return value if jax.tree_util.keystr(path, simple=True, separator=".") == name else leaf

    return jax.tree_util.tree_map_with_path(replaced, tree)


@dataclass(frozen=True)
class Problem:
    """A scalar loss of the weights, its gradient, the logits under it, and the selections behind it."""

    weights: Any
    rows: Any
    cache: Any
    cotangent: np.ndarray
    gradient: dict[str, np.ndarray]
    logits: np.ndarray

    def evaluate(self, name: str, value: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """Give the loss, summed in float64, and all selections with one leaf replaced."""
        weights = with_leaf(self.weights, name, jnp.asarray(value))
        logits, taps, _ = model_step(weights, CONFIG, self.rows, self.cache, FLOAT32, SELECTIONS)
        loss = float((np.asarray(logits, np.float64) * self.cotangent).sum())
        return loss, [np.sort(np.asarray(taps[tap]), axis=-1) for tap in sorted(SELECTIONS)]


@functools.partial(jax.jit, static_argnames="config")
def gradient(weights, config, rows, cache, cotangent):
    # The token map holds integers, so it stays outside of what is differentiated.
    def loss(weights):
        hidden, _, _ = backbone(weights.replace(token_map=token_map), config, rows, cache, FLOAT32)
        logits = head_logits(hidden, weights, FLOAT32)
        return jnp.sum(logits * cotangent), logits

    token_map = weights.token_map
    return jax.grad(loss, has_aux=True)(weights.replace(token_map=None))


@pytest.fixture(scope="module")
def problem() -> Problem:
    weights, random = random_weights(CONFIG, jax.random.key(3)), np.random.default_rng(21)
    tokens = random.integers(0, CONFIG.vocab_size, (1, LENGTH))
    rows = make_rows(tokens, is_image=np.arange(LENGTH)[None] % 11 == 5)
    cache = fresh_cache(CONFIG, 1, LENGTH, FLOAT32)
    cotangent = random.normal(size=(LENGTH, CONFIG.vocab_size)).astype(np.float32)
    found, logits = gradient(weights, CONFIG, rows, cache, jnp.asarray(cotangent))
    arrays = {name: np.asarray(leaf) for name, leaf in to_leaves(found).items()}
    return Problem(weights, rows, cache, cotangent.astype(np.float64), arrays, np.asarray(logits))


def test_scanned_layers_equal_unrolled_layers(problem: Problem) -> None:
    """Two adjacent layers of one kind are scanned in the gradient, and with taps they are not."""
    runs = [run for segment in make_schedule(CONFIG) for run in segment.runs]
    assert max(run.length for run in runs) == 2
    unrolled, _, _ = model_step(problem.weights, CONFIG, problem.rows, problem.cache, FLOAT32, SELECTIONS)
    assert_close(problem.logits, unrolled, "equivalence_float32")


def central_difference(problem: Problem, name: str, direction: np.ndarray, slope: float) -> float:
    """Differentiate along a direction with a step that flips no selection; `slope` is its rough size."""
    weight = np.asarray(to_leaves(problem.weights)[name], np.float64)
    step = min(LARGEST_STEP * np.sqrt(np.mean(np.square(weight))), LOSS_CHANGE / abs(slope))
    for _ in range(SHORTENINGS):
        above, selected_above = problem.evaluate(name, (weight + step * direction).astype(np.float32))
        below, selected_below = problem.evaluate(name, (weight - step * direction).astype(np.float32))
        pairs = zip(selected_above, selected_below, strict=True)
        if all(np.array_equal(one, other) for one, other in pairs):
            return (above - below) / (2 * step)
        step /= 2
    raise AssertionError(f"{name}: every step flips a selection; choose another seed")


@pytest.mark.parametrize("name", WEIGHING)
def test_gradient_equals_finite_differences(problem: Problem, name: str) -> None:
    gradient, random = problem.gradient[name].astype(np.float64), np.random.default_rng(len(name))
    # Partly along the gradient's signs, so that the change of the loss stands out of its rounding.
    directions = [random.normal(size=gradient.shape) + np.sign(gradient) for _ in range(DIRECTIONS)]
    found = [float((gradient * direction).sum()) for direction in directions]
    expected = [
        central_difference(problem, name, direction, slope)
        for direction, slope in zip(directions, found, strict=True)
    ]
    assert_close(found, expected, "gradient_finite_difference")


@pytest.mark.parametrize("name", SELECTING)
def test_what_only_selects_has_no_gradient(problem: Problem, name: str) -> None:
    np.testing.assert_array_equal(problem.gradient[name], 0.0)


@pytest.mark.parametrize("name", WEIGHING)
def test_gradient_is_finite_and_not_zero(problem: Problem, name: str) -> None:
    assert np.isfinite(problem.gradient[name]).all()
    assert problem.gradient[name].any()
