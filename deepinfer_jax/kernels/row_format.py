"""How a row of the cache is laid out: quantised bytes with their scales, or plain numbers.

Separate because whoever writes or reads a cache needs the same bytes, and training only their values.
Read next: `pallas/quantize/ref.py`, the quantisers, and `pallas/quantize/codes.py`, their bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..arithmetic import round_to
from ..arrays import Array
from .pallas.quantize.codes import (
    e2m1_codes,
    e2m1_values,
    e4m3_codes,
    e4m3_values,
    e8m0_codes,
    e8m0_factors,
    pack_nibbles,
    unpack_nibbles,
)
from .pallas.quantize.ref import (
    FP4_SCALED_GROUP,
    FP8_GROUP,
    fp4_block_parts,
    fp4_scaled_parts,
    fp8_parts,
    quantize_dequantize_fp4_block,
    quantize_dequantize_fp4_scaled,
    quantize_dequantize_fp8,
    straight_through,
)


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


@straight_through
def _round_bfloat16(values: Array) -> Array:
    return lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)


_ROUNDING = {
    RowFormat.FP8: quantize_dequantize_fp8,
    RowFormat.FP4_SCALED: quantize_dequantize_fp4_scaled,
    RowFormat.FP4_BLOCK: quantize_dequantize_fp4_block,
    RowFormat.BFLOAT16: _round_bfloat16,
    RowFormat.FLOAT32: lambda values: values,
}


def round_rows(values: Array, row_format: RowFormat) -> Array:
    """Round rows to what a cache of this format gives back, with the identity's derivative.

    Args:
        values: [..., channels], finite.
        row_format: the format.

    Returns:
        [..., channels] in values' dtype; equal to packing and unpacking, bit for bit.
    """
    return _ROUNDING[row_format](values)


def pack_rows(values: Array, row_format: RowFormat) -> Array:
    """Encode rows for the cache.

    Args:
        values: [..., channels] float32 or bfloat16, finite.
        row_format: the format.

    Returns:
        [..., width] of the format's dtype.

    Raises:
        ValueError: channels that are no whole groups.

    Source: spec/serving.md section 2.
    """
    if not row_format.is_packed:
        return round_to(values, row_format.dtype)
    row_format.width(values.shape[-1])
    if row_format is RowFormat.FP8:
        elements, scales = fp8_parts(values)
        data, scale_bytes = e4m3_codes(elements), e8m0_codes(scales)
    elif row_format is RowFormat.FP4_SCALED:
        elements, scales = fp4_scaled_parts(values)
        data, scale_bytes = pack_nibbles(e2m1_codes(elements)), e4m3_codes(scales)
    else:
        elements, scales = fp4_block_parts(values)
        data, scale_bytes = pack_nibbles(e2m1_codes(elements)), e8m0_codes(scales)
    rows = values.shape[:-1]
    return jnp.concatenate([data.reshape(*rows, -1), scale_bytes.reshape(*rows, -1)], axis=-1)


def unpack_rows(packed: Array, row_format: RowFormat, dtype: Any) -> Array:
    """Decode rows of the cache.

    Args:
        packed: [..., width] of the format's dtype.
        row_format: the format.
        dtype: float32, or bfloat16, which holds every quantised value.

    Returns:
        [..., channels] in `dtype`.

    Raises:
        ValueError: a width that the format does not have.

    Source: spec/serving.md section 2.
    """
    if not row_format.is_packed:
        return round_to(packed, dtype)
    channels = row_format.channels(packed.shape[-1])
    num_groups = channels // row_format.group
    data, scale_bytes = packed[..., :-num_groups], packed[..., -num_groups:]
    elements = e4m3_values(data) if row_format is RowFormat.FP8 else e2m1_values(unpack_nibbles(data))
    groups = elements.reshape(*packed.shape[:-1], num_groups, row_format.group)
    if row_format is RowFormat.FP4_SCALED:
        factors: tuple[Array, ...] = (e4m3_values(scale_bytes),)
    else:
        factors = e8m0_factors(scale_bytes)
    for factor in factors:
        groups = groups * factor[..., None]
    return groups.reshape(*packed.shape[:-1], channels).astype(dtype)
