"""Quantising rows as the model calls it: to bytes, back to values, or both at once.

Separate from the implementations so that operands are checked once, whatever runs.
Read next: `ref.py`, the meaning; `cases.py`, what is tested and measured.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ....arrays import Array
from ...checks import FLOATS, Operand, check_operands
from ...dispatch import choose
from ...row_format import RowFormat
from . import ref

OP = "quantize_rows"

ROUND_IMPLEMENTATIONS = {"reference": ref.round_rows}
"""The best first."""

PACK_IMPLEMENTATIONS = {"reference": ref.pack_rows}
"""The best first."""

UNPACK_IMPLEMENTATIONS = {"reference": ref.unpack_rows}
"""The best first."""


def round_rows(values: Array, row_format: RowFormat, *, implementation: str | None = None) -> Array:
    """Round rows to what packing and unpacking gives back, with the identity's derivative.

    Args:
        values: [..., channels] float32 or bfloat16, finite.
        row_format: the format (static).
        implementation: a name, or None for the best.

    Returns:
        [..., channels] in values' dtype; equal to packing and unpacking, bit for bit.

    Raises:
        ValueError: channels that are no whole groups.
        ImplementationError: an implementation that cannot run.

    Source: spec/model.md section 2.
    """
    function = choose(OP, implementation, ROUND_IMPLEMENTATIONS)
    row_format.width(values.shape[-1])
    return function(values, row_format)


def pack_rows(values: Array, row_format: RowFormat, *, implementation: str | None = None) -> Array:
    """Encode rows: all data bytes of a row, then all its scale bytes.

    Args:
        values: [..., channels] float32 or bfloat16, finite.
        row_format: the format (static).
        implementation: a name, or None for the best.

    Returns:
        [..., width] of the format's dtype.

    Raises:
        ValueError: channels that are no whole groups, or another dtype.
        ImplementationError: an implementation that cannot run.

    Source: spec/serving.md section 2.
    """
    function = choose(OP, implementation, PACK_IMPLEMENTATIONS)
    flat = values.reshape(-1, values.shape[-1])
    check_operands(OP, {"values": Operand(flat, "R channels", FLOATS)}, {})
    row_format.width(values.shape[-1])
    return function(values, row_format)


def unpack_rows(
    packed: Array, row_format: RowFormat, dtype: Any, *, implementation: str | None = None
) -> Array:
    """Decode packed rows.

    Args:
        packed: [..., width] of the format's dtype.
        row_format: the format (static).
        dtype: float32, or bfloat16, which holds every quantised value (static).
        implementation: a name, or None for the best.

    Returns:
        [..., channels] in `dtype`.

    Raises:
        ValueError: a width that the format does not have, or another dtype.
        ImplementationError: an implementation that cannot run.

    Source: spec/serving.md section 2.
    """
    function = choose(OP, implementation, UNPACK_IMPLEMENTATIONS)
    stored = (jnp.dtype(row_format.dtype).name,)
    flat = packed.reshape(-1, packed.shape[-1])
    check_operands(OP, {"packed": Operand(flat, "R width", stored)}, {})
    row_format.channels(packed.shape[-1])
    return function(packed, row_format, dtype)
