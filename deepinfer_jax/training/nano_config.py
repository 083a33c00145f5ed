"""The configuration of the embedded nano model, derived from its tokenizer.

Separate so that `assets/nano/config.json` is made by code and checked by a test, not kept by hand.
Read next: `lm.py`, which trains this shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..assets import NANO_FOLDER
from ..checkpoint.token_map import engram_token_map
from ..config_json import QUANTIZATION
from ..model.engram import primes_above
from ..text.tokenizer import IMAGE_TEXT, Tokenizer

NOISE_TEXT = "<｜System｜>"
"""Fills the unknown places of a draft block; the token whose official id is 128799.

Source: spec/checkpoint.md section 5.
"""

SHIPS_DRAFT = True
"""Whether the embedded checkpoint has the draft stages."""

_ENGRAM_LAYERS = 2
_DRAFT_STAGES = 3


def nano_config_document(
    folder: str | Path = NANO_FOLDER, *, with_draft: bool = SHIPS_DRAFT
) -> dict[str, Any]:
    """Build the composite `config.json` of shape N3.

    Args:
        folder: holds the nano `tokenizer.json`.
        with_draft: whether the model has its draft stages.

    Returns:
        The JSON document, keys in the order of the released one.

    Raises:
        TokenizerError: no tokenizer there, or one without a special token.

    Source: spec/nano_model.md section 4; form and remaining values spec/checkpoint.md section 2.
    """
    tokenizer = Tokenizer.from_folder(folder)
    token_map = engram_token_map(Path(folder) / "tokenizer.json")
    layer_keys, attention_keys = _layer_keys(), _attention_keys()
    draft_keys: dict[str, Any] = {"num_nextn_predict_layers": 0}
    if with_draft:
        attention_keys["compress_ratios"] += [0] * _DRAFT_STAGES
        draft_keys = _draft_keys(tokenizer.special_id(NOISE_TEXT), layer_keys["num_hidden_layers"])
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # No vision tower reads it, but Engram and the router ask of every token whether it is an image.
        "image_token_id": tokenizer.special_id(IMAGE_TEXT),
        "quantization_config": dict(QUANTIZATION),
        "text_config": {
            "model_type": "deepseek_v41_text",
            "vocab_size": tokenizer.vocab_size,
            **layer_keys,
            **attention_keys,
            **_engram_keys(tokenizer.pad_token_id, int(token_map.max()) + 1),
            **draft_keys,
        },
    }


def write_nano_config(folder: str | Path = NANO_FOLDER, *, with_draft: bool = SHIPS_DRAFT) -> None:
    """Write `config.json` beside the tokenizer, formatted as the released file is."""
    text = json.dumps(nano_config_document(folder, with_draft=with_draft), indent=2) + "\n"
    (Path(folder) / "config.json").write_text(text, encoding="utf-8")


def _layer_keys() -> dict[str, Any]:
    return {
        "hidden_size": 256,
        "moe_intermediate_size": 160,
        "num_hidden_layers": 9,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 512,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }


def _attention_keys() -> dict[str, Any]:
    return {
        "sliding_window": 32,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 5],
        "index_source_layer_ids": [2, 5, 7],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 16,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
    }


def _engram_keys(pad_token_id: int, compressed_vocab_size: int) -> dict[str, Any]:
    ngram, buckets, heads = 3, 2048, 4
    return {
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": engram_table_sizes(_ENGRAM_LAYERS, ngram, buckets, heads),
        "engram_max_ngram_size": ngram,
        "engram_vocab_size": buckets,
        "engram_n_heads": heads,
        "engram_head_dim": 32,
        "engram_pad_token_id": pad_token_id,
        "engram_compressed_vocab_size": compressed_vocab_size,
    }


def _draft_keys(noise_token_id: int, num_layers: int) -> dict[str, Any]:
    return {
        "num_nextn_predict_layers": _DRAFT_STAGES,
        "dspark_block_size": 5,
        "dspark_noise_token_id": noise_token_id,
        "dspark_target_layer_ids": [num_layers - 3, num_layers - 2, num_layers - 1],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }


def engram_table_sizes(num_layers: int, max_ngram_size: int, vocab_size: int, num_heads: int) -> list[int]:
    """Sum each Engram layer's bucket primes: ascending from `vocab_size`, none used twice.

    Args:
        num_layers: Engram layers.
        max_ngram_size: n-grams of 2 to this many tokens.
        vocab_size: least number of buckets of a head.
        num_heads: heads of each n-gram size.

    Returns:
        Rows of each layer's table.

    Source: spec/model.md section 10.
    """
    columns = (max_ngram_size - 1) * num_heads
    primes = primes_above(vocab_size - 1, num_layers * columns).reshape(num_layers, columns)
    return [int(rows) for rows in primes.sum(axis=1)]
