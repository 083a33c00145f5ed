"""Every weight of the DSpark draft stages (`mtp.*` tensors), declared once.

Separate from `weights.py` because a model runs without them. The stages are ordinary window layers
with their own number of experts; only the first has an entry, only the last has heads.
Read next: `weights.py`, whose classes the stages reuse.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from flax import struct

from ..arrays import ArraySpec, Initializer, Storage
from ..config import ModelConfig
from ..sharding.layout import Layout
from ..sharding.mesh import MeshShape
from ..sharding.place import check_weights
from .schedule import LayerKind
from .weights import (
    LayerWeights,
    Weights,
    indivisible_parts,
    layer_specs,
    layer_words,
    map_specs,
    weight_specs,
    weight_words,
)

STAGE_KIND = LayerKind("window", 0)
"""A stage is built as a layer that reads its window alone."""


class DraftWeights(struct.PyTreeNode):
    """Entry projection, stages stacked in order, and the Markov and confidence heads.

    The token embedding and the language-model head are the backbone's.
    """

    main_proj: Any  # [embed, targets * embed]
    main_norm: Any  # [embed]
    stages: LayerWeights  # every array with a leading axis of stages
    norm: Any  # [embed]
    markov_embed: Any  # [vocab, markov_rank]
    markov_head: Any  # [vocab, markov_rank]
    confidence_proj: Any  # [1, embed + markov_rank]


def draft_weight_specs(config: ModelConfig) -> DraftWeights | None:
    """Declare the draft stages' weights.

    Args:
        config: the architecture.

    Returns:
        `DraftWeights` with an `ArraySpec` at each leaf, or None without draft stages.

    Source: spec/model.md section 15, spec/checkpoint.md section 4.
    """
    draft, d, vocab = config.draft, config.hidden_size, config.vocab_size
    if draft.num_stages == 0:
        return None
    last = f"mtp.{draft.num_stages - 1}"
    rank, targets = draft.markov_rank, len(draft.target_layer_ids)
    # A word of their own: at 0.1 GB the tables are whole on every device, whoever divides the vocabulary.
    vocabulary, markov_axes = (vocab, rank), ("markov_vocab", "markov_rank")
    return DraftWeights(
        main_proj=ArraySpec(
            *("mtp.0.main_proj.weight", (d, targets * d), ("embed", "draft_input"), Storage.FP8_BLOCK)
        ),
        main_norm=_norm("mtp.0.main_norm.weight", d),
        stages=_stage_specs(config),
        norm=_norm(f"{last}.norm.weight", d),
        markov_embed=ArraySpec(
            f"{last}.markov_head.embed.weight", vocabulary, markov_axes, initializer=Initializer(rank**0.5)
        ),
        markov_head=ArraySpec(f"{last}.markov_head.head.weight", vocabulary, markov_axes),
        confidence_proj=ArraySpec(
            *(f"{last}.confidence_head.proj.weight", (1, d + rank), ("scalars", "confidence_input")),
        ),
    )


def all_weight_specs(config: ModelConfig) -> Weights:
    """Declare the weights of the backbone and of its draft stages, if there are any."""
    return weight_specs(config).replace(draft=draft_weight_specs(config))


def stage_config(config: ModelConfig) -> ModelConfig:
    """Give the architecture with the number of experts that a draft stage has."""
    draft = config.draft
    return replace(
        config, n_routed_experts=draft.n_routed_experts, num_experts_per_tok=draft.num_experts_per_tok
    )


def check_draft_layout(config: ModelConfig, layout: Layout, mesh: MeshShape) -> None:
    """Refuse a layout that cannot hold the draft stages; see `weights.check_layout`."""
    specs = draft_weight_specs(config)
    if specs is not None:
        check_weights(specs, layout, mesh, indivisible_parts(config))


@functools.cache
def draft_words(config: ModelConfig) -> DraftWeights:
    """Give the logical axes of all arrays of the draft stages, a tuple of words for each."""
    words = map_specs(lambda spec: spec.stacked_axes, draft_weight_specs(config))
    stages = words.stages.replace(ffn=words.stages.ffn.replace(expert_table=("layers",)))
    return words.replace(stages=stages)


def words_of(weights: Weights, config: ModelConfig) -> Weights:
    """Give the logical axes of all arrays of loaded weights, the draft stages' if these are there."""
    words = weight_words(config)
    return words if weights.draft is None else words.replace(draft=draft_words(config))


def stage_words(config: ModelConfig) -> LayerWeights:
    """Give the logical axes of one stage's arrays, as `take_layer` leaves them."""
    return layer_words(stage_config(config), STAGE_KIND)


def _norm(name: str, size: int) -> ArraySpec:
    return ArraySpec(name, (size,), ("embed",), initializer=Initializer(constant=1.0, noise=0.05))


def _stage_specs(config: ModelConfig) -> LayerWeights:
    stages = tuple(range(config.draft.num_stages))
    return layer_specs(stage_config(config), STAGE_KIND, stages, prefix="mtp.{layer}")
