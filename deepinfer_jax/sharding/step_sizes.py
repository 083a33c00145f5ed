"""The sizes of one step on one device: rows, tiles, and what of each logical axis is worked on here.

Separate because memory, collectives and times of a step are all predicted from these numbers.
Read next: `collectives.py`, `activations.py`, `roofline.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..config import PAGE_TOKENS, ModelConfig
from .exchange import meeting
from .layout import Layout
from .memory import TABLE_PAGES, StoredArray
from .mesh import MeshShape


class LayerRole(NamedTuple):
    """What a layer does besides what all do.

    Attributes:
        stack: name of the stack that holds its weights.
        ratio: tokens of a compressed group that it reads, 0 if it reads none.
        is_kv_source: whether it compresses tokens and makes index keys.
        is_index_source: whether it selects entries itself.
    """

    stack: str
    ratio: int
    is_kv_source: bool
    is_index_source: bool


@dataclass(frozen=True)
class ModelSizes:
    """What a planner must know of a model and of its arithmetic.

    Args:
        config: the architecture.
        layers: role of each layer.
        weights: all arrays of the weights.
        state: all arrays of the state, of one slot with one page; see `state_of`.
        compute_bytes: bytes of a number of the compute dtype.
        window_bytes: of a packed window row.
        entry_bytes: of a packed compressed entry.
        key_bytes: of a packed index key.
        row_tile: rows that run through the layers together; None if all rows of a step do.
        block_rows: adjacent rows of a prefill step that are sure to share a slot.
        pages_at_once: pages whose index keys are scored together.
        sampling_tile: slots that are sampled together; None if all are.
    """

    config: ModelConfig
    layers: tuple[LayerRole, ...]
    weights: tuple[StoredArray, ...]
    state: tuple[StoredArray, ...]
    compute_bytes: int
    window_bytes: int
    entry_bytes: int
    key_bytes: int
    row_tile: int | None
    block_rows: int
    pages_at_once: int
    sampling_tile: int | None

    def state_of(self, num_slots: int, context: int) -> tuple[StoredArray, ...]:
        """Give the state's arrays for `num_slots` slots of `context` tokens each."""
        pages = num_pages(context)
        sizes = {"slots": num_slots, "pages": num_slots * pages, TABLE_PAGES: pages}
        return tuple(array.resized(sizes) for array in self.state)


def num_pages(context: int) -> int:
    """Count the pages that hold `context` tokens."""
    return -(-context // PAGE_TOKENS)


@dataclass(frozen=True)
class StepSizes:
    """One step on one device.

    Args:
        step: "prefill" or "decode".
        model: the model.
        layout: on this mesh, as it is in this step (`Layout.while_decoding`).
        mesh: the grid.
        num_slots: sequences, over all devices.
        context: tokens that each slot can hold.
        num_rows: rows of the step, over all devices.
    """

    step: str
    model: ModelSizes
    layout: Layout
    mesh: MeshShape
    num_slots: int
    context: int
    num_rows: int

    @property
    def is_prefill(self) -> bool:
        """Whether the rows are those of prompts."""
        return self.step == "prefill"

    @cached_property
    def slots_here(self) -> int:
        """Slots of a device."""
        return self.num_slots // self.share("slots")

    @cached_property
    def rows_here(self) -> int:
        """Rows of a device in the whole step."""
        return self.num_rows // self.share("rows")

    @cached_property
    def tile(self) -> int:
        """Rows that run through the layers together, padding included."""
        return self.model.row_tile or self.rows_here

    @cached_property
    def num_tiles(self) -> int:
        """Passes through the layers."""
        return -(-self.rows_here // self.tile)

    @cached_property
    def valid_rows(self) -> int:
        """Rows of a tile that can be valid: those that travel."""
        return min(self.tile, self.rows_here)

    @property
    def pages(self) -> int:
        """Pages of a slot."""
        return num_pages(self.context)

    def count(self, axes: tuple[str, ...]) -> int:
        """Count the devices along mesh axes."""
        return self.mesh.size(axes)

    def share(self, word: str) -> int:
        """Count the devices among which the work along a logical axis is divided."""
        if word not in self._shares:
            self._shares[word] = self.count(self.layout.axes_of(word))
        return self._shares[word]

    @cached_property
    def _shares(self) -> dict[str, int]:
        # Asked for once for every dimension of every weight.
        return {}

    def common(self, word: str) -> tuple[str, ...]:
        """Give the mesh axes along which both a logical axis is divided and rows differ."""
        return meeting(self.layout, word).common

    def rest(self, word: str) -> tuple[str, ...]:
        """Give the mesh axes along which a logical axis is divided and rows are repeated."""
        return meeting(self.layout, word).rest

    def work_shape(self, array: StoredArray) -> tuple[int, ...]:
        """Shape of what this device works with of an array: whole where only its storage is divided."""
        shares = [self.share(word) for word in array.words]
        divided = (-(-size // share) for size, share in zip(array.shape, shares, strict=False))
        return (*divided, *array.shape[len(shares) :])

    def work_bytes(self, array: StoredArray) -> int:
        """Bytes of what this device works with of an array."""
        return math.prod(self.work_shape(array)) * array.itemsize
