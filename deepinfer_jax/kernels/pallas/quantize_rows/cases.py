"""Named cases of quantising rows: every format, both dtypes, and the released widths.

Separate because tests and benchmarks read the same table.
Read next: `../../cases.py`, what all tables share.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....arrays import Array
from ...cases import RELEASED, Arguments, Draws
from ...row_format import RowFormat


@dataclass(frozen=True, slots=True)
class RowsCase:
    """One call of `pack_rows`; the defaults are tiny.

    Args:
        name: unique in the table.
        row_format: of the bytes.
        tags: what it is for.
        dtype: of the values.
        rows: R.
        channels: values of a row.
        scale: standard deviation of the values.
    """

    name: str
    row_format: RowFormat
    tags: frozenset[str] = frozenset()
    dtype: str = "float32"
    rows: int = 7
    channels: int = 64
    scale: float = 1.0

    def arguments(self, key: Array) -> Arguments:
        """Draw the operands."""
        values = Draws(key).normal(self.rows, self.channels, dtype=self.dtype, scale=self.scale)
        return Arguments((values,), {"row_format": self.row_format})


CASES = (
    *(
        RowsCase(f"{row_format.name.lower()}_{dtype}", row_format, dtype=dtype)
        for row_format in RowFormat
        for dtype in ("float32", "bfloat16")
    ),
    *(
        RowsCase(f"{row_format.name.lower()}_{word}", row_format, scale=scale)
        for row_format in RowFormat
        if row_format.is_packed
        for word, scale in (("zeros", 0.0), ("tiny", 1e-6), ("large", 1e4))
    ),
    *(
        RowsCase(f"released_{rows}_{row_format.name.lower()}", row_format, frozenset({RELEASED}), "bfloat16",
                 rows, channels)
        for row_format, channels in (
            (RowFormat.FP8, 512), (RowFormat.FP4_SCALED, 512), (RowFormat.FP4_BLOCK, 128)
        )
        for rows in (64, 4096)
    ),
)  # fmt: skip
"""Names are unique."""
