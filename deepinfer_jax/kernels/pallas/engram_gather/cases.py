"""Named cases of the Engram gather: storages, repeated rows, and the released widths.

Separate because tests and benchmarks read the same table.
Read next: `../../cases.py`, what all tables share.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ....arrays import Array, QuantArray, Storage
from ...cases import RELEASED, Arguments, Draws


@dataclass(frozen=True, slots=True)
class GatherCase:
    """One call; the defaults are tiny.

    Args:
        name: unique in the table.
        tags: what it is for.
        storage: of the table; BF16 stands for a plain array of float32.
        dtype: of the result.
        table_rows: rows of the table.
        width: channels of a row.
        rows: R.
        columns: C.
    """

    name: str
    tags: frozenset[str] = frozenset()
    storage: Storage = Storage.FP8_ROW
    dtype: str = "float32"
    table_rows: int = 20
    width: int = 64
    rows: int = 5
    columns: int = 6

    def arguments(self, key: Array) -> Arguments:
        """Draw the operands; the first and the last row of the table are among those read."""
        draws = Draws(key)
        if not self.storage.is_quantized:
            table: Array | QuantArray = draws.normal(self.table_rows, self.width)
        else:
            payload = draws.normal(self.table_rows, self.width, dtype=jnp.float8_e4m3fn)
            scales = draws.integers(120, 131, self.table_rows, self.width // 32, dtype="uint8")
            table = QuantArray(payload, scales, self.storage, ("engram_rows", "engram_row"))
        rows = draws.random.integers(0, self.table_rows, (self.rows, self.columns)).astype(np.int32)
        rows[0, :2] = 0, self.table_rows - 1
        return Arguments((table, jnp.asarray(rows)), {"dtype": jnp.dtype(self.dtype)})


CASES = (
    GatherCase("fp8_rows"),
    GatherCase("fp8_rows_bfloat16", dtype="bfloat16"),
    GatherCase("plain", storage=Storage.BF16),
    *(
        GatherCase(
            f"released_{rows}", frozenset({RELEASED}), dtype="bfloat16", table_rows=4_000_000, width=256,
            rows=rows, columns=24,
        )
        for rows in (1, 64, 256)
    ),
)  # fmt: skip
"""Names are unique; the released table is a hundred times as long, which a gather does not notice."""
