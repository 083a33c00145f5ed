"""Shapes and dtypes of operands, checked when an operation is traced.

Separate so that every operation says what it got and what it expected in the same words.
Read next: `pallas/index_top_k/api.py`, which checks with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

FLOATS = ("float32", "bfloat16")
"""What values are computed in."""


class Operand(NamedTuple):
    """One operand and what is expected of it.

    Attributes:
        array: has a shape, and a dtype if `dtypes` are given.
        dims: one word for each dimension, separated by spaces; equal words mean equal sizes.
        dtypes: names of the dtypes allowed, empty for any.
    """

    array: Any
    dims: str
    dtypes: tuple[str, ...] = ()


def check_operands(
    op: str, operands: dict[str, Operand], sizes: dict[str, int] | None = None
) -> dict[str, int]:
    """Check the operands of an operation against each other, in order.

    Args:
        op: the operation, for messages.
        operands: by name.
        sizes: sizes known beforehand, by word.

    Returns:
        The size of every word.

    Raises:
        ValueError: a shape or dtype that does not fit; what, got and expected.
    """
    sizes = dict(sizes or {})
    for name, (array, dims, dtypes) in operands.items():
        words = dims.split()
        shape = tuple(array.shape)
        is_fitting = len(shape) == len(words)
        for word, size in zip(words, shape, strict=False):
            is_fitting = is_fitting and sizes.setdefault(word, size) == size
        if not is_fitting:
            expected = ", ".join(f"{word}={sizes[word]}" if word in sizes else word for word in words)
            raise ValueError(f"{op}: {name}: got shape {shape}, expected [{expected}]")
        if dtypes and jnp.dtype(array.dtype).name not in dtypes:
            raise ValueError(f"{op}: {name}: got dtype {array.dtype}, expected {' or '.join(dtypes)}")
    return sizes


def check_geometry(op: str, geometry: Any, num_rows: int) -> None:
    """Check a `RowGeometry` against the number of rows.

    Raises:
        ValueError: a field that does not fit, or blocks that do not divide the rows.
    """
    check_operands(
        op,
        {
            "geometry.slots": Operand(geometry.slots, "R", ("int32",)),
            "geometry.positions": Operand(geometry.positions, "R", ("int32",)),
            "geometry.is_valid": Operand(geometry.is_valid, "R", ("bool",)),
            "geometry.slot_offsets": Operand(geometry.slot_offsets, "R", ("int32",)),
        },
        {"R": num_rows},
    )
    per_block = geometry.rows_per_block
    if per_block < 1 or num_rows % per_block:
        raise ValueError(
            f"{op}: geometry.rows_per_block: got {per_block}, expected a positive divisor of {num_rows} rows"
        )
