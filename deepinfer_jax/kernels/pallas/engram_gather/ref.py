"""The meaning of the Engram gather in plain JAX.

Separate because it is what every kernel is compared with, and what runs where none exists.
Read next: `api.py`.
"""

from __future__ import annotations

from typing import Any

import jax

from ....arrays import Array, QuantArray
from ..quantize import weight_values


def engram_gather(table: QuantArray | Array, rows: Array, dtype: Any) -> Array:
    """Gather as `api.engram_gather` says; same arguments, already checked."""
    # Bytes first, values after: only what is read is decoded.
    found = jax.tree.map(lambda stored: stored[rows.reshape(-1)], table)
    values = weight_values(found, dtype)
    return values.reshape(rows.shape[0], rows.shape[1] * values.shape[-1])
