"""The draft stages over many blocks at once, each block behind its own anchor of a training sequence.

Separate because training draws many blocks of one sequence, whose context is known, where generation
draws one block a slot and reads its context from the cache. All but the gathering of keys is the model's
own code; a test holds this forward to golden values.
Read next: `draft_losses.py`, `forward.py` (what the trunk gives), `draft_steps.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Array
from ..config import ModelConfig
from ..kernels import attend, collapse, initial_streams, rms_norm, round_rows
from ..model import attention
from ..model.draft_weights import DraftWeights, stage_config
from ..model.layer import attention_input, finish_layer
from ..model.linear import linear_float32, quantized_linear
from ..model.moe import TokenRoles
from ..model.numerics import Numerics
from ..model.rope import Rotation, rotation
from ..model.weights import LayerWeights
from .forward import segment_positions


class DraftContext(NamedTuple):
    """What the trunk left of packed sequences, and where blocks begin in them.

    Attributes:
        inputs: [B, T, targets * D], means of the streams that enter the target layers.
        segments: int32 [B, T], 0 for padding.
        anchors: int32 [B, A], the place of each block's first row; the block reads the places before it.
        tokens: int32 [B, A, K], the anchor token and those after it: what predicts the next one in turn.
    """

    inputs: Array
    segments: Array
    anchors: Array
    tokens: Array


class DraftResult(NamedTuple):
    """What the draft says of the token after each row of each block.

    Attributes:
        logits: float32 [B, A, K, V], the Markov head's part included.
        confidence: float32 [B, A, K], logits of the probability that the row's draft is accepted.
        router_ids: int32 [stages, B A K, experts of a token].
    """

    logits: Array
    confidence: Array
    router_ids: Array


class _Blocks(NamedTuple):
    """What all stages share: [n, ...] over the n = B A blocks, [n K, ...] over their rows."""

    main: Array  # [B, T, D]
    main_rotation: Rotation
    row_rotation: Rotation
    context_places: Array  # int32 [B, A, W]
    is_context: Array  # bool [n, W]


def draft_forward(
    draft: DraftWeights,
    embed: Array,
    head: Array,
    context: DraftContext,
    config: ModelConfig,
    numerics: Numerics,
) -> DraftResult:
    """Run all stages and both heads on the blocks of a batch.

    A block has the rows [x_a, noise, ...] at positions a, a + 1, ..; each of them sees the context rows at
    a - W .. a - 1 of its own sequence and all rows of its block. Row j predicts the token at a + j + 1.

    Args:
        draft: the stages' weights in the compute dtype.
        embed: [V, D], the trunk's.
        head: [V, D], the trunk's.
        context: sequences and blocks.
        config: the architecture (static).
        numerics: the choice of arithmetic (static).

    Returns:
        Logits and confidences of all rows.

    Source: spec/dspark.md sections 2, 3 and 6.2.
    """
    shape = context.tokens.shape
    block_ids = jnp.full(shape, config.draft.noise_token_id, jnp.int32).at[..., 0].set(context.tokens[..., 0])
    streams, pre_mix = initial_streams(
        embed[block_ids.reshape(-1)].astype(numerics.compute_dtype), config.hc_mult
    )
    blocks = _blocks(draft, context, config, numerics)
    run = partial(_stage, blocks=blocks, config=stage_config(config), numerics=numerics)
    (streams, pre_mix), router_ids = lax.scan(run, (streams, pre_mix), draft.stages)
    collapsed = collapse(streams, pre_mix)
    hidden = rms_norm(collapsed, draft.norm, config.rms_norm_eps)
    # Gathered in float32, so that the gradients of a token's many rows add up there.
    markov = draft.markov_embed.astype(jnp.float32)[context.tokens.reshape(-1)]
    markov = markov.astype(numerics.compute_dtype)
    logits = linear_float32(hidden, head) + linear_float32(markov, draft.markov_head)
    joined = jnp.concatenate([collapsed.astype(jnp.float32), markov.astype(jnp.float32)], axis=-1)
    confidence = linear_float32(joined, draft.confidence_proj.astype(jnp.float32))
    return DraftResult(logits.reshape(*shape, -1), confidence.reshape(shape), router_ids)


def take_places(values: Array, places: Array) -> Array:
    """Gather values [B, T, ...] at int32 [B, ...] places of each sequence; those outside are moved inside."""
    flat = jnp.clip(places, 0, values.shape[1] - 1).reshape(places.shape[0], -1)
    found = jax.vmap(lambda sequence, chosen: sequence[chosen])(values, flat)
    return found.reshape(*places.shape, *values.shape[2:])


def _blocks(draft: DraftWeights, context: DraftContext, config: ModelConfig, numerics: Numerics) -> _Blocks:
    """Project the trunk's inputs once for all stages, and find each block's positions and context."""
    main = rms_norm(
        quantized_linear(context.inputs, draft.main_proj, numerics), draft.main_norm, config.rms_norm_eps
    )
    window, block_size = config.sliding_window, context.tokens.shape[-1]
    positions = segment_positions(context.segments)
    lookback = window - jnp.arange(window, dtype=jnp.int32)
    places = context.anchors[..., None] - lookback[None, None, :]
    own = take_places(context.segments, context.anchors)[..., None]
    is_context = (places >= 0) & (take_places(context.segments, places) == own) & (own > 0)
    first = take_places(positions, context.anchors)[..., None]
    rows = (first + jnp.arange(block_size, dtype=jnp.int32)[None, None, :]).reshape(-1)
    return _Blocks(
        main=main,
        main_rotation=rotation(config, positions, is_compressed=False),
        row_rotation=rotation(config, rows, is_compressed=False),
        context_places=places,
        is_context=is_context.reshape(-1, window),
    )


def _stage(
    carry: tuple[Array, Array],
    weights: LayerWeights,
    *,
    blocks: _Blocks,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[tuple[Array, Array], Array]:
    """Run one stage: a window layer whose rows see their whole block and the context before it."""
    streams, pre_mix = carry
    x, site = attention_input(streams, pre_mix, weights, config, numerics)
    update = _attention(x, weights, blocks, config, numerics)
    # A stack of one, so that the gradient of the experts is this stage's own.
    experts: Any = jax.tree.map(lambda array: array[None], weights.ffn.experts)
    weights = weights.replace(ffn=weights.ffn.replace(experts=experts))
    rows = (x.shape[0],)
    tapped: dict[str, Array] = {}
    streams, pre_mix = finish_layer(
        *(streams, update, site, weights, 0),
        TokenRoles(is_image=jnp.zeros(rows, bool), is_valid=jnp.ones(rows, bool)),
        *(config, numerics, tapped.__setitem__),
    )
    return (streams, pre_mix), tapped["ffn.gate.ids"]


def _attention(
    x: Array, weights: LayerWeights, blocks: _Blocks, config: ModelConfig, numerics: Numerics
) -> Array:
    attn, window_format = weights.attn, numerics.row_formats.window
    table = blocks.row_rotation

    def key_rows(values: Array, table: Rotation) -> Array:
        rows = attention.window_key_value(values, table, attn, config, numerics)
        # A row is read by many blocks: in float32 their gradients add up without further rounding.
        return round_rows(rows, window_format).astype(jnp.float32)

    num_blocks, window = blocks.is_context.shape
    context = take_places(key_rows(blocks.main, blocks.main_rotation), blocks.context_places)
    own = key_rows(x, table).reshape(num_blocks, -1, config.head_dim)
    keys = jnp.concatenate([context.reshape(num_blocks, window, config.head_dim), own], axis=1)
    block_size = own.shape[1]
    is_visible = jnp.concatenate([blocks.is_context, jnp.ones((num_blocks, block_size), bool)], axis=1)
    # All rows of a block see the same keys: to the operation they are further heads of one row.
    q = attention.make_queries(x, table, attn, config, numerics).q
    o = attend(
        *(q.reshape(num_blocks, -1, config.head_dim), keys, is_visible),
        jnp.tile(attn.attn_sink, block_size),
    )
    return attention.project_output(attention.unrotate(o.reshape(q.shape), table), attn, config, numerics)
