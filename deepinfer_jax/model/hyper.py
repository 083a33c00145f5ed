"""Single-pass manifold hyper-connections: how sublayers read and write the residual streams.

Separate because both sites of every layer use the same three mixes. Each site's `pre` mix is used
by the *next* site, so it travels in the carry.
Read next: `backbone.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Array
from ..config import ModelConfig
from .linear import contract
from .norm import inverse_rms
from .numerics import round_to
from .weights import HyperWeights


class Mixes(NamedTuple):
    """Mixes of one site, float32: pre [..., M], post [..., M], comb [..., M from, M to]."""

    pre: Array
    post: Array
    comb: Array


def initial_streams(embedded: Array, count: int) -> tuple[Array, Array]:
    """Start the residual streams: equal copies, of which the first site reads the first.

    Args:
        embedded: [R, D] token embeddings in the compute dtype.
        count: streams M.

    Returns:
        [R, M, D] streams, float32 [R, M] one-hot mix.

    Source: spec/model.md section 3.
    """
    num_rows, width = embedded.shape
    streams = jnp.broadcast_to(embedded[:, None, :], (num_rows, count, width))
    return streams, jnp.zeros((num_rows, count), jnp.float32).at[:, 0].set(1.0)


def mixes(streams: Array, weights: HyperWeights, config: ModelConfig) -> Mixes:
    """Compute the three mixes of a site from the streams that enter it.

    z = (fn u) rsqrt(mean(u^2) + eps) with u the flattened streams; pre = sigmoid(z s0 + b) + eps;
    post = 2 sigmoid(z s1 + b); comb = Sinkhorn(z s2 + b), doubly stochastic.

    Args:
        streams: [..., M, D].
        weights: the site's fn, base and scale.
        config: the architecture.

    Returns:
        The mixes, float32.

    Source: spec/model.md section 4.
    """
    count = config.hc_mult
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], count * streams.shape[-1])
    z = contract("...i,oi->...o", flat, weights.fn) * inverse_rms(flat, config.rms_norm_eps)
    base = weights.base.reshape((1,) * (z.ndim - 1) + weights.base.shape)

    def part(start: int, stop: int, scale_index: int) -> Array:
        return z[..., start:stop] * weights.scale[scale_index] + base[..., start:stop]

    pre = jax.nn.sigmoid(part(0, count, 0)) + jnp.float32(config.hc_eps)
    post = 2 * jax.nn.sigmoid(part(count, 2 * count, 1))
    comb = part(2 * count, 2 * count + count * count, 2).reshape(*z.shape[:-1], count, count)
    return Mixes(pre, post, _sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps))


def _sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Alternate row and column normalisation; the first row pass is a softmax.

    A loop, not unrolled: 24 unrolled sites took 15 s to compile where the loop takes 2 s.
    """
    eps32 = jnp.float32(eps)
    matrix = jax.nn.softmax(logits, axis=-1) + eps32
    matrix = matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps32)

    def iterate(_: int, matrix: Array) -> Array:
        matrix = matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + eps32)
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps32)

    return lax.fori_loop(0, iterations - 1, iterate, matrix)


def collapse(streams: Array, mix: Array) -> Array:
    """Fold the streams into one vector: x = sum_k mix_k h_k in float32, rounded once.

    Args:
        streams: [..., M, D].
        mix: [..., M] float32, the `pre` of the previous site.

    Returns:
        [..., D] in the streams' dtype.
    """
    return round_to(jnp.sum(streams.astype(jnp.float32) * mix[..., None], axis=-2), streams.dtype)


def expand(streams: Array, update: Array, site: Mixes) -> Array:
    """Write a sublayer's output back: h_k <- post_k y + sum_j comb[j, k] h_j, rounded once.

    Args:
        streams: [..., M, D].
        update: [..., D], the sublayer's output y.
        site: the site's mixes.

    Returns:
        [..., M, D] in the streams' dtype.

    Source: spec/model.md section 4.
    """
    old = streams.astype(jnp.float32)
    # Broadcast sums over M = 4 instead of a matmul: rows stay independent of the batch.
    mixed = jnp.sum(site.comb[..., None] * old[..., :, None, :], axis=-3)
    written = site.post[..., None] * update.astype(jnp.float32)[..., None, :]
    return round_to(written + mixed, streams.dtype)
