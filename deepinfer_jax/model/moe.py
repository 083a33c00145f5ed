"""Mixture of experts: router, clamped SwiGLU experts, shared expert.

Separate because it is the larger part of every layer and the part that expert layouts change.
Read next: `backbone.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Array
from ..config import ModelConfig
from .linear import contract, linear_float32, quantize_input
from .numerics import Numerics, round_to
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


def routed_experts(
    x: Array, routing: Routing, experts: ExpertWeights, config: ModelConfig, numerics: Numerics
) -> Array:
    """Sum the chosen experts' outputs in order of choice.

    Every expert is computed for every row and what was not chosen is replaced by zero (not
    multiplied: an unchosen expert's weights have no effect even if they are NaN).

    Args:
        x: [R, D].
        routing: the choice.
        experts: [E, ...] weights.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        [R, D] float32.

    Source: spec/model.md section 9.
    """
    is_chosen = routing.ids[:, :, None] == jnp.arange(config.n_routed_experts, dtype=jnp.int32)[None, None, :]
    weights = jnp.sum(jnp.where(is_chosen, routing.weights[:, :, None], 0.0), axis=1)  # [R, E]
    inputs = quantize_input(x, numerics)
    gate = round_to(contract("rd,efd->erf", inputs, experts.w1.astype(x.dtype)), x.dtype)
    up = round_to(contract("rd,efd->erf", inputs, experts.w3.astype(x.dtype)), x.dtype)
    hidden = clamped_swiglu(gate, up, weights.T[:, :, None], config.swiglu_limit)
    hidden = quantize_input(round_to(hidden, x.dtype), numerics)
    outputs = round_to(contract("erf,edf->red", hidden, experts.w2.astype(x.dtype)), x.dtype)
    chosen = jnp.take_along_axis(outputs, routing.ids[:, :, None], axis=1).astype(jnp.float32)
    total = chosen[:, 0]
    for choice in range(1, config.num_experts_per_tok):
        total = total + chosen[:, choice]
    return total


def shared_expert(x: Array, experts: ExpertWeights, config: ModelConfig, numerics: Numerics) -> Array:
    """Compute the expert every token uses.

    Args:
        x: [R, D].
        experts: its weights.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        [R, D] in x's dtype.
    """
    inputs = quantize_input(x, numerics)
    gate = round_to(linear_float32(inputs, experts.w1), x.dtype)
    up = round_to(linear_float32(inputs, experts.w3), x.dtype)
    hidden = round_to(clamped_swiglu(gate, up, None, config.swiglu_limit), x.dtype)
    return round_to(linear_float32(quantize_input(hidden, numerics), experts.w2), x.dtype)


def moe(
    x: Array,
    weights: MoeWeights,
    is_image: Array,
    config: ModelConfig,
    numerics: Numerics,
    tap: Tap = no_tap,
) -> Array:
    """Apply the mixture of experts to normed rows.

    Args:
        x: [R, D].
        weights: the layer's router and experts.
        is_image: bool [R].
        config: the architecture.
        numerics: the static choice of arithmetic.
        tap: records intermediate values.

    Returns:
        [R, D] in x's dtype.

    Source: spec/model.md section 9.
    """
    scores = router_scores(x, weights.gate)
    routing = route(scores, weights.bias, weights.bias_vl, is_image, config)
    routed = routed_experts(x, routing, weights.experts, config, numerics)
    shared = shared_expert(x, weights.shared_experts, config, numerics)
    output = round_to(routed + shared.astype(jnp.float32), x.dtype)
    tap("gate.scores", scores)
    tap("gate.ids", routing.ids)
    tap("gate.weights", routing.weights)
    tap("routed_out", routed)
    tap("shared_out", shared)
    return output
