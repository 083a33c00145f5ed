"""Mixture of experts against a loop over tokens and experts: router, routed and shared experts together."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import moe
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import ExpertWeights, MoeWeights
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.references import expert
from deepinfer_jax.testing.tolerances import assert_close

CONFIG = replace(TINY, n_routed_experts=16)
EXPERTS, HIDDEN, FFN = CONFIG.n_routed_experts, CONFIG.hidden_size, CONFIG.moe_intermediate_size
BUSY = [3, 7]
LAYERS, LAYER = 2, 1


@pytest.fixture(scope="module")
def weights() -> MoeWeights:
    """Router and shared expert of a layer, routed experts of two, of which the layer is the second."""
    random = np.random.default_rng(6)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) * 2 / np.sqrt(shape[-1]), jnp.float32)

    def experts(*stack: int) -> ExpertWeights:
        return ExpertWeights(
            w1=draw(*stack, FFN, HIDDEN), w3=draw(*stack, FFN, HIDDEN), w2=draw(*stack, HIDDEN, FFN)
        )

    return MoeWeights(
        gate=draw(EXPERTS, HIDDEN),
        bias=draw(EXPERTS),
        bias_vl=draw(EXPERTS),
        experts=experts(LAYERS, EXPERTS),
        shared_experts=experts(),
    )


@pytest.fixture(scope="module")
def busy(weights: MoeWeights) -> MoeWeights:
    """The same with a bias that sends every token to experts 3 and 7."""
    return weights.replace(bias=weights.bias.at[jnp.array(BUSY)].add(100.0))


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, HIDDEN)).astype(np.float32)


def text(count: int) -> moe.TokenRoles:
    return moe.TokenRoles(is_image=jnp.zeros(count, bool), is_valid=jnp.ones(count, bool))


def run(x: np.ndarray, weights: MoeWeights, roles: moe.TokenRoles) -> np.ndarray:
    return np.asarray(apply(jnp.asarray(x), weights, jnp.int32(LAYER), roles))


@jax.jit
def apply(x: jax.Array, weights: MoeWeights, layer: jax.Array, roles: moe.TokenRoles) -> jax.Array:
    return moe.moe(x, weights, layer, roles, CONFIG, FLOAT32)


def loop(x: np.ndarray, weights: MoeWeights, is_image: np.ndarray | None = None) -> np.ndarray:
    """The same in float64, token by token, from the definition."""
    gate, shared = np.asarray(weights.gate, np.float64), weights.shared_experts
    routed = jax.tree.map(lambda stack: np.asarray(stack)[LAYER], weights.experts)
    output = np.zeros(x.shape)
    for row, token in enumerate(x.astype(np.float64)):
        scores = np.sqrt(np.log1p(np.exp(gate @ token)))
        bias = weights.bias if is_image is None or not is_image[row] else weights.bias_vl
        chosen = np.argsort(-(scores + np.asarray(bias)), kind="stable")[: CONFIG.num_experts_per_tok]
        output[row] = expert(token, shared.w1, shared.w3, shared.w2, CONFIG.swiglu_limit)
        for one in chosen:
            share = scores[one] / scores[chosen].sum() * CONFIG.routed_scaling_factor
            parts = (part[one] for part in (routed.w1, routed.w3, routed.w2))
            output[row] += share * expert(token, *parts, CONFIG.swiglu_limit)
    return output


each_count = pytest.mark.parametrize("count", [1, 2, 129], ids=lambda count: f"tokens_{count}")


@each_count
def test_bc58_experts_without_tokens_equal_the_loop(busy: MoeWeights, count: int) -> None:
    x = tokens(count)
    assert_close(run(x, busy, text(count)), loop(x, busy), "equivalence_float32")


@each_count
def test_bc58_nan_in_experts_without_tokens_has_no_effect(busy: MoeWeights, count: int) -> None:
    idle = np.setdiff1d(np.arange(EXPERTS), BUSY)
    poisoned = busy.replace(
        experts=jax.tree.map(lambda stack: stack.at[:, idle].set(jnp.nan).at[0].set(jnp.nan), busy.experts)
    )
    x = tokens(count)
    np.testing.assert_array_equal(run(x, poisoned, text(count)), run(x, busy, text(count)))


def test_tokens_with_different_experts_equal_the_loop(weights: MoeWeights) -> None:
    x, is_image = tokens(129), np.arange(129) % 3 == 1
    roles = text(129)._replace(is_image=jnp.asarray(is_image))
    assert_close(run(x, weights, roles), loop(x, weights, is_image), "equivalence_float32")


def test_padding_chooses_no_expert(busy: MoeWeights) -> None:
    """Text goes to experts 3 and 7; padding, here of image rows, would go to two others, full of NaN."""
    others = np.array([1, 2])
    poisoned = busy.replace(
        bias_vl=busy.bias_vl.at[others].add(100.0),
        experts=jax.tree.map(lambda stack: stack.at[:, others].set(jnp.nan), busy.experts),
    )
    x, is_padding = tokens(129), np.arange(129) % 2 == 1
    roles = moe.TokenRoles(is_image=jnp.asarray(is_padding), is_valid=jnp.asarray(~is_padding))
    found = run(x, poisoned, roles)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[~is_padding], run(x, busy, text(129))[~is_padding])
    assert np.isnan(run(x, poisoned, roles._replace(is_valid=jnp.ones(129, bool)))[is_padding]).all()


def test_shared_expert_is_an_expert_of_weight_one(weights: MoeWeights) -> None:
    shared, x = weights.shared_experts, tokens(5)
    expected = [expert(token, shared.w1, shared.w3, shared.w2, CONFIG.swiglu_limit) for token in x]
    found = moe.shared_expert(jnp.asarray(x), shared, CONFIG, FLOAT32)
    assert_close(found, np.stack(expected), "equivalence_float32")


def routed(scores, bias, bias_vl, is_image) -> moe.Routing:
    arrays = (jnp.asarray(values, jnp.float32) for values in (scores, bias, bias_vl))
    return moe.route(*arrays, jnp.asarray(is_image), TINY)


def test_router_score_is_the_root_of_softplus() -> None:
    x, gate = tokens(4), np.random.default_rng(9).normal(size=(6, HIDDEN)).astype(np.float32)
    expected = np.sqrt(np.log1p(np.exp(x.astype(np.float64) @ gate.astype(np.float64).T)))
    assert_close(moe.router_scores(jnp.asarray(x), jnp.asarray(gate)), expected, "equivalence_float32")


def test_bias_selects_but_does_not_weigh() -> None:
    scores = [[0.9, 0.8, 0.1, 0.2, 0.3, 0.4]]
    found = routed(scores, [0, 0, 2.0, 0, 0, 1.0], np.zeros(6), [False])
    assert np.asarray(found.ids).tolist() == [[2, 5]]
    assert_close(found.weights, [[0.1 / 0.5 * 1.5, 0.4 / 0.5 * 1.5]], "equivalence_float32")


def test_image_tokens_route_with_their_own_bias() -> None:
    scores = np.full((2, 6), 0.5)
    found = routed(scores, [0, 0, 2.0, 0, 0, 1.0], [0, 2.0, 0, 1.0, 0, 0], [False, True])
    assert np.asarray(found.ids).tolist() == [[2, 5], [1, 3]]


def test_ties_go_to_the_lower_expert() -> None:
    found = routed(np.full((1, 6), 0.5), np.zeros(6), np.zeros(6), [False])
    assert np.asarray(found.ids).tolist() == [[0, 1]]


def test_scores_of_zero_give_finite_weights() -> None:
    found = routed(np.zeros((1, 6)), np.zeros(6), np.zeros(6), [False])
    assert np.asarray(found.weights).tolist() == [[0.0, 0.0]]
