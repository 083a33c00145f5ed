"""Arrays on a mesh: from logical axes to partitions, and from host arrays to divided ones.

Separate because it is the only part of this folder that touches real devices.
Read next: `layout.py` (the table it reads), `mesh.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..arrays import ArraySpec, spec_leaves
from .layout import Layout, divide
from .mesh import MeshShape

PADDED = "engram_rows"
"""The one logical axis that is filled up to divide evenly: no table size of the release does. Rows that
fill up are never read."""

QUANTIZED_PART = 32
"""Channels that share a scale and so stay together."""


def is_words(node: object) -> bool:
    """Tell a tuple of logical axes, as a leaf of a tree of them."""
    return type(node) is tuple and all(isinstance(word, str) for word in node)


def partitions(words: Any, layout: Layout) -> Any:
    """Turn a tree of logical axes into partition specs.

    Args:
        words: a tree with tuples of words at its leaves; dimensions behind the last word are whole.
        layout: on a mesh.

    Returns:
        The same tree of `PartitionSpec`.
    """

    def partition(axes: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(layout.stored_axes_of(word) or None for word in axes))

    return jax.tree.map(partition, words, is_leaf=is_words)


def check_weights(
    specs: Any, layout: Layout, mesh: MeshShape, groups: Mapping[str, int], redundant: int = 0
) -> None:
    """Refuse a layout that cannot divide the weights, before anything is loaded.

    Args:
        specs: a tree of `ArraySpec`.
        layout: on the mesh.
        mesh: the mesh.
        groups: logical axis -> indivisible parts, where channels belong together: heads, output groups.
        redundant: further places for routed experts.

    Raises:
        LayoutError: as in `divide`.
    """
    for name, spec in spec_leaves(specs):
        words, sizes = spec.stacked_axes, list(spec.stacked_shape)
        if spec.experts:
            sizes[words.index("experts")] += redundant
        parts = [
            _num_parts(spec, word, size, layout, mesh, groups)
            for word, size in zip(words, sizes, strict=True)
        ]
        divide(name, words, sizes, parts, layout, mesh)


def _num_parts(
    spec: ArraySpec, word: str, size: int, layout: Layout, mesh: MeshShape, groups: Mapping[str, int]
) -> int:
    if word == PADDED:
        return padded_size(size, mesh.size(layout.stored_axes_of(word)))
    if word in groups and layout.axes_of(word):
        return groups[word]
    has_scales = spec.storage.is_quantized and word in spec.axes
    is_row = has_scales and word == spec.axes[0]
    return size // QUANTIZED_PART if has_scales and not (is_row and spec.storage.block_rows == 1) else size


def padded_size(size: int, shares: int) -> int:
    """Fill a size up so that it divides into equal shares."""
    return -(-size // shares) * shares


def place_array(array: Any, sharding: NamedSharding) -> jax.Array:
    """Put one array on a mesh, whose devices may belong to several processes that all have it."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place_tree(
    tree: Any,
    words: Any,
    layout: Layout,
    mesh: Mesh,
    put: Callable[[Any, NamedSharding], Any] = place_array,
) -> Any:
    """Put a tree of host arrays on a mesh.

    Args:
        tree: of arrays.
        words: logical axes at the leaves of a prefix of the tree.
        layout: on the mesh.
        mesh: the devices.
        put: what is done with an array and its sharding.

    Returns:
        The tree of divided arrays.
    """

    def place(axes: tuple[str, ...], part: Any) -> Any:
        sharding = NamedSharding(mesh, partitions(axes, layout))
        return jax.tree.map(lambda array: put(array, sharding), part)

    return jax.tree.map(place, words, tree, is_leaf=is_words)


def mesh_shape(mesh: Mesh) -> MeshShape:
    """Give the shape of a mesh with devices."""
    return MeshShape(tuple((str(name), size) for name, size in mesh.shape.items()))


def pad_table(table: Any, shares: int) -> Any:
    """Fill a table of rows up so that these divide into equal shares."""

    def pad(array: jax.Array) -> jax.Array:
        rows = padded_size(array.shape[0], shares) - array.shape[0]
        return jnp.pad(array, [(0, rows)] + [(0, 0)] * (array.ndim - 1)) if rows else array

    return jax.tree.map(pad, table)
