"""Which part of each logical axis a device holds.

Separate because it is arithmetic on grids; `picture.py` only draws it.
Read next: `picture.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import SPLITTABLE
from ..layout_plan import LayoutPlan
from ..mesh import MeshShape
from .words import axis_name, count_text


@dataclass(frozen=True, slots=True)
class Share:
    """How one logical axis lies on a mesh.

    Args:
        word: the logical axis.
        size: its length, 0 if it differs from array to array.
        axes: mesh axes that divide it, () if every device holds all of it.
        num_parts: into which it is divided.
        is_stored_only: whether the parts are put together before use.
    """

    word: str
    size: int
    axes: tuple[str, ...]
    num_parts: int
    is_stored_only: bool

    @property
    def name(self) -> str:
        """The axis in plain words."""
        return axis_name(self.word)

    def part_of(self, place: Sequence[int], mesh: MeshShape) -> int:
        """Give the number of the part that the device at a place of the grid holds."""
        part = 0
        for axis in self.axes:
            position = mesh.names.index(axis)
            part = part * mesh.axes[position][1] + place[position]
        return part

    def held(self, part: int) -> str:
        """Say what a device holds: "0 to 63", "all", "part 2 of 8"."""
        if self.num_parts == 1:
            return "all"
        if not self.size:
            return f"part {part} of {self.num_parts}"
        # Rows of tables are padded at the end so that all parts are equally long.
        length = -(-self.size // self.num_parts)
        first, last = part * length, min((part + 1) * length, self.size) - 1
        if first == last:
            return f"{first:,}"
        return f"{_index_text(first)} to {_index_text(last)}"

    def summary(self) -> str:
        """Say in one line how the axis is divided."""
        whole = f"{self.size:,} {self.name}" if self.size else self.name
        if not self.axes:
            return f"{whole}: all on every device"
        verb = "stored" if self.is_stored_only else "divided"
        each = f", {-(-self.size // self.num_parts):,} on each device" if self.size else ""
        return f"{whole}: {verb} over {', '.join(self.axes)} in {self.num_parts} parts{each}"


def shares_of(plan: LayoutPlan) -> tuple[Share, ...]:
    """List how each logical axis lies on the mesh, the divisible ones first.

    Args:
        plan: the layout and its sizes.

    Returns:
        All axes of `SPLITTABLE`, `rows` only if more than `slots` divides them, then what is only
        stored in parts.
    """
    layout, config = plan.layout, plan.config
    sizes = {
        "slots": plan.num_slots,
        "rows": plan.prefill_rows,
        "experts": config.n_routed_experts,
        "heads": config.num_attention_heads,
        "ffn": config.moe_intermediate_size,
        "vocab": config.vocab_size,
        "engram_rows": max(config.engram_num_embeddings, default=0),
        "o_groups": config.o_groups,
        "embed": config.hidden_size,
    }
    gathered = [word for word, _ in layout.gathered if word not in SPLITTABLE]
    words = [word for word in SPLITTABLE if word != "rows" or layout.sequence_axes]
    found = []
    for word in [*words, *gathered]:
        axes = layout.stored_axes_of(word)
        is_stored_only = not layout.axes_of(word) and bool(axes)
        found.append(Share(word, sizes.get(word, 0), axes, plan.mesh.size(axes), is_stored_only))
    return tuple(found)


def _index_text(index: int) -> str:
    """Write an index in full, but as 48.0 M from a million on."""
    return f"{index:,}" if index < 1_000_000 else count_text(index)


def places(mesh: MeshShape) -> list[tuple[int, ...]]:
    """List the places of a grid in the order of its devices."""
    return list(itertools.product(*(range(size) for _, size in mesh.axes)))
