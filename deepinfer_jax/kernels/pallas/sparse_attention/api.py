"""Sparse attention as the model calls it.

Separate from the implementations so that operands are checked once, whatever runs.
Read next: `ref.py`, the meaning; `cases.py`, what is tested and measured.
"""

from __future__ import annotations

import jax.numpy as jnp

from ....arrays import Array
from ...checks import FLOATS, Operand, check_geometry, check_operands
from ...dispatch import choose
from ...geometry import RowGeometry
from ...row_format import CacheFormat
from . import ref

OP = "sparse_attention"

IMPLEMENTATIONS = {"reference": ref.sparse_attention}
"""The best first."""


def sparse_attention(
    q: Array,
    window_rings: Array,
    layer: Array | int,
    window_rows: Array,
    entry_pages: Array | None,
    source: Array | int,
    page_table: Array,
    selection: Array | None,
    attn_sink: Array,
    geometry: RowGeometry,
    window_starts: Array,
    *,
    window: int,
    cache_format: CacheFormat,
    implementation: str | None = None,
) -> Array:
    """Attend to the sliding window and to selected compressed entries of each row's slot.

    s = q . key / sqrt(H); p = exp(s) / (sum exp(s) + exp(sink)); o = sum p key, over the `window`
    look-backs k = 0.. (k = 0 is the row itself), then the K selected. Look-back k is visible iff
    position - k >= max(window_start, 0); it is read from `window_rows` if it is in this step, otherwise
    from entry (position - k) mod ring. Group g is entry g mod entries of page
    page_table[slot, g // entries]. A row that sees nothing, or is not valid, gives 0; what is not
    visible may hold anything.

    Args:
        q: float32 or bfloat16 [R, N, H].
        window_rings: [L, B, ring, width] packed as `cache_format.window`, as before the step; ring >= window.
        layer: int32 scalar, place in `window_rings`.
        window_rows: [R, width], this step's packed rows of the layer.
        entry_pages: [S, P, entries, width] packed as `cache_format.entry`, or None for the window only.
        source: int32 scalar, place in `entry_pages`.
        page_table: int32 [B, pages_per_slot]; NOTHING or any page outside 0..P-1 holds nothing.
        selection: int32 [R, K], groups of the slot; NOTHING or any group outside its pages selects
            nothing. None where `entry_pages` is.
        attn_sink: float32 [N].
        geometry: who the rows are.
        window_starts: int32 [R], first position whose window row exists.
        window: look-backs (static).
        cache_format: how the caches are packed (static).
        implementation: a name, or None for the best.

    Returns:
        [R, N, H] in q's dtype.

    Raises:
        ValueError: operands that do not fit.
        ImplementationError: an implementation that cannot run.

    Source: spec/model.md section 5.
    """
    function = choose(OP, implementation, IMPLEMENTATIONS)
    _check(
        q, window_rings, window_rows, entry_pages, page_table, selection, attn_sink, geometry, window_starts,
        window, cache_format,
    )  # fmt: skip
    return function(
        q, window_rings, jnp.asarray(layer, jnp.int32), window_rows, entry_pages,
        jnp.asarray(source, jnp.int32), page_table, selection, attn_sink, geometry, window_starts,
        window=window, cache_format=cache_format,
    )  # fmt: skip


def _check(
    q: Array,
    window_rings: Array,
    window_rows: Array,
    entry_pages: Array | None,
    page_table: Array,
    selection: Array | None,
    attn_sink: Array,
    geometry: RowGeometry,
    window_starts: Array,
    window: int,
    cache_format: CacheFormat,
) -> None:
    stored = (jnp.dtype(cache_format.window.dtype).name,)
    operands = {
        "q": Operand(q, "R N H", FLOATS),
        "attn_sink": Operand(attn_sink, "N", ("float32",)),
        "window_rings": Operand(window_rings, "L B ring width", stored),
        "window_rows": Operand(window_rows, "R width", stored),
        "page_table": Operand(page_table, "B pages_per_slot", ("int32",)),
        "window_starts": Operand(window_starts, "R", ("int32",)),
    }
    sizes = {}
    if q.ndim == 3:
        sizes["width"] = cache_format.window.width(q.shape[2])
        sizes["entry_width"] = cache_format.entry.width(q.shape[2])
    if (entry_pages is None) != (selection is None):
        raise ValueError(f"{OP}: got only one of entry_pages and selection, expected both or neither")
    if entry_pages is not None:
        stored = (jnp.dtype(cache_format.entry.dtype).name,)
        operands["entry_pages"] = Operand(entry_pages, "S P entries entry_width", stored)
        operands["selection"] = Operand(selection, "R K", ("int32",))
    sizes = check_operands(OP, operands, sizes)
    check_geometry(OP, geometry, sizes["R"])
    if not 1 <= window <= sizes["ring"]:
        raise ValueError(f"{OP}: window: got {window}, expected 1..{sizes['ring']}, the rows of a ring")
