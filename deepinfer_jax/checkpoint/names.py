"""The table of tensors that a checkpoint of a configuration holds: names, shapes, dtypes.

Separate because it needs no file: the reader checks headers against it, the writer plans shards
with it, and a layout is costed from it.
Read next: `../model/weights.py` and `../model/draft_weights.py`, the declarations behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..arrays import ArraySpec, spec_leaves
from ..config import ModelConfig
from ..model.draft_weights import draft_weight_specs
from ..model.weights import weight_specs
from .errors import CheckpointError
from .safetensors_file import DTYPES

_VISION_FIRST_WORDS = frozenset({"vision", "aligner"})
_VISION_NAMES = frozenset({"image_start", "image_end", "image_newline"})
_SCALE_DTYPES = ("F8_E8M0", "U8", "F32")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor on disk.

    Args:
        name: name in the official layout.
        shape: stored shape; packed for MXFP4.
        dtype: the official element type, a word of the safetensors format.
        part: "backbone" or "draft".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: str

    @property
    def accepted_dtypes(self) -> tuple[str, ...]:
        """Element types that are read with the same meaning."""
        return _SCALE_DTYPES if self.dtype == "F8_E8M0" else (self.dtype,)

    @property
    def num_bytes(self) -> int:
        """Bytes of data in the official element type."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def tensor_table(config: ModelConfig) -> dict[str, ExpectedTensor]:
    """List the text tensors (backbone and draft) that a checkpoint must hold, in a fixed order.

    Args:
        config: the architecture.

    Returns:
        Expected tensors by name.

    Raises:
        CheckpointError: two declarations that claim one name.

    Source: spec/checkpoint.md section 4.
    """
    table: dict[str, ExpectedTensor] = {}
    for part, specs in (("backbone", weight_specs(config)), ("draft", draft_weight_specs(config))):
        for path, spec in spec_leaves(specs):
            for tensor in expected_tensors(spec, config.is_quantized, part):
                if tensor.name in table:
                    raise CheckpointError(
                        f"array {path!r} of the {part} claims tensor {tensor.name!r}, which another array "
                        "has; expected a one-to-one map, fix the declaration's name"
                    )
                table[tensor.name] = tensor
    return table


def expected_tensors(spec: ArraySpec, is_quantized: bool, part: str = "backbone") -> Iterator[ExpectedTensor]:
    """List what one declaration is on disk, payload before scale, in stacking order.

    Args:
        spec: the declaration.
        is_quantized: whether the checkpoint uses the released mixed storage.
        part: "backbone" or "draft".

    Returns:
        The tensors, one after the other.
    """
    stored = spec.stored_shapes(is_quantized)
    for _, name in spec.tensors():
        for suffix, shape, dtype in stored:
            yield ExpectedTensor(scale_name(name) if suffix else name, shape, dtype, part)


def scale_name(name: str) -> str:
    """Give the name of the scale tensor beside a quantised weight.

    Args:
        name: a name that ends in `.weight`.

    Returns:
        The same name with its last word replaced by `scale`.
    """
    stem, word = name.rsplit(".", 1)
    if word != "weight":
        raise CheckpointError(f"quantised tensor {name!r}, expected a name that ends in '.weight'")
    return f"{stem}.scale"


def is_vision_tensor(name: str) -> bool:
    """Tell a tensor of the vision tower, its aligner or the learned image marks, by its whole first word."""
    return name in _VISION_NAMES or name.split(".", 1)[0] in _VISION_FIRST_WORDS
