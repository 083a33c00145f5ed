"""Reading `config.json`: both published forms, and everything that is refused by name.

Separate because a wrong configuration must stop here, before any weight is read.
Read next: `deepinfer_jax/config_json.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer_jax.config import ConfigError, DraftConfig, YarnScaling
from deepinfer_jax.config_json import QUANTIZATION, parse_config, read_config
from deepinfer_jax.testing.presets import TINY

GOLDEN = Path(__file__).parent / "golden"

FLAT_NAMES = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
}
"""Renames of the flat form, by published key (spec/checkpoint.md section 2)."""

FLAT_YARN_NAMES = {"factor": "rope_factor", "original_max_position_embeddings": "original_seq_len"}


@pytest.fixture
def released() -> dict[str, Any]:
    return json.loads((GOLDEN / "released_config.json").read_text())


def flat_form(document: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a composite document as the flat reference configuration of the same model."""
    text = copy.deepcopy(document["text_config"])
    yarn = text.pop("rope_scaling")
    for key in ("model_type", "use_cache", "initializer_range", "attention_dropout"):
        text.pop(key)
    flat = {FLAT_NAMES.get(key, key): value for key, value in text.items()}
    flat |= {FLAT_YARN_NAMES.get(key, key): value for key, value in yarn.items() if key != "rope_type"}
    flat |= {key: document[key] for key in ("bos_token_id", "eos_token_id", "image_token_id")}
    return {**flat, "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


def edited(document: dict[str, Any], **text: Any) -> dict[str, Any]:
    """Copy a composite document with keys of its `text_config` replaced."""
    changed = copy.deepcopy(document)
    changed["text_config"].update(text)
    return changed


def assert_refused(document: dict[str, Any], *parts: str) -> None:
    """Check that a document is refused with one line that holds all the parts."""
    with pytest.raises(ConfigError) as raised:
        parse_config(document)
    message = str(raised.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message


def test_composite_form_of_the_released_model(released) -> None:
    config = parse_config(released)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (129280, 5120, 40)
    assert config.rope_scaling == YarnScaling(16, 32, 1, 65536)
    assert config.compress_ratios == (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    assert config.draft == DraftConfig(3, 5, 128799, (37, 38, 39), 256, 128, 3)
    assert (config.bos_token_id, config.eos_token_id, config.image_token_id) == (0, 1, 129264)
    assert config.is_quantized
    assert config.has_vision


def test_flat_form_is_the_same_model_without_the_vision_tower(released) -> None:
    assert parse_config(flat_form(released)) == replace(parse_config(released), has_vision=False)


@pytest.mark.parametrize("name", ["tiny_bf16", "tiny_fp8fp4"])
def test_golden_folders_hold_the_tiny_preset(name: str) -> None:
    assert read_config(GOLDEN / name) == replace(TINY, is_quantized=name == "tiny_fp8fp4")


def test_parsing_leaves_the_document_alone(released) -> None:
    before = copy.deepcopy(released)
    parse_config(released)
    assert released == before


def test_absent_activation_scheme_means_dynamic(released) -> None:
    expected = parse_config(released)
    del released["quantization_config"]["activation_scheme"]
    assert parse_config(released) == expected


def test_absent_quantization_config_means_unquantized(released) -> None:
    expected = replace(parse_config(released), is_quantized=False)
    del released["quantization_config"]
    assert parse_config(released) == expected


def test_flat_form_without_formats_is_unquantized(released) -> None:
    flat = flat_form(released)
    for key in ("dtype", "scale_fmt", "expert_dtype"):
        del flat[key]
    assert not parse_config(flat).is_quantized


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "gptq"),
        ("activation_scheme", "static"),
        ("weight_block_size", [128, 128]),
        ("scale_fmt", "fp32"),
        ("expert_dtype", "fp8"),
        ("modules_to_not_convert", ["head"]),
    ],
)
def test_other_quantization_schemes_are_refused(released, key: str, value: object) -> None:
    released["quantization_config"][key] = value
    assert_refused(released, "quantization_config", repr(key), repr(value), "expected", repr(QUANTIZATION))


@pytest.mark.parametrize("key", ["quant_method", "weight_block_size", "scale_fmt", "expert_dtype"])
def test_incomplete_quantization_scheme_is_refused(released, key: str) -> None:
    del released["quantization_config"][key]
    assert_refused(released, "quantization_config", repr(key), "expected")


def test_flat_form_with_another_expert_format_is_refused(released) -> None:
    assert_refused({**flat_form(released), "expert_dtype": "fp8"}, "quantization_config", "'fp8'", "'fp4'")


def test_unknown_keys_are_refused_by_name(released) -> None:
    document = edited(released, num_hash_layers=3, attention_temperature=0.5)
    assert_refused(document, "unknown keys", "'attention_temperature'", "'num_hash_layers'", "remove")
    assert_refused({**released, "mystery": 1}, "unknown keys", "'mystery'")


@pytest.mark.parametrize(
    ("key", "got", "expected"),
    [
        ("num_key_value_heads", 8, "1"),
        ("n_shared_experts", 2, "1"),
        ("scoring_func", "softmax", "'sqrtsoftplus'"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("norm_topk_prob", False, "True"),
        ("hidden_act", "gelu", "'silu'"),
        ("attention_bias", True, "False"),
        ("tie_word_embeddings", True, "False"),
        ("dspark_target_attn_input", False, "True"),
        ("hc_shifted", False, "True"),
        ("use_fp4_sparse_kv", False, "True"),
        ("tokenizer_compatibility", "preview", "'release'"),
        ("attention_bias", 0, "False"),
    ],
)
def test_keys_with_one_implemented_value(released, key: str, got: object, expected: str) -> None:
    assert_refused(edited(released, **{key: got}), repr(key), f"got {got!r}", f"expected {expected}")


def test_index_keys_belong_to_the_kv_sources(released) -> None:
    same = edited(released, index_k_source_layer_ids=[2, 8, 14, 20])
    assert parse_config(same) == parse_config(released)
    other = edited(released, index_k_source_layer_ids=[2, 8])
    assert_refused(other, "'index_k_source_layer_ids'", "got [2, 8]", "expected")


OPTIONAL_KEYS = {"tie_word_embeddings", "attention_bias", "attention_dropout", "initializer_range"} | {
    *("use_cache", "model_type", "num_key_value_heads", "n_shared_experts", "hidden_act", "scoring_func"),
    *("topk_method", "norm_topk_prob", "rope_scaling"),
}


def test_every_missing_key_is_named(released) -> None:
    needed = [k for k in released["text_config"] if k not in OPTIONAL_KEYS and "dspark" not in k]
    needed.remove("num_nextn_predict_layers")
    assert len(needed) > 30
    for key in needed:
        document = copy.deepcopy(released)
        del document["text_config"][key]
        assert_refused(document, f"got none of ['{key}']", "expected")


def test_missing_yarn_keys_are_refused(released) -> None:
    del released["text_config"]["rope_scaling"]["beta_fast"]
    assert_refused(released, "'rope_scaling'", "got", "'beta_fast'")
    del released["text_config"]["rope_scaling"]
    assert_refused(released, "'rope_scaling'", "got []", "expected")


def test_other_rope_scaling_is_refused(released) -> None:
    released["text_config"]["rope_scaling"]["rope_type"] = "linear"
    assert_refused(released, "'rope_scaling.rope_type'", "got 'linear'", "expected 'yarn'")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", "5120", "an integer"),
        ("hidden_size", 5120.0, "an integer"),
        ("hidden_size", True, "an integer"),
        ("hidden_size", None, "an integer"),
        ("rms_norm_eps", "small", "a number"),
        ("compress_ratios", 2, "a list of integers"),
        ("engram_layer_ids", [1, "14"], "a list of integers"),
        ("eos_token_id", [1, 2], "an integer"),
        ("rope_scaling", "yarn", "a JSON object"),
    ],
)
def test_wrong_types_are_refused(released, key: str, value: object, expected: str) -> None:
    del released["eos_token_id"]
    assert_refused(edited(released, **{key: value}), repr(key), "got", f"expected {expected}")


def test_wrong_types_inside_groups_are_refused(released) -> None:
    document = copy.deepcopy(released)
    document["text_config"]["rope_scaling"]["factor"] = "16"
    assert_refused(document, "'rope_scaling.factor'", "got '16'", "expected a number")
    document = edited(released, dspark_block_size=5.5)
    assert_refused(document, "'draft.block_size'", "got 5.5", "expected an integer")


def test_groups_that_are_no_objects_are_refused(released) -> None:
    assert_refused({**released, "text_config": [1]}, "'text_config'", "got [1]", "expected a JSON object")
    document = {**released, "quantization_config": "fp8"}
    assert_refused(document, "'quantization_config'", "got 'fp8'", "expected a JSON object")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("index_topk", -1),
        ("o_groups", 7),
        ("num_experts_per_tok", 385),
        ("hc_mult", 1),
        ("engram_max_ngram_size", 1),
        ("qk_rope_head_dim", 63),
        ("qk_rope_head_dim", 1024),
        ("num_hidden_layers", 41),
        ("num_nextn_predict_layers", 2),
        ("compress_ratios", [0, 0, *[4] * 38, 0, 0, 0]),
        ("compress_ratios", [0, 0, *[2] * 18, *[1] * 20, 0, 0, 1]),
        ("compress_ratios", [0, 2, *[2] * 18, *[1] * 20, 0, 0, 0]),
        ("compress_ratios", [0, 0, *[2] * 17, *[1] * 21, 0, 0, 0]),
        ("compress_ratios", [0, 0, 0, *[2] * 17, *[1] * 20, 0, 0, 0]),
        ("kv_source_layer_ids", [8, 2, 14, 20]),
        ("kv_source_layer_ids", [2, 8, 14, 40]),
        ("index_source_layer_ids", [2, 8, 14, 24]),
        ("candidate_source_layer_id", 14),
        ("engram_layer_ids", [1]),
        ("image_token_id", 129280),
        ("engram_pad_token_id", -1),
    ],
)
def test_values_that_contradict_each_other_are_refused(released, key: str, value: object) -> None:
    del released["image_token_id"]
    document = edited(released, **{"image_token_id": 129264, key: value})
    assert_refused(document, "config key", "got", "expected", "fix config.json")


def write_config(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("prepare", "part"),
    [
        (lambda folder: folder / "nowhere", "does not exist"),
        (lambda folder: folder, "does not exist"),
        (lambda folder: write_config(folder, "{"), "is not JSON"),
        (lambda folder: write_config(folder, "[1]"), "got a list, expected a JSON object"),
    ],
    ids=["no_folder", "no_file", "no_json", "no_object"],
)
def test_unreadable_files_are_refused(tmp_path: Path, prepare: Callable[[Path], Path], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_config(prepare(tmp_path))
