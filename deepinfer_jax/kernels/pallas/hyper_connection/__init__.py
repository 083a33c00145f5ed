"""Single-pass manifold hyper-connections: how sublayers read and write the residual streams.

Separate because both sites of every layer use the same three mixes, and a kernel can fuse them.
Read next: `ref.py` for the meaning, `api.py` for the calls.
"""

from .api import enter_site, leave_site
from .ref import Mixes, collapse, initial_streams

__all__ = ["Mixes", "collapse", "enter_site", "initial_streams", "leave_site"]
