"""Mixture of experts against a loop over tokens and experts."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import moe
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import ExpertWeights
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.references import expert
from deepinfer_jax.testing.tolerances import assert_close

CONFIG = replace(TINY, n_routed_experts=16)
EXPERTS, HIDDEN, FFN = CONFIG.n_routed_experts, CONFIG.hidden_size, CONFIG.moe_intermediate_size
BUSY = (3, 7)


@pytest.fixture(scope="module")
def experts() -> ExpertWeights:
    random = np.random.default_rng(6)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) * 2 / np.sqrt(shape[-1]), jnp.float32)

    return ExpertWeights(
        w1=draw(EXPERTS, FFN, HIDDEN), w3=draw(EXPERTS, FFN, HIDDEN), w2=draw(EXPERTS, HIDDEN, FFN)
    )


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).normal(size=(count, HIDDEN)).astype(np.float32)


def busy_routing(count: int) -> moe.Routing:
    """Send every token to experts 3 and 7."""
    weights = np.random.default_rng(7).uniform(0.2, 1.3, (count, 2)).astype(np.float32)
    return moe.Routing(jnp.broadcast_to(jnp.array(BUSY, jnp.int32), (count, 2)), jnp.asarray(weights))


def loop(x: np.ndarray, routing: moe.Routing, experts: ExpertWeights) -> np.ndarray:
    output = np.zeros(x.shape, np.float64)
    for token, choice in np.ndindex(*routing.ids.shape):
        chosen = int(routing.ids[token, choice])
        result = expert(
            x[token], experts.w1[chosen], experts.w3[chosen], experts.w2[chosen], CONFIG.swiglu_limit
        )
        output[token] += float(routing.weights[token, choice]) * result
    return output


def run(x: np.ndarray, routing: moe.Routing, experts: ExpertWeights) -> np.ndarray:
    apply = jax.jit(moe.routed_experts, static_argnums=(3, 4))
    return np.asarray(apply(jnp.asarray(x), routing, experts, CONFIG, FLOAT32))


each_count = pytest.mark.parametrize("count", [1, 2, 129], ids=lambda count: f"tokens_{count}")


@each_count
def test_bc58_experts_without_tokens_equal_the_loop(experts, count: int) -> None:
    x, routing = tokens(count), busy_routing(count)
    assert_close(run(x, routing, experts), loop(x, routing, experts), "equivalence_float32")


@each_count
def test_bc58_nan_in_experts_without_tokens_has_no_effect(experts, count: int) -> None:
    idle = np.setdiff1d(np.arange(EXPERTS), BUSY)
    poisoned = jax.tree.map(lambda weight: weight.at[idle].set(jnp.nan), experts)
    x, routing = tokens(count), busy_routing(count)
    np.testing.assert_array_equal(run(x, routing, poisoned), run(x, routing, experts))


def test_tokens_with_different_experts_equal_the_loop(experts) -> None:
    random, x = np.random.default_rng(8), tokens(33)
    ids = np.stack([random.permutation(EXPERTS)[:2] for _ in x]).astype(np.int32)
    weights = random.uniform(0.2, 1.3, ids.shape).astype(np.float32)
    routing = moe.Routing(jnp.asarray(ids), jnp.asarray(weights))
    assert_close(run(x, routing, experts), loop(x, routing, experts), "equivalence_float32")


def test_shared_expert_is_an_expert_of_weight_one(experts) -> None:
    shared, x = jax.tree.map(lambda weight: weight[0], experts), tokens(5)
    expected = [expert(token, shared.w1, shared.w3, shared.w2, CONFIG.swiglu_limit) for token in x]
    found = moe.shared_expert(jnp.asarray(x), shared, CONFIG, FLOAT32)
    assert_close(found, np.stack(expected), "equivalence_float32")


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (9.0, 1.0, 1.5 / (1 + np.exp(-1.5))),
        (-9.0, 1.0, -9.0 / (1 + np.exp(9.0))),
        (1.0, 9.0, 1.5 / (1 + np.exp(-1.0))),
        (1.0, -9.0, -1.5 / (1 + np.exp(-1.0))),
    ],
    ids=["gate_above", "gate_below_is_not_clamped", "up_above", "up_below"],
)
def test_swiglu_clamps(gate: float, up: float, expected: float) -> None:
    found = moe.clamped_swiglu(jnp.array([gate]), jnp.array([up]), None, 1.5)
    assert_close(found, [expected], "equivalence_float32")


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
