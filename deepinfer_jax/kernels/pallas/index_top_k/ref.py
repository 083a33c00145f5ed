"""The meaning of index top-k in plain JAX: score page by page, mask, select.

Separate because it is what every kernel is compared with, and what runs where none exists.
Read next: `selection.py` (what is selected), `api.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ....arithmetic import contract
from ....arrays import MASKED_SCORE, Array
from ...geometry import RowGeometry
from ...row_format import RowFormat
from ..quantize_rows.ref import unpack_rows
from .selection import CandidateRule, candidate_blocks, mask_invisible, restrict_to_candidates, select

PAGES_AT_ONCE = 8
"""Pages that one turn of the loop scores: what bounds the unpacked keys and the products."""


class IndexResult(NamedTuple):
    """What a row attends to, and the scores if they were asked for.

    Attributes:
        selection: int32 [R, top_k] groups, NOTHING in unused places; the order has no meaning.
        is_candidate: bool [R, blocks], new from a "source", otherwise what was given.
        scores: float32 [R, G], not masked, 0 where nothing was computed.
        masked_scores: float32 [R, G], MASKED_SCORE at what cannot be selected.
    """

    selection: Array
    is_candidate: Array | None
    scores: Array | None
    masked_scores: Array | None


def index_top_k(
    queries: Array,
    head_weights: Array,
    key_pages: Array,
    source: Array,
    page_table: Array,
    num_visible: Array,
    is_candidate: Array | None,
    geometry: RowGeometry,
    *,
    top_k: int,
    candidates: CandidateRule,
    key_format: RowFormat,
    want_scores: bool,
) -> IndexResult:
    """Score and select as `api.index_top_k` says; same arguments, already checked."""
    num_pages, entries = key_pages.shape[1:3]
    pages = page_table[jnp.clip(geometry.slots, 0, page_table.shape[0] - 1)]
    is_page = (pages >= 0) & (pages < num_pages)
    num_visible = jnp.where(geometry.is_valid, jnp.minimum(num_visible, pages.shape[1] * entries), 0)
    pages = jnp.where(is_page, pages, -1)
    scores = score_pages(
        queries, head_weights, key_pages, source, pages, num_visible, geometry.rows_per_block, key_format
    )
    masked = jnp.where(jnp.repeat(is_page, entries, axis=1), scores, MASKED_SCORE)
    masked = mask_invisible(masked, num_visible)
    if candidates.role == "source":
        is_candidate = candidate_blocks(masked, num_visible, candidates)
    elif candidates.role == "restricted" and is_candidate is not None:
        masked = restrict_to_candidates(masked, is_candidate, candidates)
    selection = select(masked, top_k)
    if not want_scores:
        return IndexResult(selection, is_candidate, None, None)
    return IndexResult(selection, is_candidate, scores, masked)


def score_pages(
    queries: Array,
    head_weights: Array,
    key_pages: Array,
    source: Array,
    pages: Array,
    num_visible: Array,
    rows_per_block: int,
    key_format: RowFormat,
) -> Array:
    """Score the groups of each row's pages, up to the longest row.

    Args:
        queries: [R, I, index_head_dim].
        head_weights: float32 [R, I].
        key_pages: [S, P, entries, width], packed.
        source: int32 scalar.
        pages: int32 [R, pages_per_slot], negative where there is none.
        num_visible: int32 [R]; pages beyond the largest are not read.
        rows_per_block: adjacent rows that share their pages.
        key_format: how keys are packed.

    Returns:
        float32 [R, pages_per_slot * entries], 0 where nothing was computed.
    """
    num_rows, pages_per_slot = pages.shape
    entries = key_pages.shape[2]
    at_once = min(PAGES_AT_ONCE, pages_per_slot)
    block_pages = pages[::rows_per_block]

    def paired(values: Array) -> Array:
        """Repeat [R, ...] for every page: [R * at_once, 1, ...]."""
        return jnp.repeat(values, at_once, axis=0)[:, None]

    def score(turn: Array, scores: Array) -> Array:
        # The last turn starts early rather than late: it may repeat pages, with equal results.
        first = jnp.minimum(turn * at_once, pages_per_slot - at_once)
        page = lax.dynamic_slice_in_dim(block_pages, first, at_once, axis=1)
        packed = key_pages[source, jnp.maximum(page, 0)]
        keys = unpack_rows(packed, key_format, queries.dtype)
        keys = jnp.where((page >= 0)[:, :, None, None], keys, 0)
        # Every row and page is a product of its own, so that no sum depends on how many there are.
        keys = jnp.repeat(keys, rows_per_block, axis=0).reshape(num_rows * at_once, entries, -1)
        found = index_scores(paired(queries), paired(head_weights), keys)
        return lax.dynamic_update_slice_in_dim(
            scores, found.reshape(num_rows, at_once * entries), first * entries, axis=1
        )

    num_pages = -(-jnp.max(num_visible, initial=0) // entries)
    turns = -(-num_pages // at_once)
    return lax.fori_loop(0, turns, score, jnp.zeros((num_rows, pages_per_slot * entries), jnp.float32))


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
