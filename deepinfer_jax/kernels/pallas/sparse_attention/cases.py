"""Named cases of sparse attention: edges of visibility and of the tables, and the released sizes.

Separate because tests and benchmarks read the same table.
Read next: `../../cases.py`, what all tables share.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ....arrays import NOTHING, Array
from ...cases import RELEASED, Arguments, Draws, Span, one_token_each, span_geometry
from ...row_format import CACHE_FORMATS


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call; the defaults are tiny.

    Args:
        name: unique in the table.
        spans: the rows.
        tags: what it is for.
        cache_format: key of `CACHE_FORMATS`.
        dtype: of q.
        heads: N.
        channels: H.
        window: look-backs.
        ring: rows of a ring.
        slots: B.
        pages_per_slot: pages of a slot.
        num_pages: pages that exist; fewer than slots * pages_per_slot leaves holes in the table.
        entries: of a page.
        top_k: places of the selection, 0 for the window only.
        sources: layers of the rings and sources of the pages; the last one is read.
        window_start: first position whose window row exists.
    """

    name: str
    spans: tuple[Span, ...]
    tags: frozenset[str] = frozenset()
    cache_format: str = "fp4"
    dtype: str = "float32"
    heads: int = 3
    channels: int = 64
    window: int = 4
    ring: int = 6
    slots: int = 3
    pages_per_slot: int = 2
    num_pages: int = 7
    entries: int = 4
    top_k: int = 5
    sources: int = 2
    window_start: int = 0

    def arguments(self, key: Array) -> Arguments:
        """Draw the operands; a selection has unused places and indices that point nowhere."""
        geometry, draws = span_geometry(self.spans), Draws(key)
        num_rows, cache_format = geometry.slots.shape[0], CACHE_FORMATS[self.cache_format]
        pages, selection = None, None
        if self.top_k:
            stack = (self.sources, self.num_pages, self.entries)
            pages = draws.packed(cache_format.entry, self.channels, *stack)
            selection = _draw_selection(draws, num_rows, self.pages_per_slot * self.entries, self.top_k)
        positional = (
            draws.normal(num_rows, self.heads, self.channels, dtype=self.dtype),
            draws.packed(cache_format.window, self.channels, self.sources, self.slots, self.ring),
            jnp.int32(self.sources - 1),
            draws.packed(cache_format.window, self.channels, num_rows),
            pages,
            jnp.int32(self.sources - 1),
            draws.page_table(self.slots, self.pages_per_slot, self.num_pages),
            selection,
            draws.normal(self.heads),
            geometry,
            jnp.asarray(np.full(num_rows, self.window_start, np.int32)),
        )
        return Arguments(positional, {"window": self.window, "cache_format": cache_format})


def _draw_selection(draws: Draws, num_rows: int, groups: int, top_k: int) -> Array:
    """Draw different groups for each row, one in eight of them unused or outside the slot."""
    selection = draws.choices(num_rows, groups, top_k)
    nowhere = draws.random.choice(np.array([NOTHING, -2, groups, 2**31 - 1], np.int32), selection.shape)
    return jnp.asarray(np.where(draws.random.random(selection.shape) < 1 / 8, nowhere, selection))


_CHUNK = (Span(1, 5, 9, 1), Span(2, 0, 3, 2))
"""A chunk longer than the window over what the ring holds, and the first tokens of a sequence."""

CASES = (
    AttentionCase("decode", one_token_each(3, 9)),
    AttentionCase("chunk", _CHUNK),
    AttentionCase("chunk_bfloat16", _CHUNK, cache_format="bf16", dtype="bfloat16"),
    AttentionCase("chunk_fp8", _CHUNK, cache_format="fp8"),
    AttentionCase("chunk_float32", _CHUNK, cache_format="float32"),
    AttentionCase("window_only", _CHUNK, top_k=0),
    AttentionCase("window_cut_at_replay_start", _CHUNK, window_start=4),
    AttentionCase("missing_pages", _CHUNK, num_pages=3),
    AttentionCase("more_places_than_groups", _CHUNK, top_k=11),
    AttentionCase("nothing_valid", (Span(0, 0, 0, 5),)),
    *(
        AttentionCase(
            name, spans, frozenset({RELEASED}), dtype="bfloat16", heads=64, channels=512, window=128,
            ring=134, slots=slots, pages_per_slot=128, num_pages=slots * 128, entries=128, top_k=512,
            sources=1,
        )
        for name, slots, spans in (
            ("released_decode_8", 8, one_token_each(8, 16000)),
            ("released_decode_64", 64, one_token_each(64, 16000)),
            ("released_verify_64", 64, tuple(Span(slot, 16000 - slot, 6) for slot in range(64))),
            ("released_prefill_256", 1, (Span(0, 15000, 256),)),
        )
    ),
)  # fmt: skip
"""Names are unique."""
