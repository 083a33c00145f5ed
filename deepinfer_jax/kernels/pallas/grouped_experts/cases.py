"""Named cases of grouped experts: storages, idle and absent experts, and the released sizes.

Separate because tests and benchmarks read the same table.
Read next: `../../cases.py`, what all tables share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ....arrays import NOTHING, Array, QuantArray, Storage
from ...cases import RELEASED, Arguments, Draws


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """One call; the defaults are tiny.

    Args:
        name: unique in the table.
        tags: what it is for.
        rows: R.
        storage: of the weights; BF16 stands for plain arrays of `dtype`.
        dtype: of x.
        quantizes_input: whether activations are rounded.
        width: D.
        hidden: F.
        experts: E.
        used: how many of the experts, the first ones, are chosen by anybody.
        choices: K.
        layers: L; the last one is computed.
        limit: the clamp.
        absent: share of the choices that are NOTHING.
    """

    name: str
    tags: frozenset[str] = frozenset()
    rows: int = 7
    storage: Storage = Storage.BF16
    dtype: str = "float32"
    quantizes_input: bool = False
    width: int = 64
    hidden: int = 32
    experts: int = 6
    used: int = 6
    choices: int = 2
    layers: int = 2
    limit: float = 1.5
    absent: float = 0.0

    def arguments(self, key: Array) -> Arguments:
        """Draw the operands."""
        draws, dtype = Draws(key), jnp.dtype(self.dtype)
        ids = draws.choices(self.rows, self.used, self.choices)
        ids = np.where(draws.random.random(ids.shape) < self.absent, NOTHING, ids)
        stack = (self.layers, self.experts)
        positional = (
            draws.normal(self.rows, self.width, dtype=dtype),
            jnp.asarray(ids),
            jnp.asarray(draws.random.uniform(0.2, 1.3, ids.shape).astype(np.float32)),
            draw_weight(draws, (*stack, self.hidden, self.width), self.storage, dtype),
            draw_weight(draws, (*stack, self.hidden, self.width), self.storage, dtype),
            draw_weight(draws, (*stack, self.width, self.hidden), self.storage, dtype),
            jnp.int32(self.layers - 1),
        )
        return Arguments(positional, {"swiglu_limit": self.limit, "quantizes_input": self.quantizes_input})


def draw_weight(draws: Draws, shape: tuple[int, ...], storage: Storage, dtype: Any) -> Array | QuantArray:
    """Draw a weight whose products with normal inputs are near 1.

    Args:
        draws: where from.
        shape: of the values.
        storage: BF16 for a plain array, or a quantised storage.
        dtype: of a plain array.

    Returns:
        A plain array, or payload and scales drawn as bytes.
    """
    *stack, rows, columns = shape
    if not storage.is_quantized:
        return draws.normal(*shape, dtype=dtype, scale=1.5 * columns**-0.5)
    # e2m1 values of random bytes have a deviation near 3.
    near = 127 - round(math.log2(columns) / 2 - 0.5) - 2 * (storage is Storage.MXFP4)
    scale_rows = -(-rows // storage.block_rows)
    scales = draws.integers(near - 1, near + 2, *stack, scale_rows, -(-columns // 32), dtype="uint8")
    if storage is Storage.MXFP4:
        payload = draws.integers(0, 256, *stack, rows, columns // 2, dtype="uint8")
    else:
        payload = draws.normal(*shape, dtype=jnp.float8_e4m3fn)
    return QuantArray(payload, scales, storage, ("ffn", "embed"))


CASES = (
    ExpertsCase("plain"),
    ExpertsCase("one_layer", layers=1),
    ExpertsCase("one_row", rows=1),
    ExpertsCase("idle_experts", experts=16, used=3),
    ExpertsCase("absent", absent=0.5),
    ExpertsCase("nothing_chosen", absent=1.1),
    ExpertsCase("mxfp4", storage=Storage.MXFP4),
    ExpertsCase("fp8_block", storage=Storage.FP8_BLOCK),
    ExpertsCase("mxfp4_quantized_input", storage=Storage.MXFP4, quantizes_input=True),
    ExpertsCase("mxfp4_bfloat16", storage=Storage.MXFP4, dtype="bfloat16", quantizes_input=True),
    *(
        ExpertsCase(
            f"released_{rows}", frozenset({RELEASED}), rows=rows, storage=Storage.MXFP4, dtype="bfloat16",
            quantizes_input=True, width=5120, hidden=2304, experts=384, used=384, choices=6, layers=1,
            limit=10.0,
        )
        for rows in (1, 8, 64, 256)
    ),
)  # fmt: skip
"""Names are unique."""
