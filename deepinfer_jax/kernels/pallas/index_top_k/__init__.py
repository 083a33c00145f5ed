"""Index scores of a slot's compressed entries, and the selection of the best.

Separate because its result is integers and masks: it is compared as sets and has no gradient.
Read next: `ref.py` for the meaning, `api.py` for the call.
"""

from .api import index_top_k
from .ref import CandidateRule, IndexResult, index_scores

__all__ = ["CandidateRule", "IndexResult", "index_scores", "index_top_k"]
