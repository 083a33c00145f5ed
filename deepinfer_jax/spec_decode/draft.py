"""Drafts of the next tokens: three stages over a block of unknown positions, then one token after the other.

Separate from the backbone because these rows leave nothing behind: they read what the backbone left of
committed positions, and only the tokens that come of them are kept.
Read next: `heads.py` (what is read off a row), `../model/draft_rows.py` (what the stages read of the past),
`../speculate.py` (what becomes of drafts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..arithmetic import fenced, map_tiles, map_used_tiles, scan_counted
from ..arrays import NOTHING, Array
from ..config import ModelConfig
from ..kernels import attend, collapse, initial_streams, round_rows, unpack_rows
from ..model import attention
from ..model.cache import Cache
from ..model.draft_weights import stage_config, stage_words
from ..model.layer import attention_input, finish_layer
from ..model.moe import TokenRoles
from ..model.numerics import Numerics
from ..model.rope import rotation
from ..model.weights import Weights, take_layer
from ..sampling.sample import RowPlaces, Sampled, sample_rows
from ..sampling.state import SamplerState
from ..sharding.exchange import Placement, bring_rows, put_together
from ..sharding.layout import SINGLE, Layout
from .heads import base_logits, confidence_logits, markov_bias


class Anchors(NamedTuple):
    """Where drafts begin in B slots.

    Attributes:
        token_ids: int32 [B], latest sampled token, not yet in the cache.
        positions: int32 [B], its position, which is the number of tokens in the cache.
        is_active: bool [B]; nothing is drafted elsewhere.
    """

    token_ids: Array
    positions: Array
    is_active: Array


class Drafts(NamedTuple):
    """Drafts of B slots.

    Attributes:
        token_ids: int32 [B, K].
        confidences: float32 [B, K], logits, not calibrated.
        laws: float32 [B, K, V], distributions that the tokens were drawn from, if they were asked for.
    """

    token_ids: Array
    confidences: Array
    laws: Array | None


def draft_states(
    weights: Weights,
    config: ModelConfig,
    anchors: Anchors,
    cache: Cache,
    numerics: Numerics,
    layout: Layout = SINGLE,
    slots: Array | None = None,
) -> Array:
    """Run the stages on a block of each slot: the anchor, then positions whose tokens are not known.

    Every row of a block reads the same: the window before the anchor, and all rows of the block.

    Args:
        weights: the loaded weights, draft stages included.
        config: the architecture.
        anchors: where the blocks begin.
        cache: state of the slots.
        numerics: the choice of arithmetic (static).
        layout: as in `model.backbone.backbone` (static).
        slots: int32 [B], whose the anchors are; all in order by default.

    Returns:
        [B, K, D], collapsed streams; row k stands for the token k + 1 positions after the anchor.

    Source: spec/dspark.md sections 2.2, 2.3 and 3.
    """
    num_slots = anchors.token_ids.shape[0]

    def run(tile: tuple[Anchors, Array]) -> Array:
        return _run_stages(weights, config, *tile, cache, numerics, layout)

    tiles = (anchors, jnp.arange(num_slots, dtype=jnp.int32) if slots is None else slots)
    if not numerics.batch_invariant:
        return run(tiles)
    if layout != SINGLE:
        # Devices that meet in a tile must all run it, used or not.
        return map_tiles(run, tiles, numerics.slot_tile)
    return map_used_tiles(run, tiles, anchors.is_active, numerics.slot_tile)


def draft_tokens(
    states: Array,
    weights: Weights,
    config: ModelConfig,
    anchors: Anchors,
    sampler: SamplerState,
    is_forbidden: Array,
    numerics: Numerics,
    *,
    purpose: int,
    wants_laws: bool = False,
    layout: Layout = SINGLE,
) -> Drafts:
    """Choose a block's tokens in order, each biased by the one before, under the request's own controls.

    Args:
        states: [B, K, D], from `draft_states`.
        weights: the loaded weights.
        config: the architecture.
        anchors: where the blocks begin.
        sampler: state of the slots.
        is_forbidden: bool [V], tokens that no request may get.
        numerics: the choice of arithmetic (static).
        purpose: of the draws (static): with `SAMPLE_TOKEN` a draft shares the noise of the token that plain
            decoding would take there, with `DRAFT_TOKEN` it is independent.
        wants_laws: whether to give the distributions too (static).
        layout: as in `model.backbone.backbone` (static).

    Returns:
        The drafts.

    Source: spec/dspark.md sections 2.4 and 3.
    """
    num_slots, size = states.shape[:2]
    draft = weights.draft
    is_used = jnp.repeat(anchors.is_active, size)
    flat = states.reshape(num_slots * size, -1)
    base = base_logits(flat, is_used, weights, config, numerics, layout).reshape(num_slots, size, -1)

    def choose(carry: tuple[Array, Array], step: Array) -> tuple[tuple[Array, Array], Sampled]:
        previous, so_far = carry
        logits = lax.dynamic_index_in_dim(base, step, axis=1, keepdims=False)
        logits = logits + markov_bias(previous, draft, numerics)
        places = RowPlaces(
            slots=jnp.arange(num_slots, dtype=jnp.int32),
            new_ids=so_far,
            positions=anchors.positions + 1 + step,
            is_used=anchors.is_active,
        )
        sampled = sample_rows(
            *(logits, places, sampler, is_forbidden),
            num_logprobs=0,
            tile=numerics.sampled_together,
            purpose=purpose,
            wants_law=wants_laws,
        )
        so_far = lax.dynamic_update_index_in_dim(so_far, sampled.tokens, step, axis=1)
        return (sampled.tokens, so_far), sampled

    nothing = jnp.full((num_slots, size), NOTHING, jnp.int32)
    start = (anchors.token_ids, nothing)
    (_, token_ids), sampled = scan_counted(choose, start, size)
    previous = jnp.concatenate([anchors.token_ids[:, None], token_ids[:, :-1]], axis=1)
    laws = None if sampled.law is None else jnp.moveaxis(sampled.law, 0, 1)
    return Drafts(token_ids, confidence_logits(states, previous, draft, numerics), laws)


def _run_stages(
    weights: Weights,
    config: ModelConfig,
    anchors: Anchors,
    slots: Array,
    cache: Cache,
    numerics: Numerics,
    layout: Layout,
) -> Array:
    """Run all stages on the blocks of some slots: [S, K, D]."""
    size, num_slots = config.draft.block_size, slots.shape[0]
    placement = Placement(layout, num_slots * size)
    noise = jnp.full((num_slots, size - 1), config.draft.noise_token_id, jnp.int32)
    token_ids = jnp.concatenate([anchors.token_ids[:, None], noise], axis=1).reshape(-1)
    # 4 bytes a row to every holder of the vocabulary, D values back.
    table, ids = bring_rows(weights.embed, token_ids[:, None], "vocab", placement)
    embedded = fenced(table[ids[:, 0]].astype(numerics.compute_dtype))
    stage = _stage(weights, config, anchors, slots, cache, numerics, placement)
    carry = initial_streams(embedded, config.hc_mult)
    num_stages = config.draft.num_stages
    (streams, pre_mix), _ = scan_counted(lambda carry, index: (stage(carry, index), None), carry, num_stages)
    return collapse(streams, pre_mix).reshape(num_slots, size, -1)


def _stage(
    weights: Weights,
    config: ModelConfig,
    anchors: Anchors,
    slots: Array,
    cache: Cache,
    numerics: Numerics,
    placement: Placement,
) -> Callable[[tuple[Array, Array], Array], tuple[Array, Array]]:
    """Make the function that runs one stage on streams [S K, M, D] and mixes float32 [S K, M]."""
    size, num_slots = config.draft.block_size, slots.shape[0]
    own_config, words, window_format = stage_config(config), stage_words(config), numerics.row_formats.window
    offsets = jnp.arange(size, dtype=jnp.int32)[None, :]
    table = rotation(config, (anchors.positions[:, None] + offsets).reshape(-1), is_compressed=False)
    entries, is_there = _context_places(anchors, slots, cache, config)
    is_visible = jnp.concatenate([is_there, jnp.ones((num_slots, size), bool)], axis=1)
    is_active = jnp.repeat(anchors.is_active, size)
    roles = TokenRoles(is_image=jnp.zeros_like(is_active), is_valid=is_active)

    def run(carry: tuple[Array, Array], index: Array) -> tuple[Array, Array]:
        streams, pre_mix = carry
        layer: Any = put_together(take_layer(weights.draft.stages, index), words, placement.layout)
        x, site = attention_input(streams, pre_mix, layer, config, numerics)
        queries = attention.make_queries(x, table, layer.attn, config, numerics).q
        own = attention.window_key_value(x, table, layer.attn, config, numerics)
        own = round_rows(own, window_format).reshape(num_slots, size, -1)
        packed = cache.window[config.num_hidden_layers + index, slots[:, None], entries]
        keys = jnp.concatenate([unpack_rows(packed, window_format, x.dtype), own], axis=1)
        # All rows of a block see the same keys, so that they count as further heads.
        heads = queries.shape[1]
        folded = queries.reshape(num_slots, size * heads, -1)
        o = attend(folded, keys, is_visible, jnp.tile(layer.attn.attn_sink, size))
        o = attention.unrotate(o.reshape(queries.shape), table)
        update = attention.project_output(o, layer.attn, config, numerics, placement)
        return finish_layer(
            *(streams, update, site, layer, index, roles, own_config, numerics), placement=placement
        )

    return run


def _context_places(anchors: Anchors, slots: Array, cache: Cache, config: ModelConfig) -> tuple[Array, Array]:
    """Find the window before each anchor in the rings.

    Returns:
        int32 [S, window] entries, oldest first; bool [S, window] whether the row exists.
    """
    window, ring = config.sliding_window, cache.window.shape[2]
    positions = anchors.positions[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None, :]
    starts = jnp.maximum(cache.decoder_starts[slots], 0)
    return positions % ring, positions >= starts[:, None]
