"""Named cases of index top-k: edges of visibility, ties and candidates, and the released sizes.

Separate because tests and benchmarks read the same table.
Read next: `../../cases.py`, what all tables share.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ....arrays import Array
from ...cases import RELEASED, Arguments, Draws, Span, one_token_each, span_geometry
from ...row_format import RowFormat
from .selection import CandidateRule


@dataclass(frozen=True, slots=True)
class IndexCase:
    """One call; the defaults are tiny.

    Args:
        name: unique in the table.
        spans: the rows.
        tags: what it is for.
        role: of the layer in the two-level selection.
        rows_per_block: adjacent rows that share a slot.
        key_format: how keys are packed.
        dtype: of the queries.
        heads: I.
        channels: of a key.
        slots: B.
        pages_per_slot: pages of a slot.
        num_pages: pages that exist; fewer than slots * pages_per_slot leaves holes in the table.
        entries: of a page.
        ratio: tokens of a group.
        top_k: places of the selection.
        block_size: groups of a candidate block.
        num_blocks: candidate blocks kept.
        sources: of the pages; the last one is read.
        is_tied: whether all scores are 0, so that only the tie rule decides.
    """

    name: str
    spans: tuple[Span, ...]
    tags: frozenset[str] = frozenset()
    role: str = ""
    rows_per_block: int = 1
    key_format: RowFormat = RowFormat.FP4_BLOCK
    dtype: str = "float32"
    heads: int = 4
    channels: int = 32
    slots: int = 3
    pages_per_slot: int = 3
    num_pages: int = 9
    entries: int = 4
    ratio: int = 1
    top_k: int = 3
    block_size: int = 2
    num_blocks: int = 3
    sources: int = 2
    is_tied: bool = False

    def arguments(self, key: Array) -> Arguments:
        """Draw the operands."""
        geometry, draws = span_geometry(self.spans, self.rows_per_block), Draws(key)
        num_rows = geometry.slots.shape[0]
        rule = CandidateRule(self.role, self.block_size, self.num_blocks)
        is_candidate = None
        if self.role == "restricted":
            blocks = rule.blocks(self.pages_per_slot * self.entries)
            is_candidate = draws.integers(0, 2, num_rows, blocks, dtype="bool")
        positional = (
            draws.rounded(self.key_format, self.channels, num_rows, self.heads, dtype=self.dtype),
            draws.normal(num_rows, self.heads, scale=0.0 if self.is_tied else 1.0),
            draws.packed(self.key_format, self.channels, self.sources, self.num_pages, self.entries),
            jnp.int32(self.sources - 1),
            draws.page_table(self.slots, self.pages_per_slot, self.num_pages),
            jnp.asarray((np.asarray(geometry.positions) + 1) // self.ratio),
            is_candidate,
            geometry,
        )
        keywords = {"top_k": self.top_k, "candidates": rule, "key_format": self.key_format}
        return Arguments(positional, keywords)


_CHUNK = (Span(1, 3, 6), Span(2, 0, 3, 3))
"""Rows that see few groups and rows that see many; the last ones are padding."""

CASES = (
    IndexCase("decode", one_token_each(3, 10)),
    IndexCase("chunk", _CHUNK),
    IndexCase("chunk_of_blocks", _CHUNK, rows_per_block=3),
    IndexCase("pairs", _CHUNK, ratio=2),
    IndexCase("bfloat16", _CHUNK, key_format=RowFormat.BFLOAT16, dtype="bfloat16"),
    IndexCase("candidate_source", _CHUNK, role="source"),
    IndexCase("restricted", _CHUNK, role="restricted", block_size=5),
    IndexCase("ties", _CHUNK, role="source", is_tied=True),
    IndexCase("missing_pages", _CHUNK, num_pages=4),
    IndexCase("more_places_than_groups", _CHUNK, top_k=15),
    IndexCase("pages_in_two_turns", (Span(0, 2, 3), Span(2, 40, 3)), pages_per_slot=11, num_pages=33),
    IndexCase("nothing_valid", (Span(0, 4, 0, 3),)),
    *(
        IndexCase(
            name, spans, frozenset({RELEASED}), role=role, rows_per_block=per_block, dtype="bfloat16",
            heads=32, channels=128, slots=slots, pages_per_slot=pages, num_pages=slots * pages, entries=128,
            top_k=512, block_size=8, num_blocks=2048, sources=1,
        )
        for name, role, slots, pages, per_block, spans in (
            ("released_decode_8", "source", 8, 128, 1, one_token_each(8, 16000)),
            ("released_decode_64", "restricted", 64, 128, 1, one_token_each(64, 16000)),
            ("released_verify_64", "", 64, 128, 6, tuple(Span(s, 16000 - s, 6) for s in range(64))),
            ("released_prefill_64", "source", 1, 1024, 64, (Span(0, 130000, 64),)),
        )
    ),
)  # fmt: skip
"""Names are unique."""
