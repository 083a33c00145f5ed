"""Grouped experts as the model calls them.

Separate from the implementations so that operands are checked once, whatever runs.
Read next: `ref.py`, the meaning; `cases.py`, what is tested and measured.
"""

from __future__ import annotations

import jax.numpy as jnp

from ....arrays import Array, QuantArray
from ...checks import FLOATS, Operand, check_operands
from ...dispatch import choose
from . import ref

OP = "grouped_experts"

IMPLEMENTATIONS = {"reference": ref.grouped_experts}
"""The best first."""


def grouped_experts(
    x: Array,
    expert_ids: Array,
    routing_weights: Array,
    w1: Array | QuantArray,
    w3: Array | QuantArray,
    w2: Array | QuantArray,
    layer: Array | int,
    *,
    swiglu_limit: float,
    quantizes_input: bool,
    row_tile: int | None = None,
    implementation: str | None = None,
) -> Array:
    """Apply to every row the experts it chose, weighed; the caller adds over the choices.

    g = min(w1 x, limit); u = clamp(w3 x, +-limit); y = w2 (w silu(g) u), g, u and the hidden values
    rounded to x's dtype, w the routing weight. Differentiable where the weights are plain arrays.

    Args:
        x: float32 or bfloat16 [R, D].
        expert_ids: int32 [R, K], different ones in a row; NOTHING or any id outside 0..E-1 is none.
        routing_weights: float32 [R, K].
        w1: [L, E, F, D], plain or quantised.
        w3: [L, E, F, D].
        w2: [L, E, D, F].
        layer: int32 scalar, place in the stacks.
        swiglu_limit: the clamp (static).
        quantizes_input: whether x and the hidden values are rounded to FP8 per 32 channels (static).
        row_tile: rows of every matrix product (static), so that a row's result is bitwise that of a call
            with `row_tile` rows; None for products of all rows at once, which can be differentiated.
        implementation: a name, or None for the best.

    Returns:
        [R, K, D] in x's dtype, 0 where there is no expert. What no row chose may hold anything.

    Raises:
        ValueError: operands that do not fit.
        ImplementationError: an implementation that cannot run.

    Source: spec/model.md section 9.
    """
    function = choose(OP, implementation, IMPLEMENTATIONS)
    check_operands(
        OP,
        {
            "x": Operand(x, "R D", FLOATS),
            "expert_ids": Operand(expert_ids, "R K", ("int32",)),
            "routing_weights": Operand(routing_weights, "R K", ("float32",)),
            "w1": Operand(w1, "L E F D"),
            "w3": Operand(w3, "L E F D"),
            "w2": Operand(w2, "L E D F"),
        },
    )
    return function(
        *(x, expert_ids, routing_weights, w1, w3, w2, jnp.asarray(layer, jnp.int32)),
        swiglu_limit=swiglu_limit,
        quantizes_input=quantizes_input,
        row_tile=row_tile,
    )
