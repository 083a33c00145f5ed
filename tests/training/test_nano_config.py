"""The nano configuration file is what the code derives, and the model accepts it.

Separate as it checks shipped files.
Read next: `deepinfer_jax/training/nano_config.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.config_json import parse_config
from deepinfer_jax.model.engram import engram_constants
from deepinfer_jax.training.nano_config import (
    engram_table_sizes,
    nano_config_document,
    write_nano_config,
)


@pytest.fixture(scope="module")
def document() -> dict:
    return nano_config_document()


def test_parser_accepts_the_shape(document: dict) -> None:
    config = parse_config(document)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (9, 256, 4096)
    assert config.is_quantized
    assert not config.has_vision
    assert config.draft.num_stages == 0


def test_engram_tables_are_those_that_the_model_derives(document: dict) -> None:
    config = parse_config(document)
    assert engram_constants(config).primes.sum(axis=1).tolist() == list(config.engram_num_embeddings)


def test_table_sizes_of_the_released_model() -> None:
    assert engram_table_sizes(2, 4, 16_000_000, 8) == [384006168, 384016682]


def test_shipped_file_is_derived(document: dict, tmp_path: Path) -> None:
    shipped = json.loads((NANO_FOLDER / "config.json").read_text(encoding="utf-8"))
    # The draft stages are added to the file when they are trained.
    text = shipped["text_config"]
    if text["num_nextn_predict_layers"] == 0:
        assert shipped == document
    (tmp_path / "tokenizer.json").write_bytes((NANO_FOLDER / "tokenizer.json").read_bytes())
    write_nano_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == document
