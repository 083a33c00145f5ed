"""The Engram gather as the model calls it.

Separate from the implementations so that operands are checked once, whatever runs.
Read next: `ref.py`, the meaning; `cases.py`, what is tested and measured.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ....arrays import Array, QuantArray, Storage
from ...checks import FLOATS, Operand, check_operands
from ...dispatch import choose
from . import ref

OP = "engram_gather"

IMPLEMENTATIONS = {"reference": ref.engram_gather}
"""The best first."""


def engram_gather(
    table: QuantArray | Array, rows: Array, dtype: Any, *, implementation: str | None = None
) -> Array:
    """Gather table rows and join those of a token, in column order.

    Args:
        table: [table rows, width], plain or quantised with scales of single rows.
        rows: int32 [R, C], each in 0..table rows - 1.
        dtype: float32 or bfloat16.
        implementation: a name, or None for the best.

    Returns:
        [R, C * width] in `dtype`.

    Raises:
        ValueError: operands that do not fit.
        ImplementationError: an implementation that cannot run.

    Source: spec/model.md section 10, Lookup.
    """
    function = choose(OP, implementation, IMPLEMENTATIONS)
    check_operands(
        OP, {"table": Operand(table, "table_rows width"), "rows": Operand(rows, "R C", ("int32",))}
    )
    if isinstance(table, QuantArray) and table.storage is Storage.FP8_BLOCK:
        raise ValueError(f"{OP}: table: got storage {table.storage.name}, expected scales of single rows")
    if jnp.dtype(dtype).name not in FLOATS:
        raise ValueError(f"{OP}: dtype: got {jnp.dtype(dtype).name}, expected {' or '.join(FLOATS)}")
    return function(table, rows, dtype)
