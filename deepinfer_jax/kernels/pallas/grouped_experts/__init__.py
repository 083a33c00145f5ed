"""The routed experts of a layer on the rows that chose them.

Separate because it reads most of the model's weights and decides how they are streamed.
Read next: `ref.py` for the meaning, `api.py` for the call.
"""

from .api import grouped_experts
from .ref import clamped_swiglu

__all__ = ["clamped_swiglu", "grouped_experts"]
