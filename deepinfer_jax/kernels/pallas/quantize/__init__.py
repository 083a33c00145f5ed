"""Quantisers of activations and cache rows, and decoding of quantised weights.

Separate because every number format of the model lives here, once.
Read next: `ref.py`, then `codes.py` and `dequantize.py`.
"""

from .dequantize import dequantize, weight_values
from .ref import (
    power_of_two_scale,
    quantize_dequantize_fp4_block,
    quantize_dequantize_fp4_scaled,
    quantize_dequantize_fp8,
    round_e2m1,
    round_e4m3,
    straight_through,
)

__all__ = [
    "dequantize",
    "power_of_two_scale",
    "quantize_dequantize_fp4_block",
    "quantize_dequantize_fp4_scaled",
    "quantize_dequantize_fp8",
    "round_e2m1",
    "round_e4m3",
    "straight_through",
    "weight_values",
]
