"""Optimisation steps of the draft: the trunk's features once, then blocks at random anchors of them.

Separate from `draft.py` because this is all that runs on the device. The trunk is frozen, so what the
draft reads of it is computed once for all rows and kept, and a step touches the draft alone.
Read next: `draft_forward.py`, `draft_losses.py`, `draft.py` (the loop on the host).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax

from ..arrays import Array
from ..config import ModelConfig
from ..model.draft_weights import DraftWeights, draft_weight_specs
from ..model.linear import linear_float32
from ..model.numerics import Numerics
from ..model.weights import Weights
from .draft_forward import DraftContext, draft_forward, take_places
from .draft_losses import DraftLoss, draft_loss
from .evaluate import device_rows, take_batch
from .forward import TrainingMode, forward
from .optimizer import cast_as_stored, residual_start
from .packing import PackedRows

PEAK_RATE = 1.5e-3
WARMUP, DECAY, LAST_RATE = 0.04, 0.4, 0.02
"""Parts of the run in which the rate rises and falls, and what it falls to as a part of the peak."""

BIAS_STEP = 1e-3
"""Step of the router biases against their load error, as in the trunk's training."""


class Features(struct.PyTreeNode):
    """Packed rows and what the frozen trunk says of them.

    Attributes:
        tokens: uint16 [rows, T].
        segments: uint8 [rows, T].
        loss_codes: uint8 [rows, T], over 0 where the target wrote the token.
        inputs: [rows, T, targets * D], what the draft reads.
        hidden: [rows, T, D], from which the head gives the target's law of the next token.
    """

    tokens: Array
    segments: Array
    loss_codes: Array
    inputs: Array
    hidden: Array


class Trunk(NamedTuple):
    """What the draft shares with the trunk, frozen: embedding and head [V, D] in the compute dtype."""

    embed: Array
    head: Array


class StepReport(NamedTuple):
    """Terms of the loss of a step, and each stage's routing loads [stages, E]."""

    loss: DraftLoss
    loads: Array


@dataclass(frozen=True, slots=True)
class DraftRun:
    """What makes a training run of the draft reproducible, but for its length.

    Args:
        config: the architecture with its draft stages.
        numerics: arithmetic of trunk and draft.
        batch_rows: packed rows of a step.
        anchors: blocks of a row.
        seed: of initial weights, order of rows and anchors.
        is_quantized: whether weights are rounded to their storage in every step.
    """

    config: ModelConfig
    numerics: Numerics
    batch_rows: int
    anchors: int
    seed: int
    is_quantized: bool = True


@partial(jax.jit, static_argnames=("run",))
def initial_draft(final_norm: Array, *, run: DraftRun) -> DraftWeights:
    """Draw float32 weights of the stages: a residual start, and heads that say little at first.

    Args:
        final_norm: [D], the trunk's, where the draft's own begins, as both feed one head.
        run: the run.

    Returns:
        The master weights.
    """
    draft = residual_start(draft_weight_specs(run.config), run.config, run.seed)
    return draft.replace(
        norm=final_norm.astype(jnp.float32),
        markov_head=draft.markov_head * 0.1,
        confidence_proj=jnp.zeros_like(draft.confidence_proj),
    )


def make_optimizer() -> optax.GradientTransformation:
    """Build the optimizer without its rate: AdamW without decay is Adam; gradients clipped to norm 1.

    Source: spec/dspark.md section 6.3.
    """
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95))


def learning_rate(step: int, num_steps: int) -> float:
    """Give the rate of a step: warm-up, constant, linear decay to 2 % of the peak.

    Source: spec/nano_model.md section 5, second stage.
    """
    rising = (step + 1) / max(num_steps * WARMUP, 1.0)
    falling = 1 - (1 - LAST_RATE) * max(0.0, 1 - (num_steps - step) / (num_steps * DECAY))
    return PEAK_RATE * min(1.0, rising, falling)


def make_features_step(run: DraftRun) -> Callable[[Weights, tuple[Array, Array, Array], Array], Any]:
    """Build the trunk's pass over some rows: (weights, data, indices [n]) -> inputs and hidden states."""
    mode = TrainingMode(run.numerics, is_sparse=True)

    def features(weights: Weights, data: tuple[Array, Array, Array], indices: Array) -> tuple[Array, Array]:
        result = forward(weights, take_batch(data, indices), run.config, mode)
        return jnp.concatenate(result.draft_inputs, axis=-1), result.hidden

    return features


def make_features(
    step: Callable[..., tuple[Array, Array]], weights: Weights, rows: PackedRows, rows_at_once: int
) -> Features:
    """Run the trunk over all rows.

    Args:
        step: compiled from `make_features_step`.
        weights: the trunk.
        rows: all rows.
        rows_at_once: rows of a call.

    Returns:
        The features of all rows, in order.
    """
    data = device_rows(rows)
    parts = []
    for start in range(0, len(rows), rows_at_once):
        # The last call repeats the last row.
        indices = np.minimum(np.arange(start, start + rows_at_once), len(rows) - 1)
        parts.append(step(weights, data, jnp.asarray(indices.astype(np.int32))))
    inputs, hidden = (jnp.concatenate(list(arrays))[: len(rows)] for arrays in zip(*parts, strict=True))
    return Features(*data, inputs, hidden)


def make_steps(run: DraftRun, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Build a number of optimisation steps in one call.

    (masters, moments, trunk, features, keys [n], indices [n, B], rates [n], bias steps [n]) -> masters,
    moments, reports with a leading axis of n.
    """

    def step(
        trunk: Trunk, features: Features, carry: tuple[DraftWeights, Any], item: tuple[Array, ...]
    ) -> tuple[tuple[DraftWeights, Any], StepReport]:
        (weights, moments), (key, indices, rate, bias_step) = carry, item

        def loss(weights: DraftWeights) -> tuple[Array, StepReport]:
            report = block_loss(weights, trunk, features, indices, key, run)
            return report.loss.total, report

        gradients, report = jax.grad(loss, has_aux=True)(weights)
        updates, moments = optimizer.update(cast(Any, gradients), moments)
        weights = jax.tree.map(lambda value, update: value - rate * update, weights, updates)
        return (_balanced(weights, report.loads, bias_step), moments), report

    def steps(weights, moments, trunk, features, keys, indices, rates, bias_steps):
        items = (keys, indices, rates, bias_steps)
        carry, reports = lax.scan(partial(step, trunk, features), (weights, moments), items)
        return *carry, reports

    return steps


def block_loss(
    masters: DraftWeights, trunk: Trunk, features: Features, indices: Array, key: Array, run: DraftRun
) -> StepReport:
    """Compare draft and target on blocks at random anchors of some rows.

    An anchor is an answer token that an answer token follows. A block is supervised up to the first
    token that is no answer.

    Args:
        masters: float32 weights of the stages.
        trunk: what they share with the trunk.
        features: of all rows.
        indices: int32 [B], rows to draw blocks from.
        key: of the anchors.
        run: the run (static).

    Returns:
        The terms of the loss and the routing loads.

    Source: spec/dspark.md section 6.2.
    """
    config, numerics = run.config, run.numerics
    draft = cast_as_stored(draft_weight_specs(config), masters, numerics.compute_dtype, run.is_quantized)
    taken = jax.tree.map(lambda array: array[indices], features)
    tokens, segments = taken.tokens.astype(jnp.int32), taken.segments.astype(jnp.int32)
    is_answer = taken.loss_codes > 0
    anchors, is_anchor = choose_anchors(is_answer, segments, key, run.anchors)
    places = anchors[..., None] + jnp.arange(config.draft.block_size, dtype=jnp.int32)[None, None, :]
    is_supervised = supervised_rows(is_answer, segments, places) & is_anchor[..., None]
    context = DraftContext(taken.inputs, segments, anchors, take_places(tokens, places))
    result = draft_forward(draft, trunk.embed, trunk.head, context, config, numerics)
    target = linear_float32(take_places(taken.hidden, places), trunk.head)
    labels = take_places(tokens, places + 1)

    def flat(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    loss = draft_loss(
        *(flat(result.logits), flat(target), flat(labels)), flat(result.confidence), flat(is_supervised)
    )
    return StepReport(loss, _loads(result.router_ids, config.draft.n_routed_experts))


def choose_anchors(is_answer: Array, segments: Array, key: Array, count: int) -> tuple[Array, Array]:
    """Choose anchors of each row at random, without repeats.

    Args:
        is_answer: bool [B, T].
        segments: int32 [B, T].
        key: of the choice.
        count: A, at most T.

    Returns:
        int32 [B, A] places, bool [B, A] whether the place is one; a row may have fewer.
    """
    is_followed = is_answer[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    is_candidate = is_answer & jnp.pad(is_followed, ((0, 0), (0, 1)))
    draws = jnp.where(is_candidate, jax.random.uniform(key, is_answer.shape, jnp.float32), -1.0)
    best, places = lax.top_k(draws, count)
    return places, best >= 0


def supervised_rows(is_answer: Array, segments: Array, places: Array) -> Array:
    """Mark the rows of blocks whose next token, and all before it in the block, the target wrote.

    Args:
        is_answer: bool [B, T].
        segments: int32 [B, T].
        places: int32 [B, A, K], of the rows.

    Returns:
        bool [B, A, K].
    """
    inside = places + 1 < is_answer.shape[1]
    is_same = take_places(segments, places + 1) == take_places(segments, places[..., :1])
    is_label = inside & is_same & take_places(is_answer, places + 1)
    return jnp.cumprod(is_label.astype(jnp.int32), axis=-1) > 0


def _loads(router_ids: Array, num_experts: int) -> Array:
    """Count each stage's choices of each expert as shares: float32 [stages, E]."""
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    flat = router_ids.reshape(router_ids.shape[0], -1, 1)
    return jnp.mean((flat == experts[None, None, :]).astype(jnp.float32), axis=1)


def _balanced(weights: DraftWeights, loads: Array, bias_step: Array) -> DraftWeights:
    """Move each router bias by a fixed step against its expert's load error."""
    stages = weights.stages
    bias = stages.ffn.bias + bias_step * jnp.sign(1.0 / loads.shape[1] - loads)
    ffn = stages.ffn.replace(bias=bias, bias_vl=bias)
    return weights.replace(stages=stages.replace(ffn=ffn))
