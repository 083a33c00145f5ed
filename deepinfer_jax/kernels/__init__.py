"""The operations the model calls, with their reference meaning.

Separate because an operation knows blocks of arrays and nothing of layers, meshes or requests.
Read next: `quantize.py`, the activation and cache quantisers.
"""

from .quantize import (
    quantize_dequantize_fp4_block,
    quantize_dequantize_fp4_scaled,
    quantize_dequantize_fp8,
)

__all__ = [
    "quantize_dequantize_fp4_block",
    "quantize_dequantize_fp4_scaled",
    "quantize_dequantize_fp8",
]
