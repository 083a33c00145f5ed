"""Every weight of the model, declared once.

The trees here hold `ArraySpec`s or arrays: the same classes serve declaration, random weights,
loaded weights and shardings. Layers of one kind are stacked on a leading `layers` axis.
Read next: `backbone.py`, which consumes them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import struct

from ..arrays import ArraySpec, Initializer, QuantArray, Storage, is_spec
from ..config import ModelConfig
from ..kernels import weight_values
from ..sharding.layout import Layout
from ..sharding.mesh import MeshShape
from ..sharding.place import check_weights
from .schedule import LayerKind, layers_by_kind

_ONES = Initializer(constant=1.0, noise=0.05)
_SMALL = Initializer(constant=0.0, noise=0.1)


class HyperWeights(struct.PyTreeNode):
    """Hyper-connection of one site: z = fn u gives the pre, post and stream mixes."""

    fn: Any  # [mix, streams * embed] float32
    base: Any  # [mix] float32
    scale: Any  # [3] float32


class CompressorWeights(struct.PyTreeNode):
    """Latent of a group of tokens; `wgate` only at ratio 2."""

    wkv: Any  # [head_dim, embed]
    wgate: Any  # [head_dim, embed] or None
    norm: Any  # [head_dim]


class IndexerWeights(struct.PyTreeNode):
    """Selection of compressed entries; `wk` and `k_norm` only at KV sources."""

    wq_b: Any  # [index_heads * index_head_dim, q_rank]
    weights_proj: Any  # [index_heads, embed]
    wk: Any  # [index_head_dim, head_dim] or None
    k_norm: Any  # [index_head_dim] or None


class AttentionWeights(struct.PyTreeNode):
    """Low-rank queries, one shared key-value vector per token, grouped low-rank output."""

    wq_a: Any  # [q_rank, embed]
    q_norm: Any  # [q_rank]
    wq_b: Any  # [heads * head_dim, q_rank]
    wkv: Any  # [head_dim, embed]
    kv_norm: Any  # [head_dim]
    wo_a: Any  # [o_groups * o_rank, heads / o_groups * head_dim]
    wo_b: Any  # [embed, o_groups * o_rank]
    attn_sink: Any  # [heads] float32
    compressor: Any  # CompressorWeights or None
    indexer: Any  # IndexerWeights or None


class ExpertWeights(struct.PyTreeNode):
    """Clamped SwiGLU: w1 gate, w3 up, w2 down; with an experts axis in front if routed."""

    w1: Any  # [ffn, embed]
    w3: Any  # [ffn, embed]
    w2: Any  # [embed, ffn]


class MoeWeights(struct.PyTreeNode):
    """Router with its two selection biases, routed experts and the shared expert.

    The router has an axis word of its own, as every row scores all experts wherever these lie.
    `expert_table` (`sharding.expert_exchange.ExpertPlaces`) says where; None where every expert lies once,
    at its own place. It belongs to a placement, so the declaration has None.
    """

    gate: Any  # [router, embed]
    bias: Any  # [router] float32, text tokens
    bias_vl: Any  # [router] float32, image tokens
    experts: ExpertWeights
    shared_experts: ExpertWeights
    expert_table: Any = None


class LayerWeights(struct.PyTreeNode):
    """One layer, or a stack of equal layers."""

    attn_norm: Any  # [embed]
    ffn_norm: Any  # [embed]
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attn: AttentionWeights
    ffn: MoeWeights


class EngramWeights(struct.PyTreeNode):
    """Hashed n-gram memory of one layer."""

    embed: Any  # [engram_rows, engram_row]
    wkv: Any  # [(streams + 1) * embed, engram_input]
    q_weight: Any  # [streams, embed]
    k_weight: Any  # [streams, embed]


class Weights(struct.PyTreeNode):
    """The backbone: embedding, layer stacks by kind, Engram by layer, head; and the draft stages, if any.

    `token_map` (token id -> compressed id, int32 [vocab]) is derived from the tokenizer, so it is
    None in the declaration and an array in loaded weights. `draft` (`draft_weights.DraftWeights`) is
    declared beside this, and None where nothing is drafted.
    """

    embed: Any  # [vocab, embed]
    layers: dict[str, LayerWeights]
    engram: tuple[EngramWeights, ...]
    norm: Any  # [embed]
    head: Any  # [vocab, embed]
    token_map: Any = None
    draft: Any = None


def weight_specs(config: ModelConfig) -> Weights:
    """Declare the backbone's weights.

    Args:
        config: the architecture.

    Returns:
        `Weights` with an `ArraySpec` at each leaf.

    Source: spec/model.md section 16, spec/checkpoint.md section 4.
    """
    d, vocab = config.hidden_size, config.vocab_size
    return Weights(
        embed=ArraySpec("embed.weight", (vocab, d), ("vocab", "embed"), initializer=Initializer(d**0.5)),
        layers={
            kind.name: layer_specs(config, kind, layers) for kind, layers in layers_by_kind(config).items()
        },
        engram=tuple(_engram_specs(config, i) for i in range(len(config.engram_layer_ids))),
        norm=_norm("norm.weight", d),
        head=ArraySpec("head.weight", (vocab, d), ("vocab", "embed")),
    )


def layer_specs(
    config: ModelConfig, kind: LayerKind, layers: tuple[int, ...], prefix: str = "layers.{layer}"
) -> LayerWeights:
    """Declare one kind of layer, stacked over `layers`."""
    specs = LayerWeights(
        attn_norm=_norm(f"{prefix}.attn_norm.weight", config.hidden_size),
        ffn_norm=_norm(f"{prefix}.ffn_norm.weight", config.hidden_size),
        hc_attn=_hyper_specs(config, f"{prefix}.hc_attn"),
        hc_ffn=_hyper_specs(config, f"{prefix}.hc_ffn"),
        attn=_attention_specs(config, kind, f"{prefix}.attn"),
        ffn=_moe_specs(config, config.n_routed_experts, f"{prefix}.ffn"),
    )
    return map_specs(lambda spec: spec.on_layers(layers), specs)


def map_specs(function: Any, specs: Any) -> Any:
    """Apply a function to every declaration of a tree."""
    return jax.tree.map(function, specs, is_leaf=is_spec)


def _norm(name: str, size: int, axis: str = "embed") -> ArraySpec:
    return ArraySpec(name, (size,), (axis,), initializer=_ONES)


def _hyper_specs(config: ModelConfig, prefix: str) -> HyperWeights:
    streams, d = config.hc_mult, config.hidden_size
    mix = streams * (2 + streams)

    def spec(part: str, shape: tuple[int, ...], axes: tuple[str, ...], initializer: Initializer) -> ArraySpec:
        name = f"{prefix}_{part}"
        return ArraySpec(name, shape, axes, Storage.F32, initializer)

    return HyperWeights(
        fn=spec("fn", (mix, streams * d), ("mix", "embed"), Initializer()),
        base=spec("base", (mix,), ("mix",), _SMALL),
        scale=spec("scale", (3,), ("scalars",), Initializer(constant=1.0, noise=0.1)),
    )


def _attention_specs(config: ModelConfig, kind: LayerKind, prefix: str) -> AttentionWeights:
    d, heads, head_dim, rank = (
        *(config.hidden_size, config.num_attention_heads, config.head_dim, config.q_lora_rank),
    )
    groups, o_rank = config.o_groups, config.o_lora_rank

    def fp8(part: str, rows: int, columns: int, axes: tuple[str, str]) -> ArraySpec:
        return ArraySpec(f"{prefix}.{part}.weight", (rows, columns), axes, Storage.FP8_BLOCK)

    return AttentionWeights(
        wq_a=fp8("wq_a", rank, d, ("q_rank", "embed")),
        q_norm=_norm(f"{prefix}.q_norm.weight", rank, "q_rank"),
        wq_b=fp8("wq_b", heads * head_dim, rank, ("heads", "q_rank")),
        wkv=fp8("wkv", head_dim, d, ("head_dim", "embed")),
        kv_norm=_norm(f"{prefix}.kv_norm.weight", head_dim, "head_dim"),
        wo_a=fp8("wo_a", groups * o_rank, heads // groups * head_dim, ("o_groups", "group_input")),
        wo_b=fp8("wo_b", d, groups * o_rank, ("embed", "o_groups")),
        attn_sink=ArraySpec(
            *(f"{prefix}.attn_sink", (heads,), ("heads",), Storage.F32),
            *(Initializer(constant=0.0, noise=1.0),),
        ),
        compressor=_compressor_specs(config, kind, f"{prefix}.compressor") if kind.is_kv_source else None,
        indexer=_indexer_specs(config, kind, f"{prefix}.indexer") if kind.is_index_source else None,
    )


def _compressor_specs(config: ModelConfig, kind: LayerKind, prefix: str) -> CompressorWeights:
    shape, axes = (config.head_dim, config.hidden_size), ("head_dim", "embed")
    # At ratio 2 both projections run in float32 (spec/model.md section 2, Linear).
    in_float32 = kind.ratio == 2
    gate = ArraySpec(f"{prefix}.wgate.weight", shape, axes) if in_float32 else None
    return CompressorWeights(
        wkv=ArraySpec(f"{prefix}.wkv.weight", shape, axes),
        wgate=gate,
        norm=_norm(f"{prefix}.norm.weight", config.head_dim, "head_dim"),
    )


def _indexer_specs(config: ModelConfig, kind: LayerKind, prefix: str) -> IndexerWeights:
    heads, size = config.index_n_heads, config.index_head_dim
    key = key_norm = None
    if kind.is_kv_source:
        key = ArraySpec(f"{prefix}.wk.weight", (size, config.head_dim), ("index_head_dim", "head_dim"))
        key_norm = _norm(f"{prefix}.k_norm.weight", size, "index_head_dim")
    return IndexerWeights(
        wq_b=ArraySpec(
            *(f"{prefix}.wq_b.weight", (heads * size, config.q_lora_rank), ("index_heads", "q_rank")),
            Storage.FP8_BLOCK,
        ),
        weights_proj=ArraySpec(
            f"{prefix}.weights_proj.weight", (heads, config.hidden_size), ("index_heads", "embed")
        ),
        wk=key,
        k_norm=key_norm,
    )


def _expert_specs(config: ModelConfig, prefix: str, storage: Storage, experts: int = 0) -> ExpertWeights:
    d, ffn = config.hidden_size, config.moe_intermediate_size

    def spec(part: str, shape: tuple[int, int], axes: tuple[str, str]) -> ArraySpec:
        return ArraySpec(f"{prefix}.{part}.weight", shape, axes, storage, experts=experts)

    return ExpertWeights(
        w1=spec("w1", (ffn, d), ("ffn", "embed")),
        w3=spec("w3", (ffn, d), ("ffn", "embed")),
        w2=spec("w2", (d, ffn), ("embed", "ffn")),
    )


def _moe_specs(config: ModelConfig, experts: int, prefix: str) -> MoeWeights:
    def bias(part: str) -> ArraySpec:
        name = f"{prefix}.gate.{part}"
        return ArraySpec(name, (experts,), ("router",), Storage.F32, _SMALL)

    return MoeWeights(
        gate=ArraySpec(f"{prefix}.gate.weight", (experts, config.hidden_size), ("router", "embed")),
        bias=bias("bias"),
        bias_vl=bias("bias_vl"),
        experts=_expert_specs(config, f"{prefix}.experts.{{expert}}", Storage.MXFP4, experts),
        shared_experts=_expert_specs(config, f"{prefix}.shared_experts", Storage.FP8_BLOCK),
    )


def _engram_specs(config: ModelConfig, index: int) -> EngramWeights:
    prefix = f"layers.{config.engram_layer_ids[index]}.engram"
    d, streams = config.hidden_size, config.hc_mult
    rows, width = config.engram_num_embeddings[index], config.engram_head_dim
    return EngramWeights(
        embed=ArraySpec(
            *(f"{prefix}.embed.weight", (rows, width), ("engram_rows", "engram_row"), Storage.FP8_ROW),
            Initializer(width**0.5),
        ),
        wkv=ArraySpec(
            f"{prefix}.wkv.weight",
            ((streams + 1) * d, config.engram_row_size),
            *(("engram_output", "engram_input"), Storage.FP8_BLOCK),
        ),
        q_weight=ArraySpec(f"{prefix}.q_weight", (streams, d), ("streams", "embed"), initializer=_ONES),
        k_weight=ArraySpec(f"{prefix}.k_weight", (streams, d), ("streams", "embed"), initializer=_ONES),
    )


@functools.cache
def weight_words(config: ModelConfig) -> Weights:
    """Give the logical axes of all arrays of the weights, a tuple of words for each."""
    words = map_specs(lambda spec: spec.stacked_axes, weight_specs(config))
    layers = {
        name: layer.replace(ffn=layer.ffn.replace(expert_table=("layers",)))
        for name, layer in words.layers.items()
    }
    return words.replace(layers=layers, token_map=())


@functools.cache
def layer_words(config: ModelConfig, kind: LayerKind) -> LayerWeights:
    """Give the logical axes of one layer's arrays, as `take_layer` leaves them.

    Routed experts and their table have none: they stay stacked.
    """
    words = map_specs(lambda spec: spec.axes, layer_specs(config, kind, (0,)))
    none = ExpertWeights((), (), ())
    return words.replace(ffn=words.ffn.replace(experts=none, expert_table=()))


@functools.cache
def engram_words(config: ModelConfig, place: int) -> EngramWeights:
    """Give the logical axes of an Engram layer's arrays."""
    return map_specs(lambda spec: spec.axes, _engram_specs(config, place))


def check_layout(config: ModelConfig, layout: Layout, mesh: MeshShape, redundant_experts: int = 0) -> None:
    """Refuse a layout that cannot hold the model, before anything is loaded or compiled.

    Args:
        config: the architecture.
        layout: on the mesh.
        mesh: the mesh.
        redundant_experts: further places for routed experts.

    Raises:
        LayoutError: what cannot be divided, by array, dimension, size and mesh axis.
    """
    check_weights(weight_specs(config), layout, mesh, indivisible_parts(config), redundant_experts)


def indivisible_parts(config: ModelConfig) -> dict[str, int]:
    """Give the number of parts along axes whose channels belong together: heads, output groups."""
    return {"heads": config.num_attention_heads, "o_groups": config.o_groups}


def take_layer(stack: LayerWeights, index: Any) -> LayerWeights:
    """Take one layer of a stack, all but its routed experts.

    A traced index slices inside a scan. The routed experts stay stacked, as the kernel that reads them
    takes the index itself: a slice handed to a loop over experts would be a copy of them all.

    Args:
        stack: equal layers.
        index: place of the layer.

    Returns:
        The layer's weights, `ffn.experts` with all layers of the stack.
    """
    experts = stack.ffn.experts
    rest = stack.replace(ffn=stack.ffn.replace(experts=None))
    rest = jax.tree.map(lambda array: array[index], rest)
    return rest.replace(ffn=rest.ffn.replace(experts=experts))


def plain_weights(weights: Any, dtype: Any) -> Any:
    """Decode all quantised weights of a tree, for gradients and for reading values.

    Args:
        weights: a tree of arrays and `QuantArray`.
        dtype: of what is decoded, float32 or bfloat16.

    Returns:
        The same tree with arrays only.
    """

    def decode(weight: Any) -> Any:
        return weight_values(weight, dtype) if isinstance(weight, QuantArray) else weight

    return jax.tree.map(decode, weights, is_leaf=lambda weight: isinstance(weight, QuantArray))


def count_parameters(specs: Any) -> int:
    """Count the parameters declared in a tree."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return sum(spec.num_parameters for spec in leaves)
