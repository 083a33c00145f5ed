"""What is read off the state of a draft row: base logits, the Markov bias, the confidence.

Separate from `draft.py` because these are three small products of a row, and the stages are layers.
Read next: `draft.py`.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..arithmetic import map_tiles
from ..arrays import Array
from ..config import ModelConfig
from ..kernels import rms_norm
from ..model.backbone import head_logits
from ..model.draft_weights import DraftWeights
from ..model.linear import linear_float32
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..sharding.layout import SINGLE, Layout


def base_logits(
    states: Array,
    is_used: Array,
    weights: Weights,
    config: ModelConfig,
    numerics: Numerics,
    layout: Layout = SINGLE,
) -> Array:
    """Project states by the backbone's head, behind the draft's own norm: head RMSNorm(x).

    Args:
        states: [R, D], collapsed streams after the last stage.
        is_used: bool [R], rows whose logits are wanted.
        weights: the loaded weights.
        config: the architecture.
        numerics: the static choice of arithmetic.
        layout: as in `model.backbone.backbone`.

    Returns:
        float32 [R, V].

    Source: spec/dspark.md section 2.4.
    """
    normed = rms_norm(states, weights.draft.norm, config.rms_norm_eps)
    return head_logits(normed, weights, numerics, layout, is_used)


def markov_bias(previous_ids: Array, draft: DraftWeights, numerics: Numerics) -> Array:
    """Give what the token before adds to the logits of the next: W2 W1[token].

    Args:
        previous_ids: int32 [B].
        draft: the draft stages' weights.
        numerics: the static choice of arithmetic.

    Returns:
        float32 [B, V].

    Source: spec/dspark.md section 2.4.
    """
    embedded = draft.markov_embed[previous_ids]
    if not numerics.batch_invariant:
        return linear_float32(embedded, draft.markov_head)
    return map_tiles(lambda tile: linear_float32(tile, draft.markov_head), embedded, numerics.row_tile)


def confidence_logits(states: Array, previous_ids: Array, draft: DraftWeights, numerics: Numerics) -> Array:
    """Estimate how likely each draft is accepted if all before it are: z = w [x ; W1[token before]].

    The state is the one before the norm.

    Args:
        states: [B, K, D].
        previous_ids: int32 [B, K], the anchor and all drafts but the last.
        draft: the draft stages' weights.
        numerics: the static choice of arithmetic.

    Returns:
        float32 [B, K], to be calibrated and to go through a sigmoid.

    Source: spec/dspark.md section 2.4.
    """
    embedded = draft.markov_embed[previous_ids]
    inputs = jnp.concatenate([states.astype(jnp.float32), embedded.astype(jnp.float32)], axis=-1)
    rows = inputs.reshape(-1, inputs.shape[-1])
    weight = draft.confidence_proj.astype(jnp.float32)
    if numerics.batch_invariant:
        logits = map_tiles(lambda tile: linear_float32(tile, weight), rows, numerics.row_tile)
    else:
        logits = linear_float32(rows, weight)
    return logits.reshape(previous_ids.shape)
