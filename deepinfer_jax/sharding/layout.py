"""A layout: which logical axes are divided over which mesh axes.

Separate because it is the value a researcher writes; it knows words and sizes, never devices.
Read next: `presets.py` for examples, `place.py` (layouts to shardings), `exchange.py` (the collectives).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ..arrays import LOGICAL_AXES
from .errors import LayoutError
from .mesh import MeshShape

EVERY_AXIS = "*"
"""Stands for all axes of whatever mesh a layout is put on."""

SPLITTABLE = {
    "slots": "sequences, each with its window, pages and sampling state",
    "rows": "tokens of a prefill step; those of `slots` by default, more axes cut one long prompt",
    "experts": "routed experts",
    "heads": "query heads with their output groups",
    "ffn": "channels of every expert, routed and shared",
    "vocab": "rows of the embedding and of the output head",
    "engram_rows": "rows of the n-gram tables",
}
"""Logical axes whose work can be divided, and what each stands for."""

FOLLOWERS = {"pages": "slots", "o_groups": "heads"}
"""Logical axes that are always divided as another one is."""

GATHERABLE = frozenset(
    {
        *("experts", "ffn", "heads", "o_groups", "q_rank", "head_dim", "group_input", "index_heads"),
        *("router", "engram_output", "engram_input"),
    }
)
"""Axes of weights that can be stored divided and put together, a layer at a time, before use."""

type AxisNames = str | Sequence[str]
type Table = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Layout:
    """How a model lies on a mesh.

    `Layout("mine", "half the devices share the experts", split={"slots": "*", "experts": "model"})`

    Args:
        name: of the layout.
        intent: one line: what it is good for.
        split: logical axis -> mesh axis or axes over which both storage and work are divided; one of
            `SPLITTABLE`. "*" stands for all axes of the mesh.
        gathered: logical axis of weights -> mesh axis or axes over which only storage is divided: the
            parts are put together before use.

    Raises:
        LayoutError: a word that is no logical axis or cannot be divided so, or one that is in both
            tables.
    """

    name: str
    intent: str
    split: Mapping[str, AxisNames] | Table = ()
    gathered: Mapping[str, AxisNames] | Table = ()

    def __post_init__(self) -> None:
        # Sorted tuples, so that equal layouts are equal, hashable values.
        object.__setattr__(self, "split", _table(self.split))
        object.__setattr__(self, "gathered", _table(self.gathered))
        self._require("split", SPLITTABLE)
        self._require("gathered", GATHERABLE)
        both = sorted(dict(self._split).keys() & dict(self._gathered).keys())
        if both:
            raise LayoutError(
                f"layout {self.name!r}: got {both} in both split and gathered, expected each axis in one: "
                "split divides the work, gathered only the storage; take it out of one of them"
            )
        slots, rows = self.axes_of("slots"), self.axes_of("rows")
        if rows[: len(slots)] != slots and EVERY_AXIS not in slots + rows:
            raise LayoutError(
                f"layout {self.name!r}: got rows over {list(rows)} and slots over {list(slots)}, expected "
                "rows to begin with the axes of slots, as a row is computed where its slot lives; leave rows "
                f"out or write rows={[*slots, *(axis for axis in rows if axis not in slots)]}"
            )

    @property
    def _split(self) -> Table:
        return cast(Table, self.split)

    @property
    def _gathered(self) -> Table:
        return cast(Table, self.gathered)

    def axes_of(self, word: str) -> tuple[str, ...]:
        """Give the mesh axes over which the work along a logical axis is divided; () for none."""
        word = FOLLOWERS.get(word, word)
        table = dict(self._split)
        if word == "rows" and "rows" not in table:
            word = "slots"
        return table.get(word, ())

    def gathered_axes_of(self, word: str) -> tuple[str, ...]:
        """Give the mesh axes over which only the storage along a logical axis is divided."""
        return dict(self._gathered).get(word, ())

    def stored_axes_of(self, word: str) -> tuple[str, ...]:
        """Give the mesh axes over which an array is divided along a logical axis, for either reason."""
        return self.axes_of(word) or self.gathered_axes_of(word)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the rows of one prompt are divided."""
        return self.axes_of("rows")[len(self.axes_of("slots")) :]

    @property
    def while_decoding(self) -> Layout:
        """The layout of rows that stand for one slot each: they lie where their slots do."""
        return replace(self, split=tuple(item for item in self._split if item[0] != "rows"))

    def on(self, mesh: MeshShape) -> Layout:
        """Write out "*" as the axes of a mesh.

        Args:
            mesh: the mesh.

        Returns:
            The layout with real axis names.

        Raises:
            LayoutError: an axis that the mesh does not have, or one twice for one logical axis.
        """

        def resolve(table: Table) -> Table:
            return tuple((word, self._resolve(word, axes, mesh)) for word, axes in table)

        return replace(self, split=resolve(self._split), gathered=resolve(self._gathered))

    def _resolve(self, word: str, axes: tuple[str, ...], mesh: MeshShape) -> tuple[str, ...]:
        names = mesh.names if axes == (EVERY_AXIS,) else axes
        unknown = [axis for axis in names if axis not in mesh.names]
        if unknown or len(set(names)) != len(names):
            raise LayoutError(
                f"layout {self.name!r}: {word!r} is divided over {list(axes)}, expected different axes of "
                f'the mesh {mesh}; use its names {list(mesh.names)}, or "*" for all of them'
            )
        return names

    def _require(self, table: str, allowed: Iterable[str]) -> None:
        for word, axes in getattr(self, table):
            if word in allowed and axes:
                continue
            if not axes:
                expected, fix = "at least one mesh axis", f"leave {word!r} out"
            elif word in FOLLOWERS:
                owner = FOLLOWERS[word]
                expected, fix = f"{owner!r}, which {word!r} always follows", f"write {owner!r} instead"
            elif table == "split" and word in GATHERABLE:
                expected = f"one of {sorted(allowed)}, as work along {word!r} cannot be divided"
                fix = f"put {word!r} into gathered to divide its storage alone"
            elif word in LOGICAL_AXES:
                expected, fix = f"one of {sorted(allowed)}", f"leave {word!r} out"
            else:
                expected, fix = f"one of {sorted(allowed)}", "check the spelling"
            raise LayoutError(
                f"layout {self.name!r}: {table}: got {word!r} over {list(axes)}, expected {expected}; {fix}"
            )


def _table(table: Mapping[str, AxisNames] | Table) -> Table:
    items = table.items() if isinstance(table, Mapping) else table
    return tuple(sorted((word, (axes,) if isinstance(axes, str) else tuple(axes)) for word, axes in items))


def divide(
    name: str,
    words: Sequence[str],
    sizes: Sequence[int],
    parts: Sequence[int],
    layout: Layout,
    mesh: MeshShape,
) -> tuple[tuple[str, ...], ...]:
    """Divide an array over a mesh.

    Args:
        name: of the array, for messages.
        words: logical axis of each dimension.
        sizes: of each dimension.
        parts: indivisible parts of each dimension: heads rather than channels of heads.
        layout: on this mesh (`Layout.on`).
        mesh: the mesh.

    Returns:
        The mesh axes of each dimension, () where it is whole.

    Raises:
        LayoutError: a mesh axis used twice, or parts that do not divide evenly.
    """
    divided = tuple(layout.stored_axes_of(word) for word in words)
    used: dict[str, str] = {}
    for word, size, count, axes in zip(words, sizes, parts, divided, strict=True):
        for axis in axes:
            if axis in used:
                raise LayoutError(
                    f"layout {layout.name!r}: {name} {list(sizes)} uses mesh axis {axis!r} for "
                    f"{used[axis]!r} and for {word!r}, expected each axis once in an array; divide one of "
                    "the two over another axis"
                )
            used[axis] = word
        shares = mesh.size(axes)
        if count % shares:
            what = f"{count} {word}" if count == size else f"{count} parts ({size} channels of {word})"
            working = [number for number in range(1, count + 1) if count % number == 0]
            shown = working if len(working) <= 12 else [*working[:12], "..."]
            raise LayoutError(
                f"layout {layout.name!r} on mesh {mesh}: {name} {list(sizes)}: dimension {word!r} has "
                f"{what}, which {shares} devices along {list(axes)} cannot share evenly; numbers of devices "
                f"that work: {', '.join(str(number) for number in shown)}; change the mesh, or divide "
                f"{word!r} over fewer axes"
            )
    return divided


def describe(layout: Layout) -> list[str]:
    """Say in one line each what a layout divides."""
    lines = [f"{word} over {', '.join(axes)}" for word, axes in layout._split]
    return lines + [f"{word} stored over {', '.join(axes)}" for word, axes in layout._gathered]


SINGLE = Layout("single", "every device holds and computes everything")
"""The layout that divides nothing."""
