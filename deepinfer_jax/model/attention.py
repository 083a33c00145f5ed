"""The projections around CSA2 attention: queries, the shared key-value row, the grouped output.

Separate because they are the same in all layers; what is attended to is the kernel's business.
Read next: `../kernels/pallas/sparse_attention/ref.py`, `step_layer.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from ..arithmetic import contract, round_to
from ..arrays import Array
from ..config import ModelConfig
from ..kernels import rms_norm, weight_values
from ..sharding.exchange import WHOLE, Placement, sum_parts
from .linear import linear_float32, quantize_input, quantized_linear
from .numerics import Numerics
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
    q = flat.reshape(*x.shape[:-1], -1, config.head_dim)
    return Queries(qr, rotate_heads(q, table))


def window_key_value(
    x: Array, table: Rotation, weights: AttentionWeights, config: ModelConfig, numerics: Numerics
) -> Array:
    """Make the token's window row, key and value in one: R(RMSNorm(wkv x)), not yet rounded.

    The cache format rounds it where it is stored.

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
    return rotate(row, table)


def project_output(
    o: Array,
    weights: AttentionWeights,
    config: ModelConfig,
    numerics: Numerics,
    placement: Placement = WHOLE,
) -> Array:
    """Project heads by groups: wo_b concat_g(wo_a[g] o_g).

    Args:
        o: [..., N, H], rotated back; of some whole groups if the heads are divided.
        weights: the layer's attention.
        config: the architecture.
        numerics: the static choice of arithmetic.
        placement: who holds which heads.

    Returns:
        [..., D].

    Source: spec/model.md section 5; wo_a takes unquantised input (section 2).
    """
    heads_per_group = config.num_attention_heads // config.o_groups
    groups = o.shape[-2] // heads_per_group
    grouped = o.reshape(*o.shape[:-2], groups, heads_per_group * config.head_dim)
    wo_a = weight_values(weights.wo_a, o.dtype).reshape(groups, config.o_lora_rank, grouped.shape[-1])
    low_rank = round_to(contract("...gi,goi->...go", grouped, wo_a), o.dtype)
    flat = low_rank.reshape(*o.shape[:-2], groups * config.o_lora_rank)
    partial_sum = linear_float32(quantize_input(flat, numerics), weights.wo_b)
    # 4 D bytes a row over the axes of heads, nothing where these are whole.
    axes = placement.layout.axes_of("heads")
    return round_to(sum_parts(partial_sum, axes, placement.num_rows), o.dtype)


def unrotate(o: Array, table: Rotation) -> Array:
    """Rotate attention outputs [..., N, H] back by their own position."""
    return rotate_heads(o, table, is_inverse=True)
