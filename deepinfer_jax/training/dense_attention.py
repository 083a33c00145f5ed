"""Attention over whole sequences under masks: a block-local window and all compressed entries.

Separate because it replaces the gathers of `model/attention.py` by masked matrix products, which a
backward pass likes better.
Read next: `forward.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ..arithmetic import contract, round_to
from ..arrays import MASKED_SCORE, Array
from ..config import ModelConfig


def candidate_groups(masked: Array, is_visible: Array, config: ModelConfig) -> Array:
    """Choose candidate blocks as `model/indexer.py` does and mark their groups.

    Args:
        masked: float32 [B, T, G] scores, masked.
        is_visible: bool [B, T, G].
        config: the architecture.

    Returns:
        bool [B, T, G].
    """
    size = config.candidate_block_size
    blocked = masked.reshape(*masked.shape[:-1], -1, size)
    best = jnp.max(blocked, axis=-1)
    has_visible = jnp.any(is_visible.reshape(blocked.shape), axis=-1)
    blocks = jnp.arange(best.shape[-1], dtype=jnp.int32)[None, None, :]
    newest = jnp.max(jnp.where(has_visible, blocks, -1), axis=-1, keepdims=True)
    best = jnp.where(blocks == newest, jnp.inf, best)
    is_kept = is_among_best(best, config.candidate_topk_blocks) & has_visible
    return jnp.repeat(is_kept, size, axis=-1)


def is_among_best(values: Array, count: int) -> Array:
    """Mark the `count` best entries of the last axis, ties to the lower index.

    Args:
        values: float32 [..., entries].
        count: how many.

    Returns:
        bool [..., entries].
    """
    if count >= values.shape[-1]:
        return jnp.ones(values.shape, bool)
    # By index and not by threshold: scores of exactly 0 tie often (all ReLUs are 0).
    ids = lax.top_k(values, count)[1]
    rows = jnp.arange(values.size // values.shape[-1], dtype=jnp.int32)[:, None]
    is_best = jnp.zeros((rows.shape[0], values.shape[-1]), bool)
    return is_best.at[rows, ids.reshape(rows.shape[0], count)].set(True).reshape(values.shape)


def attend_sequences(
    q: Array,
    window_rows: Array,
    entries: Array | None,
    is_selected: Array | None,
    attn_sink: Array,
    segments: Array,
    config: ModelConfig,
) -> tuple[Array, Array]:
    """Attend to a block-local window and all compressed entries under a mask.

    Args:
        q: [B, T, N, H].
        window_rows: [B, T, H].
        entries: [B, G, H] compressed KV, or None for window-only layers.
        is_selected: bool [B, T, G], entries attended to.
        attn_sink: float32 [N].
        segments: int32 [B, T].
        config: the architecture.

    Returns:
        [B, T, N, H] outputs, float32 [B, T, G] mean attention over heads on the entries.
    """
    batch, length, heads, _ = q.shape
    window = config.sliding_window
    scale = jnp.float32(config.head_dim**-0.5)
    local_keys, is_local = _local_window(window_rows, segments, window)
    blocked_q = q.reshape(batch, length // window, window, heads, -1)
    local = contract("bcqnh,bckh->bcqnk", blocked_q, local_keys) * scale
    local = jnp.where(is_local[:, :, :, None, :], local, MASKED_SCORE)
    scores = local.reshape(batch, length, heads, 2 * window)
    if entries is not None and is_selected is not None:
        distant = contract("btnh,bgh->btng", q, entries) * scale
        distant = jnp.where(is_selected[:, :, None, :], distant, MASKED_SCORE)
        scores = jnp.concatenate([scores, distant], axis=-1)
    sink = attn_sink.reshape(1, 1, heads, 1)
    highest = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - highest)
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - highest))
    rounded = round_to(weights, q.dtype)
    near = rounded[..., : 2 * window].reshape(local.shape)
    o = contract("bcqnk,bckh->bcqnh", near, local_keys).reshape(q.shape)
    if entries is not None:
        o = o + contract("btng,bgh->btnh", rounded[..., 2 * window :], entries)
    shares = jnp.mean(lax.stop_gradient(weights[..., 2 * window :]), axis=2)
    return round_to(o, q.dtype), shares


def _local_window(window_rows: Array, segments: Array, window: int) -> tuple[Array, Array]:
    """Give each block of W queries the 2 W keys of its own and the previous block, and the mask."""
    batch, length, width = window_rows.shape
    blocks = length // window
    keys = window_rows.reshape(batch, blocks, window, width)
    previous = jnp.pad(keys, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    marks = segments.reshape(batch, blocks, window)
    previous_marks = jnp.pad(marks, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    both_marks = jnp.concatenate([previous_marks, marks], axis=2)
    distance = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)[None, :]
    is_near = (distance >= 0) & (distance < window)
    is_same = (marks[:, :, :, None] == both_marks[:, :, None, :]) & (marks[:, :, :, None] > 0)
    return jnp.concatenate([previous, keys], axis=2), is_near[None, None] & is_same


def index_divergence(scores: Array, shares: Array, is_selected: Array | None) -> Array:
    """Measure how far index scores are from the attention: KL(share || softmax(scores)).

    Args:
        scores: float32 [B, T, G].
        shares: float32 [B, T, G], mean attention over heads, no gradient.
        is_selected: bool [B, T, G], entries that take part.

    Returns:
        Scalar float32, mean over the queries that have any entry.
    """
    assert is_selected is not None
    total = jnp.sum(shares, axis=-1, keepdims=True)
    target = shares / jnp.maximum(total, 1e-9)
    logits = jnp.where(is_selected, scores, -1e9)
    log_predicted = jax.nn.log_softmax(logits, axis=-1)
    terms = jnp.where(target > 0, target * (jnp.log(jnp.maximum(target, 1e-20)) - log_predicted), 0.0)
    has_any = jnp.any(is_selected, axis=-1)
    per_query = jnp.where(has_any, jnp.sum(terms, axis=-1), 0.0)
    return jnp.sum(per_query) / jnp.maximum(jnp.sum(has_any.astype(jnp.float32)), 1.0)
