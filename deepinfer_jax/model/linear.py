"""Matrix products: one accumulation rule, with and without quantised input.

Separate because the choice of input quantisation follows the checkpoint's storage of the weight.
Read next: `attention.py` and `moe.py`.
"""

from __future__ import annotations

from ..arithmetic import contract, round_to
from ..arrays import Array, QuantArray
from ..kernels import RowFormat, round_rows, weight_values
from .numerics import Numerics


def linear_float32(x: Array, weight: Array | QuantArray) -> Array:
    """Multiply by a weight stored [out, in] and keep the float32 sum.

    Args:
        x: [..., in].
        weight: [out, in], plain or quantised.

    Returns:
        [..., out] float32.

    Source: spec/model.md section 2, Linear (b).
    """
    return contract("...i,oi->...o", x, weight_values(weight, x.dtype))


def linear(x: Array, weight: Array | QuantArray) -> Array:
    """Multiply by a weight stored [out, in], rounded to x's dtype."""
    return round_to(linear_float32(x, weight), x.dtype)


def quantize_input(x: Array, numerics: Numerics) -> Array:
    """Quantise the input of a matmul whose weight is stored FP8 or FP4, if the numerics say so.

    Args:
        x: [..., channels], channels a multiple of 32.
        numerics: the static choice of arithmetic.

    Returns:
        x, or x rounded to e4m3 per 32 channels.

    Source: spec/model.md section 2, Linear (a).
    """
    if not numerics.quantizes_activations:
        return x
    return round_rows(x, RowFormat.FP8, implementation=numerics.implementation)


def quantized_linear(x: Array, weight: Array | QuantArray, numerics: Numerics) -> Array:
    """Multiply by a weight that the checkpoint stores FP8: quantised input, float32 sum, one rounding.

    Args:
        x: [..., in].
        weight: [out, in], plain or quantised.
        numerics: the static choice of arithmetic.

    Returns:
        [..., out] in x's dtype.

    Source: spec/model.md section 2, Linear (a).
    """
    return linear(quantize_input(x, numerics), weight)
