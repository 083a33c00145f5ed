"""Rows of a verify step: the anchor and the drafts of each request, side by side in a fixed number.

Separate from `schedule.py` because it moves rows and judges none.
Read next: `verify.py`, which reads the results of these rows back.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from ..arrays import NOTHING, Array


class PackedRows(NamedTuple):
    """Where the rows of a verify step belong.

    Args:
        slots: int32 [N], slot of each row; NOTHING for a padding row.
        offsets: int32 [N], place in the slot's block: 0 is the anchor, j the draft j; 0 for padding.
        first_rows: int32 [R], row of each slot's anchor; that of an idle slot must not be read.
    """

    slots: Array
    offsets: Array
    first_rows: Array


def pack_rows(lengths: Array, is_active: Array, num_rows: int) -> PackedRows:
    """Lay the anchor and the drafts of every active slot out one after the other.

    Args:
        lengths: int32 [R], drafts of each slot that are verified.
        is_active: bool [R]; an idle slot has no row.
        num_rows: N, static, at least all rows together: those beyond are lost.

    Returns:
        The rows, in order of slots; padding is at the end.

    Source: spec/dspark.md section 9.2.
    """
    counts = jnp.where(is_active, 1 + lengths, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    # The slot of a row is the number of slots that end before it; one without rows ends where it starts.
    slots = (ends[None, :] <= rows[:, None]).sum(axis=1, dtype=jnp.int32)
    is_row = slots < lengths.shape[0]
    offsets = rows - starts[jnp.minimum(slots, lengths.shape[0] - 1)]
    return PackedRows(
        slots=jnp.where(is_row, slots, NOTHING),
        offsets=jnp.where(is_row, offsets, 0),
        first_rows=jnp.minimum(starts, num_rows - 1),
    )
