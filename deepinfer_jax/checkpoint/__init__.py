"""Checkpoints in the official safetensors layout: names, formats, reading, writing, token map.

Separate because it is the only part that knows what weights look like on disk.
Read next: `reader.py`, then `names.py`.
"""

from __future__ import annotations

from .errors import CheckpointError
from .names import ExpectedTensor, tensor_table
from .reader import Checkpoint, LoadedCheckpoint, load_checkpoint, load_weights
from .safetensors_file import SafetensorsFile
from .token_map import engram_token_map, read_token_map
from .writer import write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpectedTensor",
    "LoadedCheckpoint",
    "SafetensorsFile",
    "engram_token_map",
    "load_checkpoint",
    "load_weights",
    "read_token_map",
    "tensor_table",
    "write_checkpoint",
]
