"""Tiny architectures and random weights that reach every path of the model.

Separate because tests, benchmarks and notebooks need the same small models, without files.
Read next: `golden.py`, which feeds them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Array, ArraySpec, QuantArray, Storage, is_spec, random_resident_arrays
from ..checkpoint.formats import quantize
from ..config import DraftConfig, ModelConfig, YarnScaling
from ..model.draft_weights import all_weight_specs
from ..model.engram import primes_above
from ..model.weights import Weights

TINY = ModelConfig(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=10,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=8,
    rms_norm_eps=1e-20,
    rope_theta=100.0,
    compress_rope_theta=10000.0,
    rope_scaling=YarnScaling(factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=256),
    max_position_embeddings=1024,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0),
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8),
    index_n_heads=8,
    index_head_dim=32,
    index_topk=4,
    candidate_source_layer_id=6,
    candidate_topk_blocks=3,
    candidate_block_size=2,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    routed_scaling_factor=1.5,
    swiglu_limit=1.5,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    engram_layer_ids=(1, 4),
    engram_num_embeddings=(304, 462),
    engram_max_ngram_size=4,
    engram_vocab_size=40,
    engram_n_heads=2,
    engram_head_dim=32,
    engram_pad_token_id=2,
    engram_compressed_vocab_size=100,
    image_token_id=125,
    draft=DraftConfig(
        num_stages=2,
        block_size=3,
        noise_token_id=127,
        target_layer_ids=(7, 8, 9),
        markov_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
)
"""The golden files' model: window 8, every kind of layer, Engram on two layers, two draft stages."""

SMALLEST = replace(
    TINY,
    num_hidden_layers=3,
    compress_ratios=(0, 2, 1),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2),
    candidate_source_layer_id=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=(304,),
    draft=DraftConfig(),
)
"""One layer of each compress ratio: quick to compile."""

SMALLEST_DRAFTED = replace(
    SMALLEST,
    compress_ratios=(*SMALLEST.compress_ratios, 0, 0),
    draft=replace(TINY.draft, block_size=5, target_layer_ids=(2,)),
)
"""The same with two draft stages and blocks of the released size."""

DIVISIBLE = replace(
    SMALLEST,
    num_attention_heads=8,
    o_groups=8,
    n_routed_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=256,
)
"""`SMALLEST` with eight shares of everything a layout can divide, in whole parts of 32 channels."""

DIVISIBLE_DRAFTED = replace(
    DIVISIBLE,
    compress_ratios=SMALLEST_DRAFTED.compress_ratios,
    draft=replace(SMALLEST_DRAFTED.draft, n_routed_experts=8),
)
"""The same with draft stages."""

ONE_OF_EACH = replace(
    TINY,
    num_hidden_layers=7,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 4, 6),
    candidate_source_layer_id=4,
    engram_layer_ids=(1,),
    engram_num_embeddings=(304,),
    draft=DraftConfig(),
)
"""One layer of each kind, but two adjacent Reuse layers, which become a scan."""

ONE_OF_EACH_WINDOW_128 = replace(ONE_OF_EACH, sliding_window=128)
"""The same with the released window, for what depends on lengths."""


def released_pattern(extra_repeats: int = 0) -> ModelConfig:
    """Give the 40-layer pattern of the released model at the widths of `TINY`, without draft stages.

    Args:
        extra_repeats: how many further times the last four layers (Reindex and three Reuse) follow.

    Returns:
        The architecture of 40 + 4 extra_repeats layers.

    Source: spec/model.md section 1, layer roles.
    """
    layers = 40 + 4 * extra_repeats
    return replace(
        TINY,
        num_hidden_layers=layers,
        compress_ratios=(0, 0) + (2,) * 18 + (1,) * (layers - 20),
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, *range(20, layers, 4)),
        candidate_source_layer_id=20,
        engram_layer_ids=(1, 14),
        draft=DraftConfig(),
    )


def released_cut(engram_vocab_size: int = 1_000_000) -> ModelConfig:
    """Give four layers of the released widths, one of each kind but Reuse, in the released storage.

    Args:
        engram_vocab_size: buckets of an Engram column; the released 16 million need 101 GB.

    Returns:
        The architecture, without draft stages.

    Source: spec/model.md section 1.
    """
    columns = 3 * 8
    return ModelConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=4,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_groups=8,
        o_lora_rank=1024,
        sliding_window=128,
        rms_norm_eps=1e-20,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=YarnScaling(
            factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
        ),
        max_position_embeddings=1048576,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=2,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        n_routed_experts=384,
        num_experts_per_tok=6,
        moe_intermediate_size=2304,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        engram_layer_ids=(1,),
        engram_num_embeddings=(int(primes_above(engram_vocab_size - 1, columns).sum()),),
        engram_max_ngram_size=4,
        engram_vocab_size=engram_vocab_size,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_pad_token_id=2,
        engram_compressed_vocab_size=99092,
        image_token_id=129264,
        is_quantized=True,
    )


def random_token_map(config: ModelConfig, seed: int = 0) -> Array:
    """Draw a token map that uses every compressed id.

    Args:
        config: the architecture; its vocabulary is at least as large as the compressed one.
        seed: seed of the draw.

    Returns:
        int32 [V].
    """
    random = np.random.default_rng(seed)
    classes = config.engram_compressed_vocab_size
    extra = random.integers(0, classes, config.vocab_size - classes)
    return jnp.asarray(random.permutation(np.concatenate([np.arange(classes), extra])).astype(np.int32))


def random_weights(config: ModelConfig, key: Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Weights:
    """Draw weights in which every bias, scale and norm differs from what would leave its path idle.

    On the host: on the device, a program would be compiled for every shape.

    Args:
        config: the architecture.
        key: base key.
        dtype: dtype of the weights that are not stored as F32.

    Returns:
        The weights, token map included.
    """
    words = np.asarray(jax.random.key_data(key)).tolist()

    def draw(spec: ArraySpec) -> Array:
        random = np.random.default_rng([*words, zlib.crc32(spec.name.encode())])
        values = spec.initializer.scaled(random.standard_normal(spec.stacked_shape, np.float32))
        return jnp.asarray(values.astype(spec.memory_dtype(dtype)))

    weights = jax.tree.map(draw, all_weight_specs(config), is_leaf=is_spec)
    return weights.replace(token_map=random_token_map(config))


def random_resident_weights(
    config: ModelConfig, key: Array, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> Weights:
    """Draw weights as a quantised checkpoint would be resident, the quantised ones as bytes.

    Args:
        config: the architecture.
        key: base key.
        dtype: dtype of the weights that are neither quantised nor stored as F32.

    Returns:
        The weights, token map included.
    """
    weights = random_resident_arrays(all_weight_specs(config), key, dtype)
    return weights.replace(token_map=random_token_map(config))


def as_resident(weights: Weights, config: ModelConfig) -> Weights:
    """Round plain weights to the released storage and keep them as its bytes.

    Args:
        weights: plain arrays, stacked as declared.
        config: the architecture.

    Returns:
        The same weights, `QuantArray` where the released checkpoint is quantised.
    """

    def convert(spec: ArraySpec, stack: Any) -> Any:
        if not spec.storage.is_quantized:
            return stack
        host = np.asarray(stack)
        parts = [quantize(spec.storage, host[index], name) for index, name in spec.tensors()]
        payload, scales = (
            np.stack(part).reshape(shape)
            for part, shape in zip(zip(*parts, strict=True), spec.resident_shapes, strict=True)
        )
        if spec.storage is Storage.MXFP4:
            payload = payload.view(np.uint8)
        return QuantArray(jnp.asarray(payload), jnp.asarray(scales.view(np.uint8)), spec.storage, spec.axes)

    plain = weights.replace(token_map=None)
    converted = jax.tree.map(convert, all_weight_specs(config), plain, is_leaf=is_spec)
    return converted.replace(token_map=weights.token_map)


def shared_prefix_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 17) -> list[list[int]]:
    """Make prompts of random tokens, each the beginning of one sequence.

    Args:
        lengths: tokens of each.
        vocab_size: ids are below.
        seed: of the sequence.

    Returns:
        The prompts.
    """
    sequence = np.random.default_rng(seed).integers(0, vocab_size, max(lengths)).tolist()
    return [sequence[:length] for length in lengths]
