"""CSA2 attention: a sliding window and selected compressed entries, one shared key-value vector.

Separate because it is the same in all layers but for what is selected.
Read next: `backbone.py`, which reads the cache and hands the keys in.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from ..arrays import MASKED_SCORE, Array
from ..config import ModelConfig
from ..kernels import quantize_dequantize_fp8
from .linear import contract, quantized_linear
from .norm import rms_norm
from .numerics import Numerics, round_to
from .rope import Rotation, rotate, rotate_heads
from .weights import AttentionWeights


class Queries(NamedTuple):
    """Low-rank query qr [..., q_rank] and rotated queries q [..., N, H]."""

    qr: Array
    q: Array


def make_queries(
    x: Array, table: Rotation, weights: AttentionWeights, config: ModelConfig, numerics: Numerics
) -> Queries:
    """Make queries: qr = RMSNorm(wq_a x); q = R(wq_b qr), no norm after wq_b.

    Args:
        x: [..., D], normed.
        table: rotation at the tokens' positions.
        weights: the layer's attention.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        The queries.

    Source: spec/model.md section 5.
    """
    qr = rms_norm(quantized_linear(x, weights.wq_a, numerics), weights.q_norm, config.rms_norm_eps)
    flat = quantized_linear(qr, weights.wq_b, numerics)
    q = flat.reshape(*x.shape[:-1], config.num_attention_heads, config.head_dim)
    return Queries(qr, rotate_heads(q, table))


def window_key_value(
    x: Array, table: Rotation, weights: AttentionWeights, config: ModelConfig, numerics: Numerics
) -> Array:
    """Make the token's window row, key and value in one: Q8(R(RMSNorm(wkv x))).

    Args:
        x: [..., D], normed.
        table: rotation at the tokens' positions.
        weights: the layer's attention.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        [..., H].

    Source: spec/model.md section 5.
    """
    row = rms_norm(quantized_linear(x, weights.wkv, numerics), weights.kv_norm, config.rms_norm_eps)
    row = rotate(row, table)
    return quantize_dequantize_fp8(row) if numerics.quantizes_cache else row


def gather_entries(entries: Array, slots: Array, selection: Array) -> tuple[Array, Array]:
    """Gather selected compressed entries of each row's slot.

    Args:
        entries: [B, G, H].
        slots: int32 [R].
        selection: int32 [R, K]; anything outside 0..G-1 selects nothing.

    Returns:
        [R, K, H] entries, bool [R, K] whether each is there.
    """
    is_there = (selection >= 0) & (selection < entries.shape[1])
    index = jnp.where(is_there, selection, 0)
    return entries[slots[:, None], index], is_there


def attend(q: Array, keys: Array, is_visible: Array, attn_sink: Array) -> Array:
    """Attend to gathered keys, which are values too, with a sink in the denominator.

    s = q . key / sqrt(H); p = exp(s) / (sum exp(s) + exp(sink)); o = sum p key.

    Args:
        q: [R, N, H].
        keys: [R, K, H]; what is not visible may hold anything, NaN included.
        is_visible: bool [R, K]; a row that sees nothing gives 0.
        attn_sink: float32 [N].

    Returns:
        [R, N, H] in q's dtype.

    Source: spec/model.md section 5.
    """
    keys = jnp.where(is_visible[:, :, None], keys, 0).astype(q.dtype)
    scores = contract("rnh,rkh->rnk", q, keys) * jnp.float32(q.shape[-1] ** -0.5)
    scores = jnp.where(is_visible[:, None, :], scores, MASKED_SCORE)
    sink = attn_sink.astype(jnp.float32)[None, :, None]
    # The sink takes part in the maximum, so a row of only MASKED_SCORE stays finite.
    highest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True, initial=MASKED_SCORE), sink)
    weights = jnp.exp(scores - highest)
    denominator = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest)
    return round_to(contract("rnk,rkh->rnh", round_to(weights / denominator, q.dtype), keys), q.dtype)


def project_output(o: Array, weights: AttentionWeights, config: ModelConfig, numerics: Numerics) -> Array:
    """Project heads by groups: wo_b concat_g(wo_a[g] o_g).

    Args:
        o: [..., N, H], rotated back.
        weights: the layer's attention.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        [..., D].

    Source: spec/model.md section 5; wo_a takes unquantised input (section 2).
    """
    groups = config.o_groups
    grouped = o.reshape(*o.shape[:-2], groups, config.num_attention_heads // groups * config.head_dim)
    wo_a = weights.wo_a.reshape(groups, config.o_lora_rank, grouped.shape[-1]).astype(o.dtype)
    low_rank = round_to(contract("...gi,goi->...go", grouped, wo_a), o.dtype)
    flat = low_rank.reshape(*o.shape[:-2], groups * config.o_lora_rank)
    return quantized_linear(flat, weights.wo_b, numerics)


def unrotate(o: Array, table: Rotation) -> Array:
    """Rotate attention outputs [..., N, H] back by their own position."""
    return rotate_heads(o, table, is_inverse=True)
