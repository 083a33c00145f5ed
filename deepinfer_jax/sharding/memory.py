"""What is stored where: bytes of every array that a step is given, on each device.

Separate because these numbers are exact: XLA's own sizes of the same arguments.
Read next: `activations.py`, memory that lives only inside a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .layout import Layout
from .layout_plan import MemoryLine
from .mesh import MeshShape
from .place import padded_size

TABLE_PAGES = "table_pages"
"""Stands for the pages of one slot, in its page table."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array that lives between steps: a weight, its scales, or a part of the state.

    Args:
        name: where it is in its tree.
        group: "weights" or "cache".
        kind: its line in the table of memory.
        words: logical axes of the first dimensions; the others are whole.
        shape: as it is stored, over all devices.
        itemsize: bytes of an element.
    """

    name: str
    group: str
    kind: str
    words: tuple[str, ...]
    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array, counted once."""
        return math.prod(self.shape) * self.itemsize

    def resized(self, sizes: Mapping[str, int]) -> StoredArray:
        """Give some logical axes other sizes."""
        words = [*self.words, *[""] * (len(self.shape) - len(self.words))]
        shape = tuple(sizes.get(word, size) for word, size in zip(words, self.shape, strict=True))
        return replace(self, shape=shape)

    def shape_on(self, layout: Layout, mesh: MeshShape) -> tuple[int, ...]:
        """Shape of what each device holds, filled up to equal shares."""
        shares = [mesh.size(layout.stored_axes_of(word)) for word in self.words]
        divided = (padded_size(size, share) // share for size, share in zip(self.shape, shares, strict=False))
        return (*divided, *self.shape[len(shares) :])

    def bytes_on(self, layout: Layout, mesh: MeshShape) -> int:
        """Bytes that each device holds."""
        return math.prod(self.shape_on(layout, mesh)) * self.itemsize


def bytes_on_device(arrays: Sequence[StoredArray], layout: Layout, mesh: MeshShape) -> int:
    """Add up what each device holds of some arrays."""
    return sum(array.bytes_on(layout, mesh) for array in arrays)


def memory_lines(arrays: Sequence[StoredArray], layout: Layout, mesh: MeshShape) -> tuple[MemoryLine, ...]:
    """Add arrays up by kind.

    Args:
        arrays: of one group or several.
        layout: on this mesh, which can hold them.
        mesh: the grid.

    Returns:
        One line for each kind, in order of first occurrence.
    """
    lines: dict[tuple[str, str], MemoryLine] = {}
    for array in arrays:
        key = array.group, array.kind
        line = lines.get(key, MemoryLine(*key, num_bytes=0, total_bytes=0))
        divided = {word: axes for word in array.words if (axes := layout.stored_axes_of(word))}
        lines[key] = replace(
            line,
            num_bytes=line.num_bytes + array.bytes_on(layout, mesh),
            total_bytes=line.total_bytes + array.num_bytes,
            divided=tuple((dict(line.divided) | divided).items()),
        )
    return tuple(lines.values())
