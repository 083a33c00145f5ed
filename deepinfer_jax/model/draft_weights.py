"""Every weight of the DSpark draft stages (`mtp.*` tensors), declared once.

Separate from `weights.py` because a model runs without them. The stages are ordinary window layers
with their own number of experts; only the first has an entry, only the last has heads.
Read next: `weights.py`, whose classes the stages reuse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flax import struct

from ..arrays import ArraySpec, Initializer, Storage
from ..config import ModelConfig
from .schedule import LayerKind
from .weights import LayerWeights, layer_specs


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
    vocabulary, markov_axes = (vocab, rank), ("vocab", "markov_rank")
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


def _norm(name: str, size: int) -> ArraySpec:
    return ArraySpec(name, (size,), ("embed",), initializer=Initializer(constant=1.0, noise=0.05))


def _stage_specs(config: ModelConfig) -> LayerWeights:
    draft = config.draft
    stage_config = replace(
        config, n_routed_experts=draft.n_routed_experts, num_experts_per_tok=draft.num_experts_per_tok
    )
    stages = tuple(range(draft.num_stages))
    return layer_specs(stage_config, LayerKind("window", 0), stages, prefix="mtp.{layer}")
