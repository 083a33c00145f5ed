"""What the tables of cases of all operations share: their form, steps to run them on, random operands.

Separate because tests and benchmarks read every table in the same way.
Read next: `pallas/sparse_attention/cases.py`, the table with the most edges.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import NOTHING, Array
from .geometry import RowGeometry
from .pallas.quantize_rows.ref import pack_rows, round_rows
from .row_format import RowFormat

RELEASED = "released"
"""Tag of cases at the released model's widths: measured on a device, left out by the tests."""


class Arguments(NamedTuple):
    """Operands of one call: `op(*positional, **keywords)`; the keywords are static."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]


class Case(Protocol):
    """One named call of an operation."""

    @property
    def name(self) -> str:
        """Unique in its table."""
        ...

    @property
    def tags(self) -> frozenset[str]:
        """What it is for."""
        ...

    def arguments(self, key: Array) -> Arguments:
        """Draw the operands."""
        ...


class Span(NamedTuple):
    """Adjacent rows of one slot: that many tokens from position `start`, then `padding` invalid rows."""

    slot: int
    start: int
    tokens: int
    padding: int = 0


def span_geometry(spans: tuple[Span, ...], rows_per_block: int = 1) -> RowGeometry:
    """Lay spans one after the other.

    Args:
        spans: in order.
        rows_per_block: adjacent rows that share a slot.

    Returns:
        The geometry of all their rows.
    """
    slots, positions, is_valid, offsets = [], [], [], []
    for span in spans:
        first = len(slots)
        total = span.tokens + span.padding
        slots += [span.slot] * total
        positions += range(span.start, span.start + total)
        is_valid += [True] * span.tokens + [False] * span.padding
        offsets += [first] * total
    return RowGeometry(
        slots=jnp.asarray(np.array(slots, np.int32)),
        positions=jnp.asarray(np.array(positions, np.int32)),
        is_valid=jnp.asarray(np.array(is_valid, bool)),
        slot_offsets=jnp.asarray(np.array(offsets, np.int32)),
        rows_per_block=rows_per_block,
    )


def one_token_each(slots: int, position: int) -> tuple[Span, ...]:
    """A decode step: one token of every slot, at slightly different positions."""
    return tuple(Span(slot, position - slot % 7, 1) for slot in range(slots))


_POOL_ROWS = 1024

_pack = jax.jit(pack_rows, static_argnames="row_format")
_round = jax.jit(round_rows, static_argnames="row_format")


class Draws:
    """Random operands from a key, without compiling a program for each shape.

    Drawn by NumPy; what is larger than a pool of rows is put together from the pool's on the device.

    Args:
        key: random key.
    """

    def __init__(self, key: Array) -> None:
        self.random = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())

    def normal(self, *shape: int, dtype: Any = "float32", scale: float = 1.0) -> Array:
        """Draw normal values with standard deviation `scale`."""
        draw = partial(self.random.standard_normal, dtype=np.float32)
        return self._rows(lambda rows: (scale * draw((rows, shape[-1]))).astype(jnp.dtype(dtype)), shape[:-1])

    def integers(self, low: int, high: int, *shape: int, dtype: Any = "int32") -> Array:
        """Draw integers low..high-1."""
        return self._rows(
            lambda rows: self.random.integers(low, high, (rows, shape[-1])).astype(dtype), shape[:-1]
        )

    def packed(self, row_format: RowFormat, channels: int, *shape: int) -> Array:
        """Draw normal rows and pack them: [*shape, width]."""
        return self._rows(lambda rows: np.asarray(self._pool(_pack, row_format, channels))[:rows], shape)

    def rounded(self, row_format: RowFormat, channels: int, *shape: int, dtype: Any = "float32") -> Array:
        """Draw normal rows and round them as packing would: [*shape, channels]."""
        return self._rows(
            lambda rows: np.asarray(self._pool(_round, row_format, channels)).astype(jnp.dtype(dtype))[:rows],
            shape,
        )

    def _pool(self, transform: Any, row_format: RowFormat, channels: int) -> Array:
        # Always a whole pool, so that the transform compiles once.
        values = self.random.standard_normal((_POOL_ROWS, channels), np.float32)
        return transform(values, row_format=row_format)

    def page_table(self, slots: int, pages_per_slot: int, num_pages: int) -> Array:
        """Draw a page table without sharing; with too few pages the rest is NOTHING or out of range.

        Args:
            slots: B.
            pages_per_slot: pages of a slot.
            num_pages: pages that exist.

        Returns:
            int32 [B, pages_per_slot].
        """
        wanted = slots * pages_per_slot
        pages = self.random.permutation(max(num_pages, wanted))[:wanted].reshape(slots, pages_per_slot)
        return jnp.asarray(np.where((pages >= num_pages) & (pages % 2 == 0), NOTHING, pages).astype(np.int32))

    def choices(self, rows: int, options: int, count: int) -> np.ndarray:
        """Draw `count` different ones of 0..options-1 for each row, NOTHING where there are too few."""
        order = np.argsort(self.random.random((rows, options)), axis=1)[:, :count].astype(np.int32)
        return np.pad(order, ((0, 0), (0, count - order.shape[1])), constant_values=NOTHING)

    def _rows(self, draw: Any, shape: tuple[int, ...]) -> Array:
        count = math.prod(shape)
        pool = draw(min(count, _POOL_ROWS))
        if count > len(pool):
            index = self.random.integers(0, len(pool), count).astype(np.int32)
            pool = jnp.asarray(pool)[jnp.asarray(index)]
        return jnp.asarray(pool.reshape(*shape, pool.shape[-1]))
