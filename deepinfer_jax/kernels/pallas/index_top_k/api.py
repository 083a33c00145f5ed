"""Index top-k as the model calls it.

Separate from the implementations so that operands are checked once, whatever runs.
Read next: `ref.py`, the meaning; `cases.py`, what is tested and measured.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ....arrays import Array
from ...checks import FLOATS, Operand, check_geometry, check_operands
from ...dispatch import choose
from ...geometry import RowGeometry
from ...row_format import RowFormat
from . import ref
from .ref import IndexResult
from .selection import CandidateRule

OP = "index_top_k"

IMPLEMENTATIONS = {"reference": ref.index_top_k}
"""The best first."""

ROLES = ("", "source", "restricted")


def index_top_k(
    queries: Array,
    head_weights: Array,
    key_pages: Array,
    source: Array | int,
    page_table: Array,
    num_visible: Array,
    is_candidate: Array | None,
    geometry: RowGeometry,
    *,
    top_k: int,
    candidates: CandidateRule,
    key_format: RowFormat,
    want_scores: bool = False,
    implementation: str | None = None,
) -> IndexResult:
    """Score the compressed entries of each row's slot and select the best visible ones.

    score(g) = sum_i a_i max(0, q_i . k_g), float32; the `top_k` best groups g < num_visible, ties to
    the lower index. A "source" also chooses the candidate blocks: the `num_blocks` with the best group,
    the block of the newest visible group always; a "restricted" selects inside the given ones. Group g
    is entry g mod entries of page page_table[slot, g // entries]. Rows that are not valid select
    nothing. No gradient.

    Args:
        queries: float32 or bfloat16 [R, I, index_head_dim], already rounded as keys are.
        head_weights: float32 [R, I].
        key_pages: [S, P, entries, width], packed as `key_format`.
        source: int32 scalar, place in `key_pages`.
        page_table: int32 [B, pages_per_slot]; NOTHING or any page outside 0..P-1 is never selected.
            G = pages_per_slot * entries.
        num_visible: int32 [R], complete groups of the row's slot at its position.
        is_candidate: bool [R, blocks of G]; needed by "restricted", otherwise handed through.
        geometry: who the rows are; keys are unpacked once for each block of rows.
        top_k: places (static).
        candidates: how the layer takes part in the two-level selection (static).
        key_format: how keys are packed (static).
        want_scores: whether the result has the scores (static).
        implementation: a name, or None for the best.

    Returns:
        The selection, the candidates, and the scores if wanted.

    Raises:
        ValueError: operands that do not fit.
        ImplementationError: an implementation that cannot run.

    Source: spec/model.md sections 7 and 8.
    """
    function = choose(OP, implementation, IMPLEMENTATIONS)
    _check(
        queries, head_weights, key_pages, page_table, num_visible, is_candidate, geometry,
        top_k, candidates, key_format,
    )  # fmt: skip
    queries, head_weights, key_pages = lax.stop_gradient((queries, head_weights, key_pages))
    return function(
        queries, head_weights, key_pages, jnp.asarray(source, jnp.int32), page_table, num_visible,
        is_candidate, geometry,
        top_k=top_k, candidates=candidates, key_format=key_format, want_scores=want_scores,
    )  # fmt: skip


def _check(
    queries: Array,
    head_weights: Array,
    key_pages: Array,
    page_table: Array,
    num_visible: Array,
    is_candidate: Array | None,
    geometry: RowGeometry,
    top_k: int,
    candidates: CandidateRule,
    key_format: RowFormat,
) -> None:
    if candidates.role not in ROLES:
        raise ValueError(f"{OP}: candidates.role: got {candidates.role!r}, expected one of {ROLES}")
    for name, value in (("top_k", top_k), ("candidates.block_size", candidates.block_size),
                        ("candidates.num_blocks", candidates.num_blocks)):  # fmt: skip
        if value < 1:
            raise ValueError(f"{OP}: {name}: got {value}, expected a positive number")
    sizes = {"width": key_format.width(queries.shape[-1])} if queries.ndim else {}
    operands = {
        "queries": Operand(queries, "R I index_head_dim", FLOATS),
        "head_weights": Operand(head_weights, "R I", ("float32",)),
        "key_pages": Operand(key_pages, "S P entries width", (jnp.dtype(key_format.dtype).name,)),
        "page_table": Operand(page_table, "B pages_per_slot", ("int32",)),
        "num_visible": Operand(num_visible, "R", ("int32",)),
    }
    sizes = check_operands(OP, operands, sizes)
    check_geometry(OP, geometry, sizes["R"])
    if is_candidate is not None:
        sizes["blocks"] = candidates.blocks(sizes["pages_per_slot"] * sizes["entries"])
        check_operands(OP, {"is_candidate": Operand(is_candidate, "R blocks", ("bool",))}, sizes)
    elif candidates.role == "restricted":
        raise ValueError(f"{OP}: is_candidate: got None, expected bool [R, blocks] for a restricted layer")
