"""Who the rows of a step are, as far as an operation needs to know.

Separate because operations know rows and slots, but nothing of tokens, requests or layers.
Read next: `pallas/sparse_attention/ref.py`, which finds a row's neighbours with it.
"""

from __future__ import annotations

from flax import struct

from ..arrays import Array


class RowGeometry(struct.PyTreeNode):
    """Place of every row: the valid rows of a slot are adjacent and their positions consecutive.

    The token k positions back of a valid row r is in this step iff r - k >= slot_offsets[r];
    otherwise it is in the cache.

    Attributes:
        slots: int32 [R].
        positions: int32 [R], absolute, from 0.
        is_valid: bool [R], False for padding.
        slot_offsets: int32 [R], index of the first row of this row's slot in this step.
        rows_per_block: adjacent rows sure to share a slot (static); it divides R, 1 fits any step.
    """

    slots: Array
    positions: Array
    is_valid: Array
    slot_offsets: Array
    rows_per_block: int = struct.field(pytree_node=False, default=1)
