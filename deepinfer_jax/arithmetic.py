"""Rounding, contraction and tiles of rows as this package means them, whatever XLA would make of them.

Separate because kernels, model, sampling and training must round at the same places.
Read next: `kernels/__init__.py` and `model/linear.py`, which build on these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .arrays import Array


def round_to(values: Array, dtype: Any) -> Array:
    """Cast to `dtype` so that the rounding really happens.

    XLA may drop a float32 -> bfloat16 -> float32 round trip inside one fusion, which would make the
    result depend on what was fused; `reduce_precision` is never dropped.

    Args:
        values: any floating array.
        dtype: target dtype.

    Returns:
        `values` rounded to nearest even and cast.

    Source: spec/model.md section 2, "XLA traps".
    """
    if values.dtype == dtype:
        return values
    if values.dtype == jnp.float32 and dtype == jnp.bfloat16:
        values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(dtype)


def contract(subscripts: str, *operands: Array) -> Array:
    """Einsum with float32 accumulation and float32 result, at full precision on every device."""
    return jnp.einsum(
        subscripts, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def fenced[T](values: T) -> T:
    """Keep XLA from fusing across the border of a tile: what is fused decides the last bits."""
    return lax.optimization_barrier(values)


def zeros_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """Give zeros in the shapes of what a function would return, without running it."""
    shapes = jax.eval_shape(function, *arguments)
    return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)


def scan_counted[C, T](step: Callable[[C, Array], tuple[C, T]], carry: C, count: int) -> tuple[C, T]:
    """Run a step for the numbers 0, 1, .. as `lax.scan` over them would, by a counter that XLA cannot follow.

    A slice at a number that XLA can foresee is a copy of its own on a GPU, which keeps the loop, and all
    around it, out of a CUDA graph (JAX 0.11.2; seen in XLA's list of launches).

    Args:
        step: of the carried values and the number, to the next ones and a result.
        carry: the first values.
        count: how many numbers.

    Returns:
        The last values, and all results, stacked.
    """

    # Traced once, though its shapes are asked for before it is called.
    traced_step: Any = jax.jit(step, inline=True)

    def run(_: Array, counted: tuple[Array, C, T]) -> tuple[Array, C, T]:
        number, carry, results = counted
        carry, result = traced_step(carry, number)
        put = partial(lax.dynamic_update_index_in_dim, index=number, axis=0)
        return number + fenced(jnp.int32(1)), carry, jax.tree.map(put, results, result)

    shapes = jax.eval_shape(traced_step, carry, jnp.int32(0))[1]
    results: Any = jax.tree.map(lambda one: jnp.zeros((count, *one.shape), one.dtype), shapes)
    _, carry, results = lax.fori_loop(0, count, run, (jnp.int32(0), carry, results))
    return carry, results


def scan_rows[C, T](step: Callable[[C, Any], tuple[C, T]], carry: C, rows: Any) -> tuple[C, T]:
    """Do as `lax.scan` does, slicing by a counter of its own: see `scan_counted`."""

    def run(carry: C, number: Array) -> tuple[C, T]:
        take = partial(lax.dynamic_index_in_dim, index=number, keepdims=False)
        return step(carry, jax.tree.map(take, rows))

    return scan_counted(run, carry, jax.tree.leaves(rows)[0].shape[0])


def cut_tiles[T](rows: T, tile: int, mode: str = "constant") -> T:
    """Cut rows into tiles of one size.

    Args:
        rows: a tree of arrays [R, ...].
        tile: rows of a tile.
        mode: what fills the last tile up: "constant" for zeros, "edge" for copies of the last row.

    Returns:
        The tree with arrays [tiles, tile, ...].
    """

    def cut(array: Array) -> Array:
        padding = [(0, -array.shape[0] % tile)] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, padding, mode=mode)
        return padded.reshape(padded.shape[0] // tile, tile, *array.shape[1:])

    return jax.tree.map(cut, rows)


def join_tiles[T](tiles: T, num_rows: int) -> T:
    """Put tiles [tiles, tile, ...] together again and drop what filled up the last one: [R, ...]."""

    def join(array: Array) -> Array:
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])[:num_rows]

    return jax.tree.map(join, tiles)


def map_tiles(function: Callable[[Any], Any], rows: Any, tile: int) -> Any:
    """Apply a function of rows tile by tile, so that a row's result is bitwise the same in any number.

    Every tile has one shape, and the last one is filled up with copies of the last row, which need no
    work that it does not need itself. A loop of one tile is inlined; the fences keep it from being fused
    into other code than a loop of many.

    Args:
        function: of a tree of arrays [tile, ...], to a tree of such arrays.
        rows: a tree of arrays [R, ...].
        tile: rows of a tile.

    Returns:
        The results as a tree of arrays [R, ...].

    Source: spec/platform.md section 8 (rows of a product differ between shapes).
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    tiles = cut_tiles(rows, tile, mode="edge")
    _, results = scan_rows(lambda _, part: (None, fenced(function(fenced(part)))), None, tiles)
    return join_tiles(results, num_rows)


def map_used_tiles(function: Callable[[Any], Any], rows: Any, is_used: Array, tile: int) -> Any:
    """Do the same as `map_tiles`, but skip tiles without a row that is used.

    Args:
        function: of a tree of arrays [tile, ...], to a tree of such arrays.
        rows: a tree of arrays [R, ...].
        is_used: bool [R].
        tile: rows of a tile.

    Returns:
        The results as a tree of arrays [R, ...]; zeros, or anything, where a row is not used.
    """
    # Traced once, though its shapes are asked for before it is called.
    run = jax.jit(lambda part: fenced(function(fenced(part))), inline=True)

    def run_if_used(part: tuple[Any, Array]) -> Any:
        nothing = zeros_of(run, part[0])
        return lax.cond(part[1].any(), run, lambda _: nothing, part[0])

    tiles = (cut_tiles(rows, tile, mode="edge"), cut_tiles(is_used, tile))
    _, results = scan_rows(lambda _, part: (None, run_if_used(part)), None, tiles)
    return join_tiles(results, is_used.shape[0])
