"""The meaning of grouped experts in plain JAX: one expert after the other, on all rows.

Separate because it is what every kernel is compared with, and what runs where none exists.
Read next: `api.py`, `../quantize/dequantize.py` (how weights are decoded).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ....arithmetic import contract, fenced, round_to
from ....arrays import Array, QuantArray
from ..quantize import quantize_dequantize_fp8, weight_values

type Weight = Array | QuantArray


class Expert(NamedTuple):
    """Weights of experts: w1 gate and w3 up [..., F, D], w2 down [..., D, F]."""

    w1: Weight
    w3: Weight
    w2: Weight


def grouped_experts(
    x: Array,
    expert_ids: Array,
    routing_weights: Array,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    layer: Array,
    *,
    swiglu_limit: float,
    quantizes_input: bool,
    row_tile: int | None,
) -> Array:
    """Compute the chosen experts as `api.grouped_experts` says; same arguments, already checked.

    An expert that no row chose is skipped. The others run on all rows and only what was chosen is
    kept, by replacement: a product with zero would let NaN through. With tiles of another number of rows
    than there are, an expert runs on its own rows, a tile of them at a time.
    """
    tile = row_tile if row_tile != x.shape[0] else None
    num_layers, num_experts = w1.shape[:2]
    stacks = Expert(w1, w3, w2)
    inputs = quantize_dequantize_fp8(x) if quantizes_input else x

    def add_expert(expert: Array, outputs: Array, weights: Expert | None = None) -> Array:
        is_chosen = expert_ids == expert

        def compute(outputs: Array) -> Array:
            # Sliced in here: no layer is copied, and what is skipped is not read.
            chosen = jax.tree.map(lambda stack: stack[layer, expert], stacks) if weights is None else weights
            routing = jnp.sum(jnp.where(is_chosen, routing_weights, 0), axis=1, keepdims=True)
            # Fenced on all sides: a product must be the same program wherever its operands come from,
            # since what is fused into it decides its algorithm on a GPU, and so the last bits.
            values = fenced(tuple(weight_values(weight, inputs.dtype) for weight in chosen))

            def run(inputs: Array, routing: Array) -> Array:
                inputs, routing = fenced((inputs, routing))
                return fenced(_expert(inputs, routing, values, swiglu_limit, quantizes_input))

            if tile is not None:
                return _in_tiles(run, inputs, routing, is_chosen, outputs, tile)
            return jnp.where(is_chosen[:, :, None], run(inputs, routing)[:, None, :], outputs)

        return lax.cond(jnp.any(is_chosen), compute, lambda outputs: outputs, outputs)

    outputs = jnp.zeros((*expert_ids.shape, x.shape[1]), x.dtype)
    # A stack of one layer that can have a gradient is scanned over, so that the gradient is stacked and not
    # added up expert by expert in arrays of the whole stack's size. Packed weights have none; scanned, they
    # would be copied whether chosen or not, and on a GPU the loop would not become a CUDA graph.
    if num_layers > 1 or isinstance(w1, QuantArray):
        # No numbers to scan over either: a loop counts by itself, and XLA copies what is scanned.
        return lax.fori_loop(0, num_experts, add_expert, outputs)
    own = jax.tree.map(lambda stack: stack[0], stacks)
    numbered = (jnp.arange(num_experts, dtype=jnp.int32), own)
    return lax.scan(lambda outputs, item: (add_expert(item[0], outputs, item[1]), None), outputs, numbered)[0]


def _in_tiles(
    run: Callable[[Array, Array], Array],
    inputs: Array,
    routing: Array,
    is_chosen: Array,
    outputs: Array,
    row_tile: int,
) -> Array:
    """Run one expert on the rows that chose it, `row_tile` at a time, and put the results in place."""
    num_rows = inputs.shape[0]
    size = -(-num_rows // row_tile) * row_tile
    is_mine = jnp.any(is_chosen, axis=1)
    # The rows of this expert first, in order; places behind them hold no row.
    number = jnp.where(is_mine, jnp.cumsum(is_mine) - 1, size)
    order = jnp.full(size, num_rows, jnp.int32)
    order = order.at[number].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    choice = jnp.argmax(is_chosen, axis=1)

    def step(turn: Array, outputs: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(order, turn * row_tile, row_tile)
        found = run(inputs.at[rows].get(mode="clip"), routing.at[rows].get(mode="clip"))
        return outputs.at[rows, choice.at[rows].get(mode="clip")].set(found, mode="drop")

    return lax.fori_loop(0, -(-jnp.sum(is_mine) // row_tile), step, outputs)


def _expert(
    inputs: Array, routing: Array, values: tuple[Array, ...], limit: float, quantizes_input: bool
) -> Array:
    """Compute one expert on [R, D] inputs, weighed by float32 [R, 1]; `values` are w1, w3, w2 decoded."""
    dtype, (w1, w3, w2) = inputs.dtype, values
    gate = round_to(contract("rd,fd->rf", inputs, w1), dtype)
    up = round_to(contract("rd,fd->rf", inputs, w3), dtype)
    hidden = round_to(clamped_swiglu(gate, up, routing, limit), dtype)
    hidden = quantize_dequantize_fp8(hidden) if quantizes_input else hidden
    return round_to(contract("rf,df->rd", hidden, w2), dtype)


def clamped_swiglu(gate: Array, up: Array, weight: Array | None, limit: float) -> Array:
    """Combine the two input projections: silu(min(g, limit)) clamp(u, +-limit), times a weight.

    The routing weight multiplies here, before w2 and its input quantisation.

    Args:
        gate: [..., F].
        up: [..., F].
        weight: [..., 1] float32, or None for 1.
        limit: the clamp.

    Returns:
        [..., F] float32, not rounded.

    Source: spec/model.md section 9.
    """
    gate = jnp.minimum(gate.astype(jnp.float32), jnp.float32(limit))
    up = jnp.clip(up.astype(jnp.float32), -limit, limit)
    activated = jax.nn.silu(gate) if weight is None else weight * jax.nn.silu(gate)
    return activated * up
