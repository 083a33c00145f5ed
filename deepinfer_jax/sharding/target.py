"""Where a step runs: a layout, and the mesh that it is on.

Separate because every step takes one and none depends on another.
Read next: `layout.py`, `place.py` (how axis words become partitions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ..arrays import Array
from .exchange import axes_index
from .layout import SINGLE, Layout
from .place import partitions


class Target(NamedTuple):
    """Where a step runs (static): a layout, and the mesh that it is on; one device without a mesh."""

    layout: Layout = SINGLE
    mesh: Mesh | None = None

    def run(self, step: Callable[..., Any], *arguments: Any, words: tuple[Any, ...], out: Any) -> Any:
        """Run a step on every device's share of its arguments.

        Args:
            step: takes the arguments.
            arguments: trees of arrays.
            words: logical axes of each argument, tuples of words at the leaves of a prefix of its tree.
            out: the same of the result.

        Returns:
            What the step returns, put together.
        """
        if self.mesh is None:
            return step(*arguments)
        specs = partitions((words, out), self.layout)
        # No check of what is replicated: words that travel as bits defeat its bookkeeping.
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        return mapped(*arguments)

    def shard(self, word: str) -> Array | int:
        """Give this device's place among those that a logical axis is divided over."""
        return axes_index(self.layout.axes_of(word))


ONE_DEVICE = Target()
