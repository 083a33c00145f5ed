"""Quantise and dequantise rows: of the cache, and inputs of quantised matmuls.

Separate because it is one operation, with one meaning and any number of implementations.
Read next: `api.py`, then `ref.py`.
"""

from .api import pack_rows, round_rows, unpack_rows

__all__ = ["pack_rows", "round_rows", "unpack_rows"]
