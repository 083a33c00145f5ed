"""The meaning of quantising rows in plain JAX, by the number formats of `../quantize/`.

Separate because it is what every kernel is compared with, and what runs where none exists.
Read next: `../quantize/ref.py`, the quantisers, and `../quantize/codes.py`, their bytes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ....arithmetic import round_to
from ....arrays import Array
from ...row_format import RowFormat
from ..quantize.codes import (
    e2m1_codes,
    e2m1_values,
    e4m3_codes,
    e4m3_values,
    e8m0_codes,
    e8m0_factors,
    pack_nibbles,
    unpack_nibbles,
)
from ..quantize.ref import (
    fp4_block_parts,
    fp4_scaled_parts,
    fp8_parts,
    quantize_dequantize_fp4_block,
    quantize_dequantize_fp4_scaled,
    quantize_dequantize_fp8,
    straight_through,
)


@straight_through
def _round_bfloat16(values: Array) -> Array:
    return round_to(values, jnp.bfloat16).astype(values.dtype)


_ROUNDING = {
    RowFormat.FP8: quantize_dequantize_fp8,
    RowFormat.FP4_SCALED: quantize_dequantize_fp4_scaled,
    RowFormat.FP4_BLOCK: quantize_dequantize_fp4_block,
    RowFormat.BFLOAT16: _round_bfloat16,
    RowFormat.FLOAT32: lambda values: values,
}


def round_rows(values: Array, row_format: RowFormat) -> Array:
    """Round as `api.round_rows` says; same arguments, already checked."""
    return _ROUNDING[row_format](values)


def pack_rows(values: Array, row_format: RowFormat) -> Array:
    """Encode as `api.pack_rows` says; same arguments, already checked."""
    if not row_format.is_packed:
        return round_to(values, row_format.dtype)
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
    """Decode as `api.unpack_rows` says; same arguments, already checked."""
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
