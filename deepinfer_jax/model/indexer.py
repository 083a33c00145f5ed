"""Indexer: the queries and head weights that choose which compressed entries a token attends to.

Separate because only index sources have one; scoring and selection are the kernel's business.
Read next: `../kernels/pallas/index_top_k/ref.py`, `step_layer.py`.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..arrays import Array
from ..config import ModelConfig
from ..kernels import CandidateRule, round_rows
from .linear import linear_float32, quantized_linear
from .numerics import Numerics
from .rope import Rotation, rotate_heads
from .schedule import LayerKind
from .weights import IndexerWeights


def index_queries(
    qr: Array, table: Rotation, weights: IndexerWeights, config: ModelConfig, numerics: Numerics
) -> Array:
    """Make index queries from the attention's low-rank query: R(wq_b qr), rounded as index keys are.

    Args:
        qr: [..., q_rank].
        table: rotation at the tokens' positions.
        weights: the index source's weights.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        [..., I, index_head_dim].

    Source: spec/model.md section 7.
    """
    flat = quantized_linear(qr, weights.wq_b, numerics)
    queries = flat.reshape(*qr.shape[:-1], config.index_n_heads, config.index_head_dim)
    queries = rotate_heads(queries, table)
    return round_rows(queries, numerics.row_formats.index_key, implementation=numerics.implementation)


def head_weights(x: Array, weights: IndexerWeights, config: ModelConfig) -> Array:
    """Weigh the index heads: weights_proj x / sqrt(index_head_dim I), float32 [..., I]."""
    scale = (config.index_head_dim * config.index_n_heads) ** -0.5
    return linear_float32(x, weights.weights_proj) * jnp.float32(scale)


def candidate_rule(kind: LayerKind, config: ModelConfig) -> CandidateRule:
    """Say what a layer does with candidate blocks: nothing, choose them or stay inside them.

    Source: spec/model.md section 8.
    """
    return CandidateRule(kind.candidates, config.candidate_block_size, config.candidate_topk_blocks)
