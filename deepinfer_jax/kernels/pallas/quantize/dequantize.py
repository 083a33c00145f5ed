"""Values of resident quantised weights, computed where they are used.

Separate from `ref.py` because weights are only ever decoded: their bytes come from the checkpoint.
Read next: `codes.py`, the formats to the bit, and `../../../model/linear.py`, which calls this.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ....arrays import Array, QuantArray, Storage
from .codes import e2m1_values, e4m3_values, e8m0_factors, unpack_nibbles

_GROUP = 32


def dequantize(weight: QuantArray, dtype: Any) -> Array:
    """Decode a quantised weight, alone or stacked.

    value[i, j] = payload[i, j] 2^(scale[i // r, j // 32] - 127), r = 32 (FP8 blocks) or 1. Exact for
    every scale byte 0..254 as long as the value is a normal number of float32; smaller ones (an
    element below 2^(1 - b) under scale byte b) flush to zero on devices that do so. bfloat16 holds
    the same values.

    Args:
        weight: payload and scales, with leading stack axes or without.
        dtype: float32 or bfloat16.

    Returns:
        [..., rows, columns] in `dtype`.

    Source: spec/checkpoint.md section 3.
    """
    if weight.storage is Storage.MXFP4:
        values = e2m1_values(unpack_nibbles(weight.payload))
    else:
        values = e4m3_values(lax.bitcast_convert_type(weight.payload, jnp.uint8))
    block_rows = weight.storage.block_rows
    for factor in e8m0_factors(weight.scales):
        values = _scale_blocks(values, factor, block_rows)
    return values.astype(dtype)


def weight_values(weight: Array | QuantArray, dtype: Any) -> Array:
    """Give the values of a weight, whether it is resident as numbers or as quantised bytes.

    Args:
        weight: plain or quantised, of any shape.
        dtype: float32 or bfloat16.

    Returns:
        The values in `dtype`, of the weight's shape.
    """
    if isinstance(weight, QuantArray):
        return dequantize(weight, dtype)
    return weight.astype(dtype)


def _scale_blocks(values: Array, scales: Array, block_rows: int) -> Array:
    *stack, rows, columns = values.shape
    if rows % block_rows or columns % _GROUP:
        # Ragged ends, which the released model does not have: widen the scales and cut them.
        wide = jnp.repeat(scales, _GROUP, axis=-1)[..., :columns]
        return values * jnp.repeat(wide, block_rows, axis=-2)[..., :rows, :]
    blocks = values.reshape(*stack, rows // block_rows, block_rows, columns // _GROUP, _GROUP)
    return (blocks * scales[..., :, None, :, None]).reshape(values.shape)
