"""Compressor: one latent per group of tokens, from which compressed KV and index keys are made.

Separate because only KV sources own one, and because its pending halves are the one state that a
prompt chunk can cut in the middle.
Read next: `indexer.py`, which selects among its entries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..arithmetic import round_to
from ..arrays import Array
from ..config import ModelConfig
from ..kernels import rms_norm
from .linear import linear, linear_float32
from .numerics import Numerics
from .rope import Rotation, rotate
from .weights import CompressorWeights, IndexerWeights


class Projection(NamedTuple):
    """A token's part of its group: kv [..., H] and, at ratio 2, the gate score [..., H], float32."""

    kv: Array
    score: Array | None


class Entry(NamedTuple):
    """What a complete group leaves: latent, compressed KV and index key, the last two not yet rounded."""

    latent: Array
    kv: Array
    index_key: Array


def project(x: Array, weights: CompressorWeights) -> Projection:
    """Project normed attention inputs for the compressor.

    At ratio 2 both projections stay float32; at ratio 1 the one projection is rounded.

    Args:
        x: [..., D].
        weights: the source's compressor.

    Returns:
        The projection.

    Source: spec/model.md section 6 and section 2 (Linear).
    """
    if weights.wgate is None:
        return Projection(linear(x, weights.wkv), None)
    return Projection(linear_float32(x, weights.wkv), linear_float32(x, weights.wgate))


def pool_pair(older: Projection, newer: Projection) -> Array:
    """Pool a group of two tokens: a softmax over the two scores, separately for each channel.

    Args:
        older: projection of token 2g.
        newer: projection of token 2g + 1.

    Returns:
        [..., H] float32.

    Source: spec/model.md section 6.
    """
    assert older.score is not None and newer.score is not None
    newer_share = jax.nn.sigmoid(newer.score - older.score)
    return (1 - newer_share) * older.kv + newer_share * newer.kv


def make_entry(
    pooled: Array,
    group_rotation: Rotation,
    compressor: CompressorWeights,
    indexer: IndexerWeights,
    config: ModelConfig,
    numerics: Numerics,
) -> Entry:
    """Make latent, compressed KV and index key of complete groups.

    latent = RMSNorm(pooled); kv = R(latent); key = R(RMSNorm(wk latent)), R at the position of the
    group's first token. The cache format rounds kv and key where they are stored.

    Args:
        pooled: [..., H], rounded here to the compute dtype.
        group_rotation: rotation at the first token's position.
        compressor: the source's compressor.
        indexer: the source's indexer, which owns wk and k_norm.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        The entries.

    Source: spec/model.md section 6.
    """
    latent = rms_norm(round_to(pooled, numerics.compute_dtype), compressor.norm, config.rms_norm_eps)
    return Entry(latent, rotate(latent, group_rotation), index_key(latent, group_rotation, indexer, config))


def index_key(latent: Array, group_rotation: Rotation, indexer: IndexerWeights, config: ModelConfig) -> Array:
    """Make index keys from latents: R(RMSNorm(wk latent)), not yet rounded.

    Args:
        latent: [..., H].
        group_rotation: rotation at the first token's position.
        indexer: the source's indexer, which owns wk and k_norm.
        config: the architecture.

    Returns:
        [..., index_head_dim].

    Source: spec/model.md section 6.
    """
    key = rms_norm(linear(latent, indexer.wk), indexer.k_norm, config.rms_norm_eps)
    return rotate(key, group_rotation)


def num_visible_groups(positions: Array, ratio: int) -> Array:
    """Count the groups a query sees: floor((t + 1) / ratio), those whose last token is at most t."""
    return (positions + 1) // jnp.int32(ratio)
