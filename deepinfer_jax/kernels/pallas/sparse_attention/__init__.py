"""Attention to a sliding window and to selected compressed entries, both read from packed caches.

Separate because no other operation reads rings and pages at once.
Read next: `ref.py` for the meaning, `api.py` for the call.
"""

from .api import sparse_attention
from .ref import attend

__all__ = ["attend", "sparse_attention"]
