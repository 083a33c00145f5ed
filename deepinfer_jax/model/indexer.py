"""Indexer: which compressed entries a token attends to, in two levels.

Separate because selection is integers and masks: it is compared as sets and has no gradient.
Read next: `attention.py`, which attends to what is selected.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ..arrays import MASKED_SCORE, NOTHING, Array
from ..config import ModelConfig
from ..kernels import quantize_dequantize_fp4_block
from .linear import contract, linear_float32, quantized_linear
from .numerics import Numerics
from .rope import Rotation, rotate_heads
from .weights import IndexerWeights


def index_queries(
    qr: Array, table: Rotation, weights: IndexerWeights, config: ModelConfig, numerics: Numerics
) -> Array:
    """Make index queries from the attention's low-rank query: Q4i(R(wq_b qr)).

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
    return quantize_dequantize_fp4_block(queries) if numerics.quantizes_cache else queries


def head_weights(x: Array, weights: IndexerWeights, config: ModelConfig) -> Array:
    """Weigh the index heads: weights_proj x / sqrt(index_head_dim I), float32 [..., I]."""
    scale = (config.index_head_dim * config.index_n_heads) ** -0.5
    return linear_float32(x, weights.weights_proj) * jnp.float32(scale)


def index_scores(queries: Array, heads: Array, keys: Array) -> Array:
    """Score entries: sum_i a_i max(0, q_i . k_g), all in float32.

    Args:
        queries: [S, Q, I, index_head_dim], Q rows that share the keys.
        heads: float32 [S, Q, I], head weights a.
        keys: [S, G, index_head_dim].

    Returns:
        float32 [S, Q, G]; may be negative, not masked.

    Source: spec/model.md section 7 and doubt 2 (float32 throughout).
    """
    products = jnp.maximum(contract("sqih,sgh->sqig", queries, keys), 0.0)
    return contract("sqi,sqig->sqg", heads, products)


def mask_invisible(scores: Array, num_visible: Array) -> Array:
    """Mask groups that are not complete for a query.

    Args:
        scores: float32 [R, G].
        num_visible: int32 [R].

    Returns:
        float32 [R, G] with MASKED_SCORE where g >= num_visible.
    """
    groups = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, :]
    return jnp.where(groups < num_visible[:, None], scores, MASKED_SCORE)


def candidate_blocks(scores: Array, num_visible: Array, config: ModelConfig) -> Array:
    """Choose candidate blocks: the best by their best group, the newest visible one always.

    Args:
        scores: float32 [R, G], masked.
        num_visible: int32 [R].
        config: the architecture.

    Returns:
        bool [R, blocks].

    Source: spec/model.md section 8.
    """
    size = config.candidate_block_size
    num_rows, groups = scores.shape
    blocks = -(-groups // size)
    padded = jnp.pad(scores, ((0, 0), (0, blocks * size - groups)), constant_values=MASKED_SCORE)
    best = jnp.max(padded.reshape(num_rows, blocks, size), axis=-1)
    block_ids = jnp.arange(blocks, dtype=jnp.int32)[None, :]
    newest = (num_visible[:, None] - 1) // size
    is_newest = (block_ids == newest) & (num_visible[:, None] > 0)
    best = jnp.where(is_newest, jnp.inf, best)
    values, ids = lax.top_k(best, min(config.candidate_topk_blocks, blocks))
    own = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    return jnp.zeros((num_rows, blocks), bool).at[own, ids].set(values > MASKED_SCORE)


def restrict_to_candidates(scores: Array, is_candidate: Array, config: ModelConfig) -> Array:
    """Mask the groups outside the candidate blocks: [R, G] scores, [R, blocks] bool."""
    is_inside = jnp.repeat(is_candidate, config.candidate_block_size, axis=1)[:, : scores.shape[1]]
    return jnp.where(is_inside, scores, MASKED_SCORE)


def select(scores: Array, config: ModelConfig) -> Array:
    """Select the best entries, ties to the lower index.

    Args:
        scores: float32 [R, G], masked.
        config: the architecture.

    Returns:
        int32 [R, index_topk], NOTHING in unused places; the order has no meaning.

    Source: spec/model.md section 7.
    """
    count = min(config.index_topk, scores.shape[-1])
    values, ids = lax.top_k(lax.stop_gradient(scores), count)
    ids = jnp.where(values > MASKED_SCORE, ids.astype(jnp.int32), NOTHING)
    return jnp.pad(ids, ((0, 0), (0, config.index_topk - count)), constant_values=NOTHING)
