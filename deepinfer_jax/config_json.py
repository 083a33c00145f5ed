"""Reading `config.json`: the published composite form and the flat reference form.

Separate from `config.py` because the names on disk, and what is refused there, are not the model.
Read next: `config.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import ConfigError, DraftConfig, ModelConfig, YarnScaling, require

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
    require(text is None or isinstance(text, dict), "text_config", text, "a JSON object")
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
        require(got == expected and type(got) is type(expected), key, got, repr(expected))
    for key in _IGNORED:
        values.pop(key, None)
    index_keys = values.pop("index_k_source_layer_ids", values.get("kv_source_layer_ids"))
    require(
        index_keys == values.get("kv_source_layer_ids"),
        *("index_k_source_layer_ids", index_keys, "the KV sources"),
    )
    return _build(values, is_quantized, has_vision)


def _build(values: dict[str, Any], is_quantized: bool, has_vision: bool) -> ModelConfig:
    fields = ModelConfig.__dataclass_fields__
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(
            f"config: got unknown keys {unknown}, expected only known ones, as others may change the model's "
            "arithmetic; remove them if they do not, or use a release of this package that knows them"
        )
    required = {k for k in fields if k not in ("bos_token_id", "eos_token_id", "is_quantized", "has_vision")}
    missing = sorted(required - set(values))
    if missing:
        raise ConfigError(
            f"config: got none of {missing}, expected every key of a DeepSeek-V4.1-Flash config.json; add "
            "them or download the file again"
        )
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
    require(isinstance(scheme, dict), "quantization_config", scheme, "a JSON object")
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
    require(isinstance(scaling, dict), "rope_scaling", scaling, "a JSON object")
    scaling = dict(scaling)
    kind = scaling.pop("rope_type", None)
    require(kind == "yarn", "rope_scaling.rope_type", kind, "'yarn'")
    expected = set(YarnScaling.__dataclass_fields__)
    require(set(scaling) == expected, "rope_scaling", sorted(scaling), f"the keys {sorted(expected)}")
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
        raise ConfigError(
            f"model folder: got {str(folder)!r}, which does not exist, expected a checkpoint folder; pass "
            "one that holds config.json"
        )
    if not path.is_file():
        raise ConfigError(
            f"model folder: got {str(folder)!r}, where config.json does not exist, expected a checkpoint "
            "folder; copy the file there"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(path)!r} is not JSON: got {error}, expected a JSON object; download the file again"
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(
            f"{str(path)!r}: got a {type(document).__name__}, expected a JSON object; download the file again"
        )
    return parse_config(document)
