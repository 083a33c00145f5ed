"""What a training step minimises.

Separate so that each term can be read and tested alone.
Read next: `forward.py` (where the terms' inputs come from), `lm.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays import Array
from ..config import ModelConfig
from ..model.linear import linear_float32
from ..model.weights import Weights
from .forward import Batch, TrainingMode, forward

CHUNK_TOKENS = 8192
"""Tokens whose logits exist at one time."""

Z_LOSS = 1e-4
INDEX_LOSS = 1.0
BALANCE_LOSS = 1e-3


class LossParts(NamedTuple):
    """Terms of the loss and the routing loads, all float32.

    Attributes:
        nats: mean cross entropy over weighted tokens.
        index_divergence: of the index scores from the attention, summed over index sources.
        balance: sequence-wise expert balance.
        loads: [L, E], share of each layer's choices that fell on each expert.
    """

    nats: Array
    index_divergence: Array
    balance: Array
    loads: Array


def training_loss(
    weights: Weights, batch: Batch, config: ModelConfig, mode: TrainingMode
) -> tuple[Array, LossParts]:
    """Sum the loss terms of a batch.

    cross entropy + z-loss + index divergence + sequence balance.

    Args:
        weights: the weights in the compute dtype.
        batch: packed sequences.
        config: the architecture.
        mode: static choices.

    Returns:
        The scalar loss and its parts.

    Source: spec/nano_model.md section 5.
    """
    result = forward(weights, batch, config, mode)
    nats, squares = token_losses(result.hidden, batch, weights)
    targets = batch.loss_weights
    total = jnp.maximum(jnp.sum(targets), 1.0)
    mean_nats = jnp.sum(nats * targets) / total
    z_loss = jnp.sum(squares * targets) / total
    is_token = (batch.segments > 0).astype(jnp.float32)
    balance, loads = _balance(result.router_scores, result.router_ids, is_token, config)
    loss = mean_nats + Z_LOSS * z_loss + INDEX_LOSS * result.index_divergence + BALANCE_LOSS * balance
    return loss, LossParts(mean_nats, result.index_divergence, balance, loads)


def token_losses(hidden: Array, batch: Batch, weights: Weights) -> tuple[Array, Array]:
    """Compute the negative log-likelihood of each token, and the squared log normaliser.

    Args:
        hidden: [B, T, D] after the final norm.
        batch: packed sequences.
        weights: gives the head.

    Returns:
        float32 [B, T] nats of the token at each place given its predecessors (0 at place 0, which
        nothing predicts), and float32 [B, T] squared log normalisers.
    """
    num_sequences, length = batch.tokens.shape
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    targets = batch.tokens[:, 1:].reshape(-1)
    padding = -flat.shape[0] % CHUNK_TOKENS
    flat = jnp.pad(flat, ((0, padding), (0, 0))).reshape(-1, CHUNK_TOKENS, flat.shape[-1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, CHUNK_TOKENS)

    @jax.checkpoint
    def chunk(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = linear_float32(hidden, weights.head)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return normaliser - chosen, jnp.square(normaliser)

    nats, squares = lax.map(lambda pair: chunk(*pair), (flat, targets))

    def per_place(values: Array) -> Array:
        values = values.reshape(-1)[: num_sequences * (length - 1)]
        return jnp.pad(values.reshape(num_sequences, length - 1), ((0, 0), (1, 0)))

    return per_place(nats), per_place(squares)


def _balance(scores: Array, ids: Array, is_token: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Penalise sequences that overuse an expert: mean over layers and sequences of sum_e f_e P_e."""
    layers, experts = scores.shape[0], scores.shape[-1]
    mask = is_token[None, :, :, None]
    shape = (layers, *is_token.shape)
    chosen = jax.nn.one_hot(ids, experts, dtype=jnp.float32).sum(axis=2).reshape(*shape, experts) * mask
    shares = (scores / jnp.sum(scores, axis=-1, keepdims=True)).reshape(*shape, experts) * mask
    tokens = jnp.maximum(jnp.sum(mask, axis=2), 1.0)
    frequency = jnp.sum(chosen, axis=2) / tokens * (experts / config.num_experts_per_tok)
    balance = jnp.mean(jnp.sum(frequency * jnp.sum(shares, axis=2) / tokens, axis=-1))
    totals = jnp.sum(chosen, axis=(1, 2))
    return balance, totals / jnp.maximum(jnp.sum(totals, axis=-1, keepdims=True), 1.0)
