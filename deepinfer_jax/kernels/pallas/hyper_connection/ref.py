"""The meaning of hyper-connections in plain JAX: mixes, collapse, expand.

Separate because it is what every kernel is compared with, and what runs where none exists. Each
site's `pre` mix is used by the *next* site, so it travels in the carry.
Read next: `api.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ....arithmetic import contract, round_to
from ....arrays import Array
from ...norm import inverse_rms, rms_norm


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


def enter_site(
    streams: Array,
    pre_mix: Array,
    norm_weight: Array,
    fn: Array,
    base: Array,
    scale: Array,
    *,
    iterations: int,
    hyper_eps: float,
    norm_eps: float,
) -> tuple[Array, Mixes]:
    """Read a site as `api.enter_site` says; same arguments, already checked."""
    mixes = site_mixes(
        streams, fn, base, scale, iterations=iterations, hyper_eps=hyper_eps, norm_eps=norm_eps
    )
    return rms_norm(collapse(streams, pre_mix), norm_weight, norm_eps), mixes


def site_mixes(
    streams: Array,
    fn: Array,
    base: Array,
    scale: Array,
    *,
    iterations: int,
    hyper_eps: float,
    norm_eps: float,
) -> Mixes:
    """Compute the three mixes of a site from the streams that enter it.

    z = (fn u) rsqrt(mean(u^2) + eps) with u the flattened streams; pre = sigmoid(z s0 + b) + eps;
    post = 2 sigmoid(z s1 + b); comb = Sinkhorn(z s2 + b), doubly stochastic.

    Args:
        streams: [..., M, D].
        fn: float32 [M (M + 2), M D].
        base: float32 [M (M + 2)].
        scale: float32 [3].
        iterations: of the Sinkhorn normalisation.
        hyper_eps: added to `pre` and in the normalisation.
        norm_eps: added to the mean square.

    Returns:
        The mixes, float32.

    Source: spec/model.md section 4.
    """
    count = streams.shape[-2]
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], count * streams.shape[-1])
    z = contract("...i,oi->...o", flat, fn) * inverse_rms(flat, norm_eps)
    base = base.reshape((1,) * (z.ndim - 1) + base.shape)

    def part(start: int, stop: int, scale_index: int) -> Array:
        return z[..., start:stop] * scale[scale_index] + base[..., start:stop]

    pre = jax.nn.sigmoid(part(0, count, 0)) + jnp.float32(hyper_eps)
    post = 2 * jax.nn.sigmoid(part(count, 2 * count, 1))
    comb = part(2 * count, 2 * count + count * count, 2).reshape(*z.shape[:-1], count, count)
    return Mixes(pre, post, normalize_mix(comb, iterations, hyper_eps))


def normalize_mix(logits: Array, iterations: int, eps: float) -> Array:
    """Alternate row and column normalisation (Sinkhorn); the first row pass is a softmax.

    A loop, not unrolled: 24 unrolled sites took 15 s to compile where the loop takes 2 s.

    Args:
        logits: float32 [..., M from, M to].
        iterations: passes over rows and columns, the first included.
        eps: added to the softmax and to every sum.

    Returns:
        float32 [..., M from, M to].

    Source: spec/model.md section 4.
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


def leave_site(streams: Array, update: Array, mixes: Mixes) -> Array:
    """Write a sublayer's output back as `api.leave_site` says; same arguments, already checked."""
    old = streams.astype(jnp.float32)
    # Broadcast sums over M = 4 instead of a matmul: rows stay independent of the batch.
    mixed = jnp.sum(mixes.comb[..., None] * old[..., :, None, :], axis=-3)
    written = mixes.post[..., None] * update.astype(jnp.float32)[..., None, :]
    return round_to(written + mixed, streams.dtype)
