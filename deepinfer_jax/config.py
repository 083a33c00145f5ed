"""The published model configuration as frozen, validated values.

Separate so that everything else can depend on it while it depends on nothing.
Read next: `arrays.py` (how tensors are declared), `model/weights.py` (the declarations).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that this package refuses, with the key, what it got and what it expects."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN rescaling of the rotary frequencies of layers that read compressed KV.

    Args:
        factor: context extension over `original_max_position_embeddings`, at least 1.
        beta_fast: rotations over the original context above which a frequency stays.
        beta_slow: rotations below which it is divided by `factor`.
        original_max_position_embeddings: context length of the unscaled frequencies, tokens.

    Source: spec/model.md section 2 (RoPE).
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The DSpark draft stages (`mtp.*` tensors) as published.

    Args:
        num_stages: draft stages, 0 when the checkpoint has none.
        block_size: draft tokens of a block.
        noise_token_id: id that fills the block's unknown positions.
        target_layer_ids: backbone layers whose input streams the draft reads.
        markov_rank: rank of the Markov head's tables.
        n_routed_experts: routed experts of a draft stage.
        num_experts_per_tok: routed experts chosen per token.

    Source: spec/model.md section 15.
    """

    num_stages: int = 0
    block_size: int = 0
    noise_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()
    markov_rank: int = 0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of one checkpoint: the keys of the published `text_config` and nothing else.

    Field names are the published keys, in tokens, channels, layers or ids as their names say.
    `is_quantized` tells the released mixed FP8/MXFP4 storage from plain BF16; `draft` groups the
    DSpark keys; `has_vision` says that `vision.*` tensors belong to the checkpoint.

    Raises:
        ConfigError: a value that contradicts another or that no implementation here covers.

    Source: spec/model.md section 1.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling
    max_position_embeddings: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    image_token_id: int
    bos_token_id: int | None = None
    eos_token_id: int = 1
    is_quantized: bool = False
    has_vision: bool = False
    draft: DraftConfig = field(default_factory=DraftConfig)

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_layers(self)
        _check_token_ids(self)

    @property
    def engram_row_size(self) -> int:
        """Channels that one token reads from an Engram table over all n-gram sizes and heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads * self.engram_head_dim


def _require(condition: bool, key: str, got: object, expected: str) -> None:
    if not condition:
        raise ConfigError(
            f"config key {key!r}: got {got!r}, expected {expected}; "
            "fix config.json or use a checkpoint of this architecture"
        )


def _check_sizes(config: ModelConfig) -> None:
    optional = {
        *("bos_token_id", "image_token_id", "eos_token_id", "draft"),
        *("candidate_source_layer_id", "engram_pad_token_id"),
    }
    for key in config.__dataclass_fields__:
        value = getattr(config, key)
        if key not in optional and type(value) in (int, float):
            _require(value > 0, key, value, "a positive number")
    rope = config.qk_rope_head_dim
    for head_key in ("head_dim", "index_head_dim"):
        head = getattr(config, head_key)
        _require(rope % 2 == 0 and rope <= head, "qk_rope_head_dim", rope, f"even, <= {head_key}")
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, "o_groups", groups, f"a divisor of num_attention_heads={heads}")
    experts = config.n_routed_experts
    _require(
        config.num_experts_per_tok <= experts,
        *("num_experts_per_tok", config.num_experts_per_tok, f"at most n_routed_experts={experts}"),
    )
    _require(config.hc_mult > 1, "hc_mult", config.hc_mult, "at least 2 residual streams")
    ngram = config.engram_max_ngram_size
    _require(ngram > 1, "engram_max_ngram_size", ngram, "at least 2")


def _check_layers(config: ModelConfig) -> None:
    layers = config.num_hidden_layers
    ratios = config.compress_ratios
    stages = config.draft.num_stages
    _require(
        len(ratios) == layers + stages,
        *("compress_ratios", ratios, f"{layers} layers + {stages} draft stages = {layers + stages} entries"),
    )
    _require(set(ratios) <= {0, 1, 2}, "compress_ratios", ratios, "entries 0, 1 or 2")
    _require(not any(ratios[layers:]), "compress_ratios", ratios, "0 for every draft stage")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(config, key)
        is_sorted = list(ids) == sorted(set(ids)) and all(0 <= i < layers for i in ids)
        _require(is_sorted, key, ids, f"increasing layer ids below {layers}")
    sources, index_sources = config.kv_source_layer_ids, config.index_source_layer_ids
    _require(
        set(sources) <= set(index_sources),
        *("index_source_layer_ids", index_sources, f"to contain the KV sources {sources}"),
    )
    _require(
        len(config.engram_num_embeddings) == len(config.engram_layer_ids),
        *("engram_num_embeddings", config.engram_num_embeddings, "one size per Engram layer"),
    )
    candidate = config.candidate_source_layer_id
    _require(
        candidate == (sources[-1] if sources else None),
        *("candidate_source_layer_id", candidate, f"the last KV source of {sources}"),
    )
    for layer in range(layers):
        _check_layer_sources(config, layer)


def _check_layer_sources(config: ModelConfig, layer: int) -> None:
    ratios = config.compress_ratios
    if ratios[layer] == 0:
        is_source = layer in config.index_source_layer_ids
        _require(not is_source, f"compress_ratios[{layer}]", 0, "1 or 2, as it is a source layer")
        return
    earlier = [source for source in config.kv_source_layer_ids if source <= layer]
    _require(bool(earlier), f"compress_ratios[{layer}]", ratios[layer], "0 before the first KV source")
    _require(
        ratios[earlier[-1]] == ratios[layer],
        *(f"compress_ratios[{layer}]", ratios[layer], f"the ratio of its KV source {earlier[-1]}"),
    )


def _check_token_ids(config: ModelConfig) -> None:
    for key in ("eos_token_id", "image_token_id", "engram_pad_token_id", "bos_token_id"):
        value = getattr(config, key)
        if value is not None:
            _require(0 <= value < config.vocab_size, key, value, f"an id below {config.vocab_size}")


QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
"""The only quantisation scheme accepted: the released one (spec/checkpoint.md section 3)."""

_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dspark_target_attn_input": True,
    "hc_shifted": True,
    "use_fp4_sparse_kv": True,
    "tokenizer_compatibility": "release",
}
"""Keys with one implemented value: absent means that value, anything else is refused."""

_IGNORED = {
    *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("initializer_range", "attention_dropout", "pad_token_id", "max_batch_size", "max_seq_len"),
}
"""Keys that change no arithmetic of inference."""

_FLAT_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
}
"""Names of the flat reference configuration and the published key each stands for."""

_DRAFT_NAMES = {
    "num_nextn_predict_layers": "num_stages",
    "dspark_block_size": "block_size",
    "dspark_noise_token_id": "noise_token_id",
    "dspark_target_layer_ids": "target_layer_ids",
    "dspark_markov_rank": "markov_rank",
    "dspark_n_routed_experts": "n_routed_experts",
    "dspark_num_experts_per_tok": "num_experts_per_tok",
}

_YARN_FLAT_NAMES = {
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_seq_len": "original_max_position_embeddings",
}


def parse_config(document: dict[str, Any]) -> ModelConfig:
    """Read a composite (`text_config` inside) or a flat reference `config.json` document.

    Args:
        document: the parsed JSON object.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: a missing, unknown or unsupported key, by name.

    Source: spec/checkpoint.md section 2.
    """
    flat = dict(document)
    text = flat.pop("text_config", None)
    has_vision = flat.pop("vision_config", None) is not None
    is_quantized = _parse_quantization(flat)
    if text is not None:
        flat = {**flat, **{k: v for k, v in text.items() if k != "model_type"}}
    values = {_FLAT_NAMES.get(key, key): value for key, value in flat.items()}
    values["rope_scaling"] = _parse_rope_scaling(values)
    draft = {name: values.pop(key) for key, name in _DRAFT_NAMES.items() if key in values}
    values["draft"] = DraftConfig(**{k: _freeze(v) for k, v in draft.items()})
    for key, expected in _FIXED.items():
        got = values.pop(key, expected)
        _require(got == expected and type(got) is type(expected), key, got, repr(expected))
    for key in _IGNORED:
        values.pop(key, None)
    index_keys = values.pop("index_k_source_layer_ids", values.get("kv_source_layer_ids"))
    _require(
        index_keys == values.get("kv_source_layer_ids"),
        *("index_k_source_layer_ids", index_keys, "the KV sources"),
    )
    return _build(values, is_quantized, has_vision)


def _build(values: dict[str, Any], is_quantized: bool, has_vision: bool) -> ModelConfig:
    fields = ModelConfig.__dataclass_fields__
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(
            f"config has unknown keys {unknown}: they may change the model's arithmetic, so nothing is "
            "guessed; remove them if they do not, or use a release of this package that knows them"
        )
    required = {k for k in fields if k not in ("bos_token_id", "eos_token_id", "is_quantized", "has_vision")}
    missing = sorted(required - set(values))
    if missing:
        raise ConfigError(f"config lacks {missing}: expected the keys of a DeepSeek-V4.1-Flash config.json")
    frozen = {key: _freeze(value) for key, value in values.items()}
    try:
        return ModelConfig(**frozen, is_quantized=is_quantized, has_vision=has_vision)
    except TypeError as error:
        raise ConfigError(f"config has a value of the wrong type: {error}") from error


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parse_quantization(document: dict[str, Any]) -> bool:
    scheme = document.pop("quantization_config", None)
    if scheme is None:
        reduced = {k: document.pop(k) for k in ("scale_fmt", "expert_dtype") if document.get(k)}
        if document.get("dtype") != "fp8" and not reduced:
            return False
        scheme = {**QUANTIZATION, **reduced}
    got = {"activation_scheme": "dynamic", **scheme}
    if got != QUANTIZATION:
        different = sorted(k for k in {*got, *QUANTIZATION} if got.get(k) != QUANTIZATION.get(k))
        raise ConfigError(
            f"config key 'quantization_config' differs in {different}: got {scheme}, expected {QUANTIZATION} "
            "or no quantization_config at all; re-quantised variants are other formats and would load wrong"
        )
    return True


def _parse_rope_scaling(values: dict[str, Any]) -> YarnScaling:
    scaling = values.pop("rope_scaling", None)
    if scaling is None:
        found = {name: values.pop(key) for key, name in _YARN_FLAT_NAMES.items() if key in values}
        scaling = {"rope_type": "yarn", **found}
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None)
    _require(kind == "yarn", "rope_scaling.rope_type", kind, "'yarn'")
    expected = set(YarnScaling.__dataclass_fields__)
    _require(set(scaling) == expected, "rope_scaling", sorted(scaling), f"the keys {sorted(expected)}")
    return YarnScaling(**scaling)


def read_config(folder: str | Path) -> ModelConfig:
    """Read and validate `config.json` in a checkpoint folder.

    Args:
        folder: the checkpoint folder.

    Returns:
        The validated configuration.

    Raises:
        ConfigError: no such folder or file, JSON that does not parse, or a refused configuration.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ConfigError(f"model folder {str(folder)!r} does not exist; pass a folder with config.json")
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} does not exist; a checkpoint folder needs its config.json")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}; download the file again") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{str(path)!r} holds {type(document).__name__}, expected a JSON object")
    return parse_config(document)
