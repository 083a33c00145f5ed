"""The collectives of a step: what devices that hold different rows and different weights tell each other.

Separate because every collective of the package is written here and nowhere else, so that a planner can
list them. All functions run inside `shard_map`; without a division they do nothing.
What travels are 32-bit words: bits are moved, or added to zeros, never rounded.
Read next: `expert_exchange.py` (rows to experts and back), `place.py` (who holds what).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Array
from .layout import SINGLE, Layout


class Placement(NamedTuple):
    """How this device's arrays relate to those of the others (static).

    Attributes:
        layout: on the mesh that the step runs on.
        num_rows: rows of a tile that can be valid; those behind them need no exchange.
    """

    layout: Layout
    num_rows: int


WHOLE = Placement(SINGLE, 0)
"""One device holds everything."""


class Meeting(NamedTuple):
    """Mesh axes of a divided weight: `common` with the rows, and the `rest`, where rows are repeated."""

    common: tuple[str, ...]
    rest: tuple[str, ...]


def meeting(layout: Layout, word: str) -> Meeting:
    """Compare the mesh axes of a logical axis with those of the rows."""
    rows, axes = layout.axes_of("rows"), layout.axes_of(word)
    return Meeting(
        tuple(axis for axis in axes if axis in rows), tuple(axis for axis in axes if axis not in rows)
    )


def axes_size(axes: tuple[str, ...]) -> int:
    """Count the devices along mesh axes, as a Python integer."""
    return lax.axis_size(axes) if axes else 1


def axes_index(axes: tuple[str, ...]) -> Array | int:
    """Give this device's place along mesh axes."""
    return lax.axis_index(axes) if axes else 0


def all_gather(values: Array, axes: tuple[str, ...], dimension: int = 0) -> Array:
    """Join the parts of all devices along mesh axes; the array itself for no axes."""
    return lax.all_gather(values, axes, axis=dimension, tiled=True) if axes else values


def total_of(values: Array, axes: tuple[str, ...]) -> Array:
    """Add up the values of all devices along mesh axes; each gets the same sum."""
    return lax.psum(values, axes) if axes else values


def largest_of(values: Array, axes: tuple[str, ...]) -> Array:
    """Take the largest values of all devices along mesh axes."""
    return lax.pmax(values, axes) if axes else values


def to_words(tree: Any) -> Array:
    """Join the bytes of arrays [..., width] and see them as words, zeros at the end.

    Args:
        tree: a tree of arrays with equal leading dimensions.

    Returns:
        uint32 [..., words].
    """
    parts = [_bytes_of(leaf) for leaf in jax.tree.leaves(tree)]
    joined = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    padding = -joined.shape[-1] % 4
    joined = jnp.pad(joined, [(0, 0)] * (joined.ndim - 1) + [(0, padding)])
    return lax.bitcast_convert_type(joined.reshape(*joined.shape[:-1], -1, 4), jnp.uint32)


def from_words(words: Array, like: Any) -> Any:
    """Turn words back into arrays: the inverse of `to_words`.

    Args:
        words: uint32 [..., words].
        like: a tree of arrays [..., width] with the widths and dtypes of the result.

    Returns:
        The tree, its leading dimensions those of `words`.
    """
    lead = words.shape[:-1]
    joined = lax.bitcast_convert_type(words, jnp.uint8).reshape(*lead, -1)
    start, leaves = 0, []
    for leaf in jax.tree.leaves(like):
        size = leaf.dtype.itemsize
        part = joined[..., start : start + leaf.shape[-1] * size]
        start += leaf.shape[-1] * size
        if size > 1:
            part = part.reshape(*lead, leaf.shape[-1], size)
        leaves.append(lax.bitcast_convert_type(part, leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def add_words(words: Array, where: Meeting) -> Array:
    """Bring words home: each is zero on all devices but one.

    Over `common`, reduce-scatter of [devices * rows, ...] to [rows, ...]; over `rest`, all-reduce.

    Args:
        words: uint32 [devices * rows, ...].
        where: the mesh axes.

    Returns:
        uint32 [rows, ...].
    """
    if where.common:
        words = lax.psum_scatter(words, where.common, scatter_dimension=0, tiled=True)
    return lax.psum(words, where.rest) if where.rest else words


def bring_rows(table: Any, indices: Array, word: str, placement: Placement) -> tuple[Any, Array]:
    """Bring the rows of a divided table to those who asked: one masked gather and one reduction.

    All indices go to all holders, 4 bytes each; each holder answers with the bytes of its rows and zeros
    elsewhere. Nothing is rounded, so the result is the row as stored.

    Args:
        table: array or `QuantArray` [table rows of this device, width].
        indices: int32 [R, C], rows of the whole table.
        word: logical axis of the table's rows.
        placement: this device's.

    Returns:
        A table and int32 [R, C] indices into it: the arguments themselves if the table is whole.
    """
    layout, num_rows = placement
    axes, where = layout.axes_of(word), meeting(layout, word)
    if not axes:
        return table, indices
    wanted = all_gather(indices[:num_rows], where.common)
    held = jax.tree.leaves(table)[0].shape[0]
    places = wanted - axes_index(axes) * held
    is_here = (places >= 0) & (places < held)
    found = jax.tree.map(lambda stored: stored[jnp.where(is_here, places, 0)], table)
    words = jnp.where(is_here[:, :, None], to_words(found), jnp.uint32(0))
    columns = indices.shape[1]
    words = add_words(words.reshape(words.shape[0], -1), where)
    brought = from_words(words.reshape(num_rows * columns, -1), table)
    numbers = jnp.arange(num_rows * columns, dtype=jnp.int32).reshape(num_rows, columns)
    return brought, pad_rows(numbers, indices.shape[0])


def bring_columns(parts: Array, axes: tuple[str, ...], own: tuple[str, ...], rest: tuple[str, ...]) -> Array:
    """Bring the columns of all devices home: each has some columns of the rows of all.

    Args:
        parts: [devices along `own` * R, columns of this device].
        axes: over which the columns are divided, in order.
        own: those of them along which the rows differ: all-to-all.
        rest: the others: all-gather.

    Returns:
        [R, columns].
    """
    if own:
        parts = lax.all_to_all(parts, own, split_axis=0, concat_axis=1, tiled=True)
    if not rest:
        return parts
    parts = all_gather(parts, rest, 1)
    if not own:
        return parts
    # Joined by `rest` first, then by `own`: put the columns back into the order of `axes`.
    joined = (*rest, *own)
    blocks = parts.reshape(parts.shape[0], *(axes_size((axis,)) for axis in joined), -1)
    order = [1 + joined.index(axis) for axis in axes]
    return blocks.transpose(0, *order, blocks.ndim - 1).reshape(parts.shape)


def bring_chosen(values: Array, row_ids: Array, chosen: Array, axes: tuple[str, ...]) -> Array:
    """Bring chosen rows to all devices that share them out: all-reduce of words, zero elsewhere.

    Args:
        values: [R, D], rows of this device.
        row_ids: int32 [R], their places among the rows of all.
        chosen: int32 [B], places of the rows wanted; out of range for none.
        axes: mesh axes over which the rows are divided.

    Returns:
        [B, D], 0 where a place is out of range.
    """
    is_here = row_ids[None, :] == chosen[:, None]
    found = to_words(values[jnp.argmax(is_here, axis=1)])
    words = jnp.where(jnp.any(is_here, axis=1)[:, None], found, jnp.uint32(0))
    return from_words(add_words(words, Meeting((), axes)), values)


def sum_parts(parts: Array, axes: tuple[str, ...], num_rows: int) -> Array:
    """Add the parts of a divided contraction over mesh axes, in float32: all-reduce of the rows that count.

    Args:
        parts: float32 [R, ...].
        axes: mesh axes.
        num_rows: rows that can be valid.

    Returns:
        float32 [R, ...], 0 in the other rows.
    """
    return pad_rows(lax.psum(parts[:num_rows], axes), parts.shape[0]) if axes else parts


def put_together(tree: Any, words: Any, layout: Layout) -> Any:
    """Gather weights whose storage alone is divided.

    Args:
        tree: arrays and `QuantArray`s, at most as divided as the layout says.
        words: the same tree with the logical axes of each, tuples of words.
        layout: on the mesh.

    Returns:
        The tree, whole along the gathered axes.
    """
    if not layout.gathered:
        return tree

    def join(part: Array, words: tuple[str, ...]) -> Array:
        # As integers: a CPU would widen short floats on the way.
        integer = {1: jnp.uint8, 2: jnp.uint16}.get(part.dtype.itemsize, part.dtype)
        moved = lax.bitcast_convert_type(part, integer)
        for dimension, word in enumerate(words):
            moved = _join_blocks(moved, layout.gathered_axes_of(word), dimension)
        return lax.bitcast_convert_type(moved, part.dtype)

    def gather(words: tuple[str, ...], weight: Any) -> Any:
        return jax.tree.map(lambda part: join(part, words), weight)

    return jax.tree.map(gather, words, tree, is_leaf=lambda node: isinstance(node, tuple))


def _join_blocks(part: Array, axes: tuple[str, ...], dimension: int) -> Array:
    """Gather along an inner dimension: whole blocks first, since XLA would copy the stack they come from."""
    if not axes:
        return part
    blocks = jnp.moveaxis(lax.all_gather(part, axes, axis=0, tiled=False), 0, dimension)
    shape = list(part.shape)
    shape[dimension] *= blocks.shape[dimension]
    return blocks.reshape(shape)


def pad_rows(values: Array, num_rows: int) -> Array:
    """Add zero rows at the end."""
    return jnp.pad(values, [(0, num_rows - values.shape[0])] + [(0, 0)] * (values.ndim - 1))


def _bytes_of(values: Array) -> Array:
    found = lax.bitcast_convert_type(values, jnp.uint8)
    return found.reshape(*values.shape[:-1], -1)
