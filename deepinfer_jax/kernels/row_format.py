"""How a row of the cache is laid out: quantised bytes with their scales, or plain numbers.

Separate because whoever writes or reads a cache needs the same layout.
Read next: `pallas/quantize_rows/`, which makes and reads the bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp

from .pallas.quantize.ref import FP4_SCALED_GROUP, FP8_GROUP


class RowFormat(Enum):
    """One format of a cache row: all data bytes of the row, then all its scale bytes.

    FP8: e4m3 with an E8M0 scale per 32 channels (Q8). FP4_SCALED: e2m1 with an e4m3 scale per 16
    (Q4c). FP4_BLOCK: e2m1 with an E8M0 scale per 32 (Q4i). Nibbles: even channel low.

    Source: spec/serving.md section 2, spec/model.md section 2.
    """

    FP8 = "fp8 1x32"
    FP4_SCALED = "fp4 1x16"
    FP4_BLOCK = "fp4 1x32"
    BFLOAT16 = "bf16"
    FLOAT32 = "float32"

    @property
    def is_packed(self) -> bool:
        """Whether an element of a packed row is a byte of codes instead of a number."""
        return self not in (RowFormat.BFLOAT16, RowFormat.FLOAT32)

    @property
    def dtype(self) -> Any:
        """Element type of a packed row."""
        return {RowFormat.BFLOAT16: jnp.bfloat16, RowFormat.FLOAT32: jnp.float32}.get(self, jnp.uint8)

    @property
    def group(self) -> int:
        """Channels that share a scale; 1 if there is none."""
        if not self.is_packed:
            return 1
        return FP4_SCALED_GROUP if self is RowFormat.FP4_SCALED else FP8_GROUP

    @property
    def _group_width(self) -> int:
        if not self.is_packed:
            return 1
        return (self.group if self is RowFormat.FP8 else self.group // 2) + 1

    def width(self, channels: int) -> int:
        """Give the elements of a packed row: for the quantised formats, its bytes.

        Args:
            channels: values of a row, whole groups.

        Returns:
            Length of the packed row.

        Raises:
            ValueError: channels that are no whole groups.
        """
        if channels % self.group:
            raise ValueError(
                f"{self.name} row: got {channels} channels, expected a multiple of {self.group}, which "
                "share a scale; choose another format for this row"
            )
        return channels // self.group * self._group_width

    def channels(self, width: int) -> int:
        """Give the values in a packed row, the inverse of `width`.

        Args:
            width: length of the packed row.

        Returns:
            Channels.

        Raises:
            ValueError: a width that no whole number of groups has.
        """
        if width % self._group_width:
            raise ValueError(
                f"{self.name} row: got width {width}, expected a multiple of {self._group_width}, the "
                f"size of a group of {self.group}; the row was packed in another format"
            )
        return width // self._group_width * self.group


class CacheFormat(NamedTuple):
    """The formats of the three kinds of cache row."""

    window: RowFormat
    entry: RowFormat
    index_key: RowFormat


CACHE_FORMATS: dict[str, CacheFormat] = {
    "fp4": CacheFormat(RowFormat.FP8, RowFormat.FP4_SCALED, RowFormat.FP4_BLOCK),
    "fp8": CacheFormat(RowFormat.FP8, RowFormat.FP8, RowFormat.FP8),
    "bf16": CacheFormat(RowFormat.BFLOAT16, RowFormat.BFLOAT16, RowFormat.BFLOAT16),
    "float32": CacheFormat(RowFormat.FLOAT32, RowFormat.FLOAT32, RowFormat.FLOAT32),
}
"""Cache formats by name; "fp4" is the released one."""
