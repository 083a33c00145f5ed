"""The operations the model calls, with their reference meaning.

Separate because an operation knows blocks of arrays and nothing of layers, meshes or requests.
Read next: `pallas/quantize/`, the number formats, and `row_format.py`, the rows of the cache.
"""

from .dispatch import ImplementationError
from .geometry import RowGeometry
from .norm import inverse_rms, rms_norm
from .pallas.engram_gather import engram_gather
from .pallas.grouped_experts import clamped_swiglu, grouped_experts
from .pallas.hyper_connection import Mixes, collapse, enter_site, initial_streams, leave_site
from .pallas.index_top_k import CandidateRule, IndexResult, index_scores, index_top_k
from .pallas.quantize import (
    dequantize,
    quantize_dequantize_fp4_block,
    quantize_dequantize_fp4_scaled,
    quantize_dequantize_fp8,
    weight_values,
)
from .pallas.quantize_rows import pack_rows, round_rows, unpack_rows
from .pallas.sparse_attention import attend, sparse_attention
from .row_format import CACHE_FORMATS, CacheFormat, RowFormat

__all__ = [
    "CACHE_FORMATS",
    "CacheFormat",
    "CandidateRule",
    "ImplementationError",
    "IndexResult",
    "Mixes",
    "RowFormat",
    "RowGeometry",
    "attend",
    "clamped_swiglu",
    "collapse",
    "dequantize",
    "engram_gather",
    "enter_site",
    "grouped_experts",
    "index_scores",
    "index_top_k",
    "initial_streams",
    "inverse_rms",
    "leave_site",
    "pack_rows",
    "quantize_dequantize_fp4_block",
    "quantize_dequantize_fp4_scaled",
    "quantize_dequantize_fp8",
    "rms_norm",
    "round_rows",
    "sparse_attention",
    "unpack_rows",
    "weight_values",
]
