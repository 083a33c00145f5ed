"""The shape of a mesh: named axes and their sizes, with or without devices behind them.

Separate because layouts are checked, costed and drawn before any device exists.
Read next: `layout.py`, which maps logical axes to these names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from .errors import LayoutError

DEFAULT_NAMES = ("data", "model", "pod")
"""Axis names of a mesh written as sizes only, such as 2x4."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Devices in a grid with named axes.

    Args:
        axes: (name, size) of each axis, the slowest first: neighbours on the last axis are neighbouring
            devices.

    Raises:
        LayoutError: no axis, a size below 1, or a name that is no word or comes twice.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        is_named = all(name.isidentifier() for name in names) and len(set(names)) == len(names)
        is_sized = all(isinstance(size, int) and size >= 1 for _, size in self.axes)
        if not self.axes or not is_named or not is_sized:
            raise LayoutError(
                f"mesh: got axes {list(self.axes)}, expected one or more, each with a name of its own and a "
                "size of at least 1; write 8, 2x4 or data=2,model=4"
            )

    @classmethod
    def parse(cls, text: str | Sequence[int] | MeshShape) -> MeshShape:
        """Read a mesh written as 8, 2x4 or data=2,model=4; sizes alone are named `DEFAULT_NAMES`.

        Args:
            text: the words, or the sizes as integers.

        Returns:
            The shape.

        Raises:
            LayoutError: anything else.
        """
        if isinstance(text, MeshShape):
            return text
        words = text if isinstance(text, str) else "x".join(str(size) for size in text)
        is_named = "=" in words
        parts = [part.strip() for part in words.split("," if is_named else "x")]
        pairs = [part.split("=") for part in parts] if is_named else []
        sizes = [pair[-1] for pair in pairs] if is_named else parts
        if not all(size.strip().isdecimal() for size in sizes) or any(len(pair) != 2 for pair in pairs):
            raise LayoutError(
                f"mesh: got {words!r}, expected sizes such as 8 or 2x4, or names and sizes such as "
                "data=2,model=4; write the mesh in one of these ways"
            )
        if not is_named and len(sizes) > len(DEFAULT_NAMES):
            raise LayoutError(
                f"mesh: got {len(sizes)} sizes in {words!r}, expected names as well for more than "
                f"{len(DEFAULT_NAMES)}; write a=2,b=2,c=2,d=2"
            )
        names = [pair[0].strip() for pair in pairs] if is_named else DEFAULT_NAMES
        return cls(tuple((name, int(size)) for name, size in zip(names, sizes, strict=False)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def num_devices(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(size for _, size in self.axes)

    def size(self, along: Sequence[str]) -> int:
        """Count the devices along some axes together; 1 for none."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in along)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.axes)


def simulate_devices(shape: MeshShape) -> None:
    """Ask JAX for as many CPU devices as a mesh needs; it must not have looked for devices yet.

    Without effect on accelerators, and where XLA_FLAGS already says how many.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", shape.num_devices)


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Put devices behind a shape.

    Args:
        shape: the grid.
        devices: those to use, in order; the first ones JAX has by default.

    Returns:
        The mesh.

    Raises:
        LayoutError: fewer devices than the shape has places.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < shape.num_devices:
        raise LayoutError(
            f"mesh {shape}: needs {shape.num_devices} devices, got {len(found)} ({found[0].platform}); make "
            "the mesh smaller, or simulate devices on the CPU: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.num_devices} before Python starts"
        )
    grid = np.array(found[: shape.num_devices]).reshape([size for _, size in shape.axes])
    return Mesh(grid, shape.names, axis_types=(AxisType.Auto,) * grid.ndim)
