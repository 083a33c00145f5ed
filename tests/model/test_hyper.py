"""Hyper-connections against NumPy float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.model import hyper
from deepinfer_jax.model.weights import HyperWeights
from deepinfer_jax.testing.presets import TINY
from deepinfer_jax.testing.references import sinkhorn
from deepinfer_jax.testing.tolerances import assert_close

STREAMS, HIDDEN = TINY.hc_mult, TINY.hidden_size


@pytest.fixture(scope="module")
def case() -> tuple[np.ndarray, HyperWeights]:
    random = np.random.default_rng(2)
    mix = STREAMS * (2 + STREAMS)
    weights = HyperWeights(
        fn=jnp.asarray(random.normal(size=(mix, STREAMS * HIDDEN)) * 0.1, jnp.float32),
        base=jnp.asarray(random.normal(size=mix), jnp.float32),
        scale=jnp.asarray([0.7, 1.3, 2.1], jnp.float32),
    )
    return random.normal(size=(6, STREAMS, HIDDEN)).astype(np.float32) * 3, weights


@pytest.fixture(scope="module")
def mixes(case) -> hyper.Mixes:
    streams, weights = case
    return jax.jit(lambda s, w: hyper.mixes(s, w, TINY))(jnp.asarray(streams), weights)


@pytest.fixture(scope="module")
def logits(case) -> np.ndarray:
    """z in float64, before scales and bases."""
    streams, weights = case
    flat = streams.astype(np.float64).reshape(len(streams), -1)
    return flat @ np.asarray(weights.fn, np.float64).T / np.sqrt((flat**2).mean(axis=1, keepdims=True))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_pre_is_a_sigmoid_plus_eps(case, mixes, logits) -> None:
    base = np.asarray(case[1].base, np.float64)
    expected = sigmoid(logits[:, :4] * np.float32(0.7) + base[:4]) + TINY.hc_eps
    assert_close(mixes.pre, expected, "equivalence_float32")


def test_post_is_twice_a_sigmoid(case, mixes, logits) -> None:
    base = np.asarray(case[1].base, np.float64)
    expected = 2 * sigmoid(logits[:, 4:8] * np.float32(1.3) + base[4:8])
    assert_close(mixes.post, expected, "equivalence_float32")


def test_comb_is_sinkhorn_of_the_third_part(case, mixes, logits) -> None:
    base = np.asarray(case[1].base, np.float64)
    matrices = (logits[:, 8:] * np.float32(2.1) + base[8:]).reshape(-1, STREAMS, STREAMS)
    expected = np.stack([sinkhorn(matrix, TINY.hc_sinkhorn_iters, TINY.hc_eps) for matrix in matrices])
    assert_close(mixes.comb, expected, "equivalence_float32")


@pytest.mark.parametrize("axis", [-2, -1], ids=["columns", "rows"])
def test_comb_is_doubly_stochastic(axis: int) -> None:
    # Of moderate logits: with large ones 20 passes leave the rows 2 % off.
    matrices = jnp.asarray(np.random.default_rng(5).normal(size=(64, STREAMS, STREAMS)), jnp.float32)
    comb = np.asarray(hyper._sinkhorn(matrices, TINY.hc_sinkhorn_iters, TINY.hc_eps))
    assert (comb > 0).all()
    assert_close(comb.sum(axis=axis), np.ones((64, STREAMS)), "equivalence_float32")


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_first_pass_counts_as_an_iteration(iterations: int) -> None:
    matrix = np.random.default_rng(3).normal(size=(4, 4)).astype(np.float32) * 3
    found = hyper._sinkhorn(jnp.asarray(matrix)[None], iterations, TINY.hc_eps)[0]
    assert_close(found, sinkhorn(matrix, iterations, TINY.hc_eps), "equivalence_float32")


def test_zero_streams_give_finite_mixes(case) -> None:
    found = hyper.mixes(jnp.zeros((1, STREAMS, HIDDEN)), case[1], TINY)
    assert all(np.isfinite(np.asarray(part)).all() for part in found)


def test_collapse_folds_the_streams(case, mixes) -> None:
    streams, pre = case[0], np.asarray(mixes.pre, np.float64)
    expected = np.einsum("rmd,rm->rd", streams.astype(np.float64), pre)
    assert_close(hyper.collapse(jnp.asarray(streams), mixes.pre), expected, "equivalence_float32")


def test_expand_mixes_from_the_first_index_to_the_second(case, mixes) -> None:
    streams = case[0].astype(np.float64)
    update = np.random.default_rng(4).normal(size=(len(streams), HIDDEN)).astype(np.float32)
    post, comb = np.asarray(mixes.post, np.float64), np.asarray(mixes.comb, np.float64)
    expected = post[:, :, None] * update[:, None, :] + np.einsum("rjk,rjd->rkd", comb, streams)
    found = hyper.expand(jnp.asarray(case[0]), jnp.asarray(update), mixes)
    assert_close(found, expected, "equivalence_float32")
