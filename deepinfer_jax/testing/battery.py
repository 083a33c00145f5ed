"""Running operations on their tables of cases.

Separate because every operation is tested, and measured, in the same way.
Read next: `../kernels/cases.py`, the form of the tables; `references.py`, what results are compared with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays import Array
from ..kernels import RowFormat, unpack_rows
from ..kernels.cases import RELEASED, Arguments, Case


def tiny_cases[AnyCase: Case](cases: Iterable[AnyCase]) -> list[AnyCase]:
    """List the cases that are small enough for a test."""
    return [case for case in cases if RELEASED not in case.tags]


def named_operands(op: Callable[..., Any], arguments: Arguments) -> dict[str, Any]:
    """Give the positional operands by the names of the operation's parameters."""
    return dict(zip(inspect.signature(op).parameters, arguments.positional, strict=False))


def draw_case(op: Callable[..., Any], case: Case, key: Array) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a case of an operation: its operands by name, and its keywords."""
    arguments = case.arguments(key)
    return named_operands(op, arguments), dict(arguments.keywords)


def call_op(
    op: Callable[..., Any],
    operands: dict[str, Any],
    keywords: dict[str, Any],
    implementation: str | None = None,
) -> Any:
    """Call an operation as the model does: inside jit, with its keywords static.

    Args:
        op: from `kernels`.
        operands: by name.
        keywords: static ones.
        implementation: a name, or None for the best.

    Returns:
        The result, its arrays as NumPy.
    """
    run = _jitted(op, tuple((keywords | {"implementation": implementation}).items()))
    return jax.tree.map(np.asarray, run(operands))


@lru_cache
def _jitted(op: Callable[..., Any], keywords: tuple[tuple[str, Any], ...]) -> Callable[[dict[str, Any]], Any]:
    return jax.jit(lambda operands: op(**operands, **dict(keywords)))


_unpack = jax.jit(partial(unpack_rows, dtype=jnp.float32), static_argnames="row_format")


def unpacked(packed: ArrayLike, row_format: RowFormat) -> NDArray[np.float32]:
    """Give the values of packed rows [..., width]; compiles once for many shapes."""
    packed = np.asarray(packed)
    rows = packed.reshape(-1, packed.shape[-1])
    padded = np.pad(rows, ((0, -len(rows) % 1024), (0, 0)))
    values = np.asarray(_unpack(padded, row_format=row_format))[: len(rows)]
    return values.reshape(*packed.shape[:-1], values.shape[-1])
