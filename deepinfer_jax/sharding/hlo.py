"""Collectives of a compiled program, read from its text.

Separate because it knows XLA's text format and nothing of models; what is read here judges predictions.
Read next: `layout_plan.py`, the same things predicted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .hlo_groups import replica_groups
from .mesh import MeshShape

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
"""Every collective of XLA; devices exchange nothing in any other way."""


@dataclass(frozen=True, slots=True)
class FoundCollective:
    """One kind of collective in a compiled program.

    Args:
        kind: one of `KINDS`; the asynchronous forms are called like the others.
        axes: mesh axes, () if the devices that take part are no group along axes of the given mesh.
        num_devices: that take part together.
        num_bytes: operands of one call on each device.
        calls: in one run of the program.
        depends_on_data: whether it is in a loop whose length only the data decide, counted as one time
            around, or in one branch of several.
        op_name: of the first of them: JAX's scopes and the operation, as in "jit(f)/while/body/psum".
    """

    kind: str
    axes: tuple[str, ...]
    num_devices: int
    num_bytes: int
    calls: int
    depends_on_data: bool
    op_name: str


def read_collectives(text: str, mesh: MeshShape) -> list[FoundCollective]:
    """Count the collectives that one run of a program executes.

    Loops multiply by their known length, however deep they are nested. Groups of one device, which
    exchange nothing, are left out. Collectives that the compiler has combined into one count each.

    Args:
        text: of the compiled program, `compiled.as_text()`.
        mesh: on which it was compiled.

    Returns:
        The collectives, equal ones merged, in the order of the program's text.

    Raises:
        ValueError: a text that is no compiled program, or groups in an unknown form.
    """
    program = _Program(text, mesh)
    merged: dict[tuple[str, tuple[str, ...], int, int, bool], FoundCollective] = {}
    for found in program.collectives(program.entry):
        key = (found.kind, found.axes, found.num_devices, found.num_bytes, found.depends_on_data)
        earlier = merged.get(key)
        merged[key] = found if earlier is None else replace(earlier, calls=earlier.calls + found.calls)
    return list(merged.values())


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
# An opcode is the first word before a parenthesis that a space precedes; types have none.
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_CALLEE = re.compile(r"(\w+)=(?:%([\w.-]+)|\{((?:%[\w.-]+(?:, )?)+)\})")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")

_CALLS = {
    "while": ("body", "condition"),
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls", "called_computation"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}
"""Opcode -> attributes that name computations which it runs and that may hold collectives."""


def read_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Split a compiled program into its computations.

    Args:
        text: of the program.

    Returns:
        The lines of each computation by name, and the name of the one that the program starts with.

    Raises:
        ValueError: a text that is no compiled program.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            lines = computations.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        else:
            lines.append(line)
    if not entry:
        raise ValueError(
            f"program text: got {len(text)} characters without an ENTRY computation, expected HLO; pass "
            "the text of a compiled program, jax.jit(f).lower(...).compile().as_text()"
        )
    return computations, entry


class _Program:
    """Computations by name, each a list of its lines."""

    def __init__(self, text: str, mesh: MeshShape) -> None:
        self.mesh = mesh
        self._found: dict[str, list[FoundCollective]] = {}
        partitions = _PARTITIONS.search(text, 0, max(text.find("\n"), 0))
        self.num_partitions = int(partitions[1]) if partitions else 1
        self.computations, self.entry = read_computations(text)

    def collectives(self, name: str) -> list[FoundCollective]:
        """List the collectives of one run of a computation, what it calls included."""
        if name not in self._found:
            self._found[name] = list(self._read(self.computations[name]))
        return self._found[name]

    def _read(self, lines: list[str]) -> Iterable[FoundCollective]:
        for line in lines:
            opcode = _OPCODE.search(line)
            kind = opcode[1].removesuffix("-start") if opcode else ""
            if kind in KINDS:
                yield from self._collectives_of(kind, line, lines)
            elif opcode and opcode[1] in _CALLS:
                yield from self._called(opcode[1], line)

    def _called(self, opcode: str, line: str) -> Iterable[FoundCollective]:
        trips = _TRIPS.search(line) if opcode == "while" else None
        depends_on_data = opcode == "conditional" or (opcode == "while" and trips is None)
        for attribute, name in _callees(line, _CALLS[opcode]):
            # A loop's condition is asked once more than its body runs.
            runs = int(trips[1]) + (attribute == "condition") if trips else 1
            for found in self.collectives(name):
                yield replace(
                    found,
                    calls=found.calls * runs,
                    depends_on_data=found.depends_on_data or depends_on_data,
                )

    def _collectives_of(self, kind: str, line: str, lines: list[str]) -> Iterable[FoundCollective]:
        """Read an instruction; it has several operands if it is several collectives combined."""
        axes, num_devices = replica_groups(line, self.mesh, self.num_partitions)
        sizes = _operand_bytes(line, lines)
        op_name = _OP_NAME.search(line)
        # An all-to-all may instead have an operand for each device that it sends to.
        for num_bytes in [sum(sizes)] if kind == "all-to-all" else sizes:
            if num_devices > 1:
                name = op_name[1] if op_name else ""
                yield FoundCollective(kind, axes, num_devices, num_bytes, 1, False, name)


def _callees(line: str, attributes: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """List (attribute, computation) of those attributes of an instruction that name computations."""
    for attribute, single, several in _CALLEE.findall(line):
        if attribute in attributes:
            names = [single] if single else several.replace("%", "").split(", ")
            yield from ((attribute, name) for name in names)


def _operand_bytes(line: str, lines: list[str]) -> list[int]:
    """List the bytes of an instruction's operands, whose types stand where they are computed."""
    start = _OPCODE.search(line)
    assert start is not None
    operands = re.findall(r"%([\w.-]+)", line[start.end() : line.index(")", start.end())])
    types = {}
    for other in lines:
        instruction = _INSTRUCTION.match(other)
        if instruction and instruction[1] in operands:
            opcode = _OPCODE.search(" " + instruction[2])
            types[instruction[1]] = instruction[2][: opcode.start() if opcode else None]
    return [_type_bytes(types[name]) for name in operands]


def _type_bytes(text: str) -> int:
    """Count the bytes of an array type such as bf16[64,512]{1,0}, or of all arrays of a tuple."""
    total = 0
    for word, bits, sizes in _ARRAY.findall(text):
        elements = math.prod(int(size) for size in sizes.split(",") if size)
        total += -(-elements * (8 if word == "pred" else int(bits or 0)) // 8)
    return total
