"""Mixture of experts: router, clamped SwiGLU experts, shared expert.

Separate because it is the larger part of every layer and the part that expert layouts change.
Read next: `backbone.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arithmetic import fenced, round_to
from ..arrays import NOTHING, Array
from ..config import ModelConfig
from ..kernels import clamped_swiglu, grouped_experts
from ..sharding.exchange import WHOLE, Placement, put_together, sum_parts
from ..sharding.expert_exchange import exchange_experts, physical_experts
from ..sharding.layout import Layout
from .linear import linear_float32, quantize_input
from .numerics import Numerics
from .taps import Tap, no_tap
from .weights import ExpertWeights, MoeWeights


class Routing(NamedTuple):
    """Choice of experts: ids int32 [R, K] by descending biased score, weights float32 [R, K]."""

    ids: Array
    weights: Array


def router_scores(x: Array, gate: Array) -> Array:
    """Score every expert: sqrt(softplus(gate x)).

    Args:
        x: [..., D].
        gate: [E, D].

    Returns:
        [..., E] float32.

    Source: spec/model.md section 9.
    """
    return jnp.sqrt(jax.nn.softplus(linear_float32(x, gate)))


def route(scores: Array, bias: Array, bias_vl: Array, is_image: Array, config: ModelConfig) -> Routing:
    """Choose the experts with the best biased scores and weigh them by the unbiased ones.

    ids = top-K of scores + bias (bias_vl for image tokens), ties to the lower id;
    w = scores[ids] / (sum + 1e-20) * routed_scaling_factor.

    Args:
        scores: [R, E] float32.
        bias: [E] float32 for text tokens.
        bias_vl: [E] float32 for image tokens.
        is_image: bool [R].
        config: the architecture.

    Returns:
        The routing.

    Source: spec/model.md section 9.
    """
    biased = scores + jnp.where(is_image[:, None], bias_vl[None, :], bias[None, :])
    _, ids = lax.top_k(biased, config.num_experts_per_tok)
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    total = jnp.sum(chosen, axis=-1, keepdims=True) + jnp.float32(1e-20)
    return Routing(ids, chosen / total * jnp.float32(config.routed_scaling_factor))


def shared_expert(x: Array, experts: ExpertWeights, config: ModelConfig, numerics: Numerics) -> Array:
    """Compute the expert every token uses.

    Args:
        x: [R, D].
        experts: its weights.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        float32 [R, D], not rounded: of a part of the channels, a part of the sum.
    """
    inputs = quantize_input(x, numerics)
    gate = round_to(linear_float32(inputs, experts.w1), x.dtype)
    up = round_to(linear_float32(inputs, experts.w3), x.dtype)
    hidden = round_to(clamped_swiglu(gate, up, None, config.swiglu_limit), x.dtype)
    return linear_float32(quantize_input(hidden, numerics), experts.w2)


class TokenRoles(NamedTuple):
    """What the mixture of experts must know of a row: image or text, bool [R]; there or padding, bool [R]."""

    is_image: Array
    is_valid: Array


def moe(
    x: Array,
    weights: MoeWeights,
    layer: Array | int,
    roles: TokenRoles,
    config: ModelConfig,
    numerics: Numerics,
    tap: Tap = no_tap,
    placement: Placement = WHOLE,
) -> Array:
    """Apply the mixture of experts to normed rows.

    Args:
        x: [R, D].
        weights: the layer's router and shared expert; its routed experts with all layers of its stack.
        layer: the layer's place in the stack of routed experts.
        roles: of the rows; padding chooses no expert.
        config: the architecture.
        numerics: the static choice of arithmetic.
        tap: records intermediate values.
        placement: who holds which experts and channels.

    Returns:
        [R, D] in x's dtype.

    Source: spec/model.md section 9.
    """
    scores = router_scores(x, weights.gate)
    routing = route(scores, weights.bias, weights.bias_vl, roles.is_image, config)
    experts, layer = _whole_experts(weights.experts, layer, placement.layout)
    is_divided = bool(placement.layout.axes_of("experts"))

    def compute(x: Array, held: Array, routing_weights: Array) -> Array:
        return grouped_experts(
            *(x, held, routing_weights, experts.w1, experts.w3, experts.w2, jnp.int32(layer)),
            swiglu_limit=config.swiglu_limit,
            quantizes_input=numerics.quantizes_activations,
            # Another number of rows than at home must not change a row.
            row_tile=numerics.row_tile if is_divided else None,
            implementation=numerics.implementation,
        )

    chosen = jnp.where(roles.is_valid[:, None], routing.ids, NOTHING)
    places = physical_experts(chosen, weights.expert_table, placement)
    outputs = exchange_experts(compute, x, places, routing.weights, experts.w1.shape[1], placement)
    # What follows must not be fused with an exchange that only some layouts have.
    outputs = fenced(outputs)
    routed = _sum_in_order(outputs)
    shared = shared_expert(x, weights.shared_experts, config, numerics)
    if parts := placement.layout.axes_of("ffn"):
        # 4 D bytes a row over the axes of ffn: both experts' parts in one sum.
        routed = sum_parts(routed + shared, parts, placement.num_rows)
        output = round_to(routed, x.dtype)
    else:
        shared = round_to(shared, x.dtype)
        output = round_to(routed + shared.astype(jnp.float32), x.dtype)
    tap("gate.scores", scores)
    tap("gate.ids", routing.ids)
    tap("gate.weights", routing.weights)
    tap("routed_out", routed)
    tap("shared_out", shared)
    return output


def _whole_experts(
    experts: ExpertWeights, layer: Array | int, layout: Layout
) -> tuple[ExpertWeights, Array | int]:
    """Put the layer's experts together if only their storage is divided; then it is a stack of one."""
    up, down = ("layers", "experts", "ffn", "embed"), ("layers", "experts", "embed", "ffn")
    if not any(layout.gathered_axes_of(word) for word in up):
        return experts, layer
    words = ExpertWeights(w1=up, w3=up, w2=down)
    one = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, jnp.int32(layer)), experts)
    return put_together(one, words, layout), 0


def _sum_in_order(outputs: Array) -> Array:
    """Add [R, K, D] over the choices, in float32 and in order, so that no layout changes the sum."""
    total = outputs[:, 0].astype(jnp.float32)
    for choice in range(1, outputs.shape[1]):
        total = total + outputs[:, choice].astype(jnp.float32)
    return total
