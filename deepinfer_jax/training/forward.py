"""The backbone over whole training sequences: dense masks instead of a cache.

Separate because training reads every position of many short sequences at once, where masked matrix
products beat gathers and need no scatter in the backward pass. Everything but the key gathering is
the model's own code; a test holds this forward to `model/backbone.py`.
Read next: `dense_attention.py`, `losses.py`, `lm.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from ..arrays import MASKED_SCORE, NOTHING, Array
from ..config import ModelConfig
from ..kernels import collapse, index_scores, initial_streams, rms_norm, round_rows
from ..model import attention, compressor, indexer
from ..model.compressor import Projection
from ..model.draft_rows import read_draft_input
from ..model.engram import engram, hash_rows
from ..model.layer import attention_input, finish_layer
from ..model.moe import TokenRoles
from ..model.numerics import Numerics
from ..model.rope import Rotation, rotation
from ..model.schedule import LayerKind, layer_kind, layers_by_kind
from ..model.weights import LayerWeights, Weights, take_layer
from .dense_attention import attend_sequences, candidate_groups, index_divergence, is_among_best


class Batch(struct.PyTreeNode):
    """Packed sequences.

    Attributes:
        tokens: int32 [B, T].
        segments: int32 [B, T], 0 for padding, 1.. for the segment; segments do not see each other
            and start at even offsets.
        loss_weights: float32 [B, T], weight of predicting the token at that place.
    """

    tokens: Array
    segments: Array
    loss_weights: Array


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """Static choices of a training phase.

    Args:
        numerics: arithmetic of the forward pass.
        is_sparse: whether only selected entries are attended to, or everything visible.
    """

    numerics: Numerics
    is_sparse: bool


class ForwardResult(NamedTuple):
    """Hidden states, index divergence (scalar), expert scores and ids by layer, and what a draft reads."""

    hidden: Array  # [B, T, D]
    index_divergence: Array
    router_scores: Array  # float32 [L, B T, E]
    router_ids: Array  # int32 [L, B T, K]
    draft_inputs: tuple[Array, ...]  # of each target layer [B, T, D]


class SequenceContext(NamedTuple):
    """What all layers of a batch share; [B, T] geometry."""

    segments: Array
    plain: Rotation
    scaled: Rotation
    group_starts: dict[int, Rotation]
    is_visible: dict[int, Array]  # ratio -> bool [B, T, G]


class SequenceCarry(struct.PyTreeNode):
    """What crosses layers: streams and `pre`, compressed KV and the set attended to (bool [B, T, G])."""

    streams: Array
    pre_mix: Array
    compressed: Any  # [B, G, H], None before the first KV source, as the following ones
    index_keys: Any  # [B, G, index_head_dim]
    is_selected: Any  # bool [B, T, G]
    is_candidate: Any  # bool [B, T, G]


def forward(weights: Weights, batch: Batch, config: ModelConfig, mode: TrainingMode) -> ForwardResult:
    """Run the backbone on whole sequences.

    Args:
        weights: the weights in the compute dtype.
        batch: packed sequences, T a multiple of the window and of the candidate block size.
        config: the architecture.
        mode: static choices.

    Returns:
        Hidden states after the final norm and what the auxiliary losses need.
    """
    num_sequences, length = batch.tokens.shape
    context = _context(batch, config)
    table_rows = _table_rows(weights, batch, config)
    embedded = weights.embed[batch.tokens.reshape(-1)].astype(mode.numerics.compute_dtype)
    streams, pre_mix = initial_streams(embedded, config.hc_mult)
    carry = SequenceCarry(streams, pre_mix, None, None, None, None)
    is_image = jnp.zeros((embedded.shape[0],), bool)
    divergences, scores, ids, draft_inputs = [], [], [], []
    members = layers_by_kind(config)
    for layer in range(config.num_hidden_layers):
        if layer in config.engram_layer_ids:
            place = config.engram_layer_ids.index(layer)
            arguments = (carry.streams, table_rows[:, place], weights.engram[place], is_image)
            carry = carry.replace(streams=engram(*arguments, config, mode.numerics))
        if layer in config.draft.target_layer_ids:
            draft_inputs.append(read_draft_input(carry.streams, mode.numerics))
        kind = layer_kind(config, layer)
        layer_weights = _single_layer(weights.layers[kind.name], members[kind].index(layer))
        run = jax.checkpoint(partial(_layer, kind=kind, config=config, mode=mode))
        carry, divergence, layer_scores, layer_ids = run(carry, layer_weights, context)
        divergences.append(divergence)
        scores.append(layer_scores)
        ids.append(layer_ids)
    collapsed = collapse(carry.streams, carry.pre_mix)
    hidden = rms_norm(collapsed, weights.norm, config.rms_norm_eps)
    shape = (num_sequences, length, config.hidden_size)
    return ForwardResult(
        hidden=hidden.reshape(shape),
        index_divergence=jnp.sum(jnp.stack(divergences)),
        router_scores=jnp.stack(scores),
        router_ids=jnp.stack(ids),
        draft_inputs=tuple(inputs.reshape(shape) for inputs in draft_inputs),
    )


def _single_layer(stack: LayerWeights, place: int) -> LayerWeights:
    """Take one layer, its experts as a stack of one, so that their gradient is a layer's own."""
    layer = take_layer(stack, place)
    experts = jax.tree.map(lambda array: array[place][None], layer.ffn.experts)
    return layer.replace(ffn=layer.ffn.replace(experts=experts))


def _context(batch: Batch, config: ModelConfig) -> SequenceContext:
    segments = batch.segments
    positions = segment_positions(segments)
    is_visible, group_starts = {}, {}
    steps = jnp.arange(segments.shape[1], dtype=jnp.int32)
    for ratio in (1, 2):
        groups = jnp.arange(segments.shape[1] // ratio, dtype=jnp.int32)
        is_complete = (groups[None, :] + 1) * ratio <= steps[:, None] + 1
        last_token = segments[:, ratio - 1 :: ratio]
        is_same = (segments[:, :, None] == last_token[:, None, :]) & (last_token[:, None, :] > 0)
        is_visible[ratio] = is_complete[None] & is_same
        group_starts[ratio] = rotation(config, positions[:, ::ratio], is_compressed=True)
    return SequenceContext(
        segments=segments,
        plain=rotation(config, positions, is_compressed=False),
        scaled=rotation(config, positions, is_compressed=True),
        group_starts=group_starts,
        is_visible=is_visible,
    )


def segment_positions(segments: Array) -> Array:
    """Count positions from 0 within each segment: int32 [B, T]."""
    steps = jnp.arange(segments.shape[1], dtype=jnp.int32)[None, :]
    is_start = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    starts = lax.cummax(jnp.where(is_start, steps, 0), axis=1)
    return steps - starts


def _table_rows(weights: Weights, batch: Batch, config: ModelConfig) -> Array:
    compressed_ids = weights.token_map[batch.tokens]
    history = []
    for back in range(config.engram_max_ngram_size):
        shifted = jnp.pad(compressed_ids, ((0, 0), (back, 0)))[:, : batch.tokens.shape[1]]
        segment = jnp.pad(batch.segments, ((0, 0), (back, 0)))[:, : batch.tokens.shape[1]]
        history.append(jnp.where(segment == batch.segments, shifted, NOTHING))
    flat = jnp.stack(history, axis=-1).reshape(-1, config.engram_max_ngram_size)
    return hash_rows(flat, config, weights.token_map[config.engram_pad_token_id])


def _layer(
    carry: SequenceCarry,
    weights: LayerWeights,
    context: SequenceContext,
    *,
    kind: LayerKind,
    config: ModelConfig,
    mode: TrainingMode,
) -> tuple[SequenceCarry, Array, Array, Array]:
    x, site = attention_input(carry.streams, carry.pre_mix, weights, config, mode.numerics)
    sequences = x.reshape(*context.segments.shape, config.hidden_size)
    carry, update, divergence = _attention(carry, sequences, weights, context, kind, config, mode)
    tapped: dict[str, Array] = {}
    streams, pre_mix = finish_layer(
        *(carry.streams, update.reshape(x.shape), site, weights, 0),
        TokenRoles(is_image=jnp.zeros((x.shape[0],), bool), is_valid=jnp.ones((x.shape[0],), bool)),
        *(config, mode.numerics, tapped.__setitem__),
    )
    carry = carry.replace(streams=streams, pre_mix=pre_mix)
    return carry, divergence, tapped["ffn.gate.scores"], tapped["ffn.gate.ids"]


def _attention(
    carry: SequenceCarry,
    x: Array,
    weights: LayerWeights,
    context: SequenceContext,
    kind: LayerKind,
    config: ModelConfig,
    mode: TrainingMode,
) -> tuple[SequenceCarry, Array, Array]:
    numerics, attn = mode.numerics, weights.attn
    table = context.plain if kind.role == "window" else context.scaled
    queries = attention.make_queries(x, table, attn, config, numerics)
    window_rows = attention.window_key_value(x, table, attn, config, numerics)
    window_rows = round_rows(window_rows, numerics.row_formats.window)
    if kind.is_kv_source:
        kv, keys = _compress(x, weights, context.group_starts[kind.ratio], config, numerics)
        carry = carry.replace(compressed=kv, index_keys=keys)
    scores = None
    if kind.is_index_source:
        scores = _index_scores(x, queries.qr, carry.index_keys, weights, context.scaled, config, numerics)
        carry = _select(carry, scores, context.is_visible[kind.ratio], kind, config, mode)
    o, shares = attend_sequences(
        queries.q, window_rows, carry.compressed if kind.ratio else None, carry.is_selected, attn.attn_sink,
        context.segments, config,
    )  # fmt: skip
    divergence = jnp.float32(0)
    if scores is not None:
        divergence = index_divergence(scores, shares, carry.is_selected)
    o = attention.unrotate(o, table)
    return carry, attention.project_output(o, attn, config, numerics), divergence


def _compress(
    x: Array, weights: LayerWeights, starts: Rotation, config: ModelConfig, numerics: Numerics
) -> tuple[Array, Array]:
    attn = weights.attn
    projection = compressor.project(x, attn.compressor)
    pooled = projection.kv
    if projection.score is not None:
        older = Projection(projection.kv[:, 0::2], projection.score[:, 0::2])
        newer = Projection(projection.kv[:, 1::2], projection.score[:, 1::2])
        pooled = compressor.pool_pair(older, newer)
    entry = compressor.make_entry(pooled, starts, attn.compressor, attn.indexer, config, numerics)
    # Index keys learn from the divergence alone; their latent is not to be bent by it.
    latent = lax.stop_gradient(entry.latent)
    key = compressor.index_key(latent, starts, attn.indexer, config)
    formats = numerics.row_formats
    return round_rows(entry.kv, formats.entry), round_rows(key, formats.index_key)


def _index_scores(
    x: Array,
    qr: Array,
    keys: Array | None,
    weights: LayerWeights,
    table: Rotation,
    config: ModelConfig,
    numerics: Numerics,
) -> Array:
    assert keys is not None
    inputs = lax.stop_gradient((qr, x))
    queries = indexer.index_queries(inputs[0], table, weights.attn.indexer, config, numerics)
    heads = indexer.head_weights(inputs[1], weights.attn.indexer, config)
    return index_scores(queries, heads, keys)


def _select(
    carry: SequenceCarry,
    scores: Array,
    is_visible: Array,
    kind: LayerKind,
    config: ModelConfig,
    mode: TrainingMode,
) -> SequenceCarry:
    """Choose the entries attended to, as masks, by the rules of `model/indexer.py`."""
    if not mode.is_sparse:
        return carry.replace(is_selected=is_visible)
    masked = jnp.where(is_visible, lax.stop_gradient(scores), MASKED_SCORE)
    is_candidate = carry.is_candidate
    if kind.candidates == "source":
        is_candidate = candidate_groups(masked, is_visible, config)
    elif kind.candidates == "restricted":
        masked = jnp.where(is_candidate, masked, MASKED_SCORE)
    is_selected = is_among_best(masked, config.index_topk) & (masked > MASKED_SCORE)
    return carry.replace(is_selected=is_selected, is_candidate=is_candidate)
