"""What a training step of the draft minimises: three sums over the supervised rows of blocks.

Separate so that each term can be read and tested alone.
Read next: `draft_forward.py` (the draft's logits), `draft_steps.py` (who sums them).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Array

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
"""Parts of the terms in the loss (spec/dspark.md section 6.1)."""

POSITION_DECAY = 4.0
"""Rows over which a row's weight falls to 1/e (spec/dspark.md section 6.1)."""

_SMALL_WEIGHT = 1e-6


class DraftLoss(NamedTuple):
    """Terms of the loss and the true acceptance, float32.

    Attributes:
        total: scalar, what is minimised.
        ce: scalar, cross entropy of the next token.
        l1: scalar, distance of the draft's law from the target's, 0 to 2.
        confidence: scalar, cross entropy of the confidence against the acceptance.
        accept_rates: [K], mean over supervised rows of sum_v min(p, q) at that row of a block.
        tau: scalar, mean tokens of a round: 1 + sum_k prod_{i<=k} of these, over supervised rows.
    """

    total: Array
    ce: Array
    l1: Array
    confidence: Array
    accept_rates: Array
    tau: Array


def draft_loss(
    draft_logits: Array,
    target_logits: Array,
    labels: Array,
    confidence_logits: Array,
    is_supervised: Array,
    decay: float = POSITION_DECAY,
) -> DraftLoss:
    """Compare the draft's laws q with the target's p, both at temperature 1 and unfiltered.

    w_k = exp(-(k - 1) / decay) on supervised rows; c*_k = 1 - |q_k - p_k|_1 / 2, without gradient;
    ce = sum w (-log q_k(label)); l1 = sum w |q_k - p_k|_1; confidence = sum w BCE(sigmoid(z_k), c*_k), each
    over sum w + 1e-6; total = 0.1 ce + 0.9 l1 + confidence.

    Args:
        draft_logits: float32 [n, K, V].
        target_logits: float32 [n, K, V], no gradient.
        labels: int32 [n, K], the sequence's next tokens.
        confidence_logits: float32 [n, K].
        is_supervised: bool [n, K].
        decay: rows over which the weight falls to 1/e (static).

    Returns:
        The terms, and the acceptance by row.

    Source: spec/dspark.md sections 6.1 and 7.
    """
    rows = jnp.arange(labels.shape[1], dtype=jnp.float32)
    mask = is_supervised.astype(jnp.float32)
    weights = mask * jnp.exp(-rows / jnp.float32(decay))[None, :]
    total_weight = jnp.sum(weights) + jnp.float32(_SMALL_WEIGHT)

    def mean(values: Array) -> Array:
        return jnp.sum(values * weights) / total_weight

    log_q = jax.nn.log_softmax(draft_logits, axis=-1)
    target = lax.stop_gradient(jax.nn.softmax(target_logits, axis=-1))
    distance = jnp.sum(jnp.abs(jnp.exp(log_q) - target), axis=-1)
    accepted = lax.stop_gradient(1 - 0.5 * distance)
    nats = -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]
    ce, l1 = mean(nats), mean(distance)
    confidence = mean(jax.nn.softplus(confidence_logits) - accepted * confidence_logits)
    survivals = jnp.cumprod(accepted * mask, axis=1)
    num_rows = jnp.maximum(jnp.sum(mask, axis=0), 1.0)
    return DraftLoss(
        total=CE_WEIGHT * ce + L1_WEIGHT * l1 + CONFIDENCE_WEIGHT * confidence,
        ce=ce,
        l1=l1,
        confidence=confidence,
        accept_rates=jnp.sum(accepted * mask, axis=0) / num_rows,
        tau=1 + jnp.sum(survivals) / num_rows[0],
    )
