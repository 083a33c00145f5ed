"""Rows of the n-gram memory, gathered and decoded.

Separate because its table is far larger than anything else and may lie elsewhere than the weights.
Read next: `ref.py` for the meaning, `api.py` for the call.
"""

from .api import engram_gather

__all__ = ["engram_gather"]
