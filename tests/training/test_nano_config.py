"""The nano configuration file is what the code derives, and the model accepts it.

Separate as it checks shipped files.
Read next: `deepinfer_jax/training/nano_config.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer_jax.assets import NANO_FOLDER, RELEASED_FOLDER
from deepinfer_jax.config import DraftConfig
from deepinfer_jax.config_json import parse_config
from deepinfer_jax.model.engram import engram_constants
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training.nano_config import (
    SHIPS_DRAFT,
    engram_table_sizes,
    nano_config_document,
    write_nano_config,
)


@pytest.fixture(scope="module", params=[False, True], ids=["trunk", "draft"])
def document(request: pytest.FixtureRequest) -> dict:
    return nano_config_document(with_draft=request.param)


def test_parser_accepts_the_shape(document: dict) -> None:
    config = parse_config(document)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (9, 256, 4096)
    assert config.is_quantized
    assert not config.has_vision
    assert config.draft.num_stages in (0, 3)


def test_draft_keys_are_the_only_difference() -> None:
    """The trunk trains under one document and ships under the other."""
    trunk, whole = (parse_config(nano_config_document(with_draft=given)) for given in (False, True))
    assert whole.draft == DraftConfig(
        num_stages=3,
        block_size=5,
        noise_token_id=Tokenizer.from_folder(NANO_FOLDER).special_id("<｜System｜>"),
        target_layer_ids=(6, 7, 8),
        markov_rank=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    assert trunk == replace(whole, draft=DraftConfig(), compress_ratios=whole.compress_ratios[:9])


def test_draft_keys_are_those_of_the_released_document() -> None:
    released = json.loads((RELEASED_FOLDER / "config.json").read_text(encoding="utf-8"))["text_config"]
    found = nano_config_document(with_draft=True)["text_config"]

    def draft_keys(text: dict) -> list[str]:
        return [key for key in text if key.startswith("dspark") or key == "num_nextn_predict_layers"]

    assert draft_keys(found) == draft_keys(released)


def test_engram_tables_are_those_that_the_model_derives(document: dict) -> None:
    config = parse_config(document)
    assert engram_constants(config).primes.sum(axis=1).tolist() == list(config.engram_num_embeddings)


def test_table_sizes_of_the_released_model() -> None:
    assert engram_table_sizes(2, 4, 16_000_000, 8) == [384006168, 384016682]


def test_shipped_file_is_derived() -> None:
    shipped = json.loads((NANO_FOLDER / "config.json").read_text(encoding="utf-8"))
    assert shipped == nano_config_document()
    assert SHIPS_DRAFT == (shipped["text_config"]["num_nextn_predict_layers"] > 0)


def test_the_written_file_is_the_document(document: dict, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((NANO_FOLDER / "tokenizer.json").read_bytes())
    write_nano_config(tmp_path, with_draft=document["text_config"]["num_nextn_predict_layers"] > 0)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == document
