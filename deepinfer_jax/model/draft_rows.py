"""What draft stages read of a position: a window row for each stage, made of the target layers' inputs.

Separate from `../spec_decode/draft.py` because the backbone leaves these rows behind for every position
that it runs, prompts included, long before anything is drafted. They lie in the cache beside the layers'
own window rows, so that a rejected position, a snapshot and a hand-over treat both alike.
Read next: `step_layer.py` (the layers' own rows), `../spec_decode/draft.py` (who reads these).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ..arithmetic import fenced, round_to
from ..arrays import Array
from ..kernels import pack_rows, rms_norm
from ..sharding.exchange import all_gather, put_together
from . import attention
from .draft_weights import DraftWeights, stage_words
from .linear import quantized_linear
from .numerics import Numerics
from .weights import take_layer

if TYPE_CHECKING:
    from .step_layer import Carry, StepContext


def read_draft_input(streams: Array, numerics: Numerics) -> Array:
    """Average the residual streams that enter a target layer.

    Args:
        streams: [R, M, D].
        numerics: the static choice of arithmetic.

    Returns:
        [R, D].

    Source: spec/dspark.md section 2.1.
    """
    return round_to(jnp.mean(streams.astype(jnp.float32), axis=-2), numerics.compute_dtype)


def put_draft_rows(carry: Carry, inputs: Sequence[Array], draft: DraftWeights, context: StepContext) -> Carry:
    """Put the stages' rows of a step behind those of the layers, to be written to the rings with them.

    x = RMSNorm(main_proj [input of target 1, 2, ..]); row = R(RMSNorm(wkv x)), one for each stage.

    Args:
        carry: after the last layer.
        inputs: [R, D] of each target layer.
        draft: the draft stages' weights.
        context: what the step's layers share.

    Returns:
        The carry with all rows of the step.

    Source: spec/dspark.md sections 2.1 and 2.2.
    """
    config, numerics, layout = context.config, context.numerics, context.placement.layout
    joined = jnp.concatenate(inputs, axis=-1)
    x = rms_norm(quantized_linear(joined, draft.main_proj, numerics), draft.main_norm, config.rms_norm_eps)
    rows = carry.window_rows
    for stage in range(config.draft.num_stages):
        attn: Any = put_together(take_layer(draft.stages, stage).attn, stage_words(config).attn, layout)
        row = attention.window_key_value(x, context.plain, attn, config, numerics)
        packed = pack_rows(row, numerics.row_formats.window, implementation=numerics.implementation)
        # Packed row, over the sequence axes.
        shared = all_gather(fenced(packed), layout.sequence_axes)
        rows = rows.at[config.num_hidden_layers + stage].set(shared)
    return carry.replace(window_rows=rows)
