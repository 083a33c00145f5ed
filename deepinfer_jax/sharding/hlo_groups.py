"""Which devices take part in a collective together: the groups in a compiled program's text.

Separate because XLA writes them in four forms, and only these lines know them.
Read next: `hlo.py`.
"""

from __future__ import annotations

import itertools
import re

import numpy as np

from .mesh import MeshShape

_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_NAMED_AXIS = re.compile(r"'(\w+)'")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")


def replica_groups(line: str, mesh: MeshShape, num_partitions: int) -> tuple[tuple[str, ...], int]:
    """Read the groups of a collective.

    Args:
        line: the instruction, with replica_groups as mesh['a'=2,'b'=4] {'b'}, as [2,4]<=[8] or as
            {{0,1},{2,3}}, or with source_target_pairs.
        mesh: names the axes.
        num_partitions: devices of the program.

    Returns:
        The mesh axes, () if the groups lie along none, and the devices of a group.

    Raises:
        ValueError: another form.
    """
    named = _NAMED.search(line)
    if named:
        return _named_groups(named[1], named[2], mesh)
    counted = _COUNTED.search(line)
    if counted:
        groups = _counted_groups(*counted.groups())
    else:
        listed = _LISTED.search(line)
        if listed is None:
            raise ValueError(
                f"replica_groups: got {line.strip()[:200]!r}, expected mesh['a'=2] {{'a'}}, [2,4]<=[8] or "
                "{{0,1},{2,3}}; XLA writes them in a way unknown here: use the jax of constraints.txt"
            )
        lists = [
            [int(number) for number in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", listed[1])
        ]
        is_pairs = "source_target_pairs" in line
        groups = _connected(lists) if is_pairs else lists or [list(range(num_partitions))]
    size = max(len(group) for group in groups)
    return _axes_of(groups, mesh) if size > 1 else (), size


def _named_groups(sizes: str, axes: str, mesh: MeshShape) -> tuple[tuple[str, ...], int]:
    names = tuple(_NAMED_AXIS.findall(axes))
    found = dict(re.findall(r"'(\w+)'=(\d+)", sizes))
    size = 1
    for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes):
        size *= int(part or found[name])
    is_whole = ":(" not in axes and all(name in mesh.names for name in names)
    return names if is_whole else (), size


def _counted_groups(shape: str, sizes: str, order: str | None) -> list[list[int]]:
    """Groups as rows of a counter that is reshaped, transposed and reshaped."""
    counter = np.arange(int(np.prod(_integers(sizes)))).reshape(_integers(sizes))
    if order is not None:
        counter = counter.transpose(_integers(order))
    return counter.reshape(_integers(shape)).tolist()


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _connected(pairs: list[list[int]]) -> list[list[int]]:
    """Join the devices that send to one another."""
    groups: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = groups.get(source, {source}) | groups.get(target, {target})
        groups.update(dict.fromkeys(joined, joined))
    return [sorted(group) for group in {id(group): group for group in groups.values()}.values()]


def _axes_of(groups: list[list[int]], mesh: MeshShape) -> tuple[str, ...]:
    """Find the axes along which these are all the groups."""
    wanted = {frozenset(group) for group in groups}
    sizes = [size for _, size in mesh.axes]
    grid = np.arange(mesh.num_devices).reshape(sizes)
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(range(len(sizes)), count):
            rest = [axis for axis in range(len(sizes)) if axis not in chosen]
            members = grid.transpose(*rest, *chosen).reshape(
                -1, mesh.size([mesh.names[axis] for axis in chosen])
            )
            if {frozenset(group) for group in members.tolist()} == wanted:
                return tuple(mesh.names[axis] for axis in chosen)
    return ()
