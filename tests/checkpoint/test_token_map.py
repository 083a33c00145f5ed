from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from deepinfer_jax.checkpoint import CheckpointError, engram_token_map, read_token_map
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import read_config

# Byte-level spelling: "Ġ" is a space, "Ċ" a line feed, "Ã©" the two bytes of "é".
TOKENS_AND_CLASSES = [
    ("A", 0),
    ("a", 0),
    ("Ġa", 0),
    ("aĊ", 0),
    ("Ã", 1),  # half a character: its own spelling
    ("Ã©", 2),  # é
    ("e", 2),
    ("E", 2),
    ("Ġ", 3),  # a lone space
    ("ĠĠ", 3),  # folds to a lone space
    ("Ċ", 3),
    ("aĠĠb", 4),
    ("aĊb", 4),
    ("ab", 5),
    ("ï¬ģ", 6),  # the ligature fi
    ("fi", 6),
    ("©", 7),
    ("ÌĢ", 8),  # a combining grave accent alone: stripped to nothing, so it stays itself
    ("<S>", 9),
    ("<s>", 9),
]


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    names = [name for name, _ in TOKENS_AND_CLASSES]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names[:-2])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[-2:])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def make_config(golden: Path, vocab: int, classes: int) -> ModelConfig:
    config = read_config(golden / "tiny_bf16")
    return replace(
        config,
        vocab_size=vocab,
        engram_compressed_vocab_size=classes,
        image_token_id=3,
        eos_token_id=1,
        draft=replace(config.draft, noise_token_id=0),
    )


def test_tokens_are_classed_by_their_folded_text(tokenizer_path: Path) -> None:
    token_map = engram_token_map(tokenizer_path)
    assert token_map.dtype == np.int32
    expected = dict(enumerate(TOKENS_AND_CLASSES))
    got = {i: (name, int(token_map[i])) for i, (name, _) in expected.items()}
    assert got == expected


def test_stored_map_wins_over_the_tokenizer(golden: Path, tokenizer_path: Path) -> None:
    vocab = len(TOKENS_AND_CLASSES)
    folder = tokenizer_path.parent
    derived = read_token_map(folder, make_config(golden, vocab, 10))
    np.testing.assert_array_equal(derived, engram_token_map(tokenizer_path))
    stored = np.arange(vocab, dtype=np.int64) % 3
    np.save(folder / "engram_token_map.npy", stored)
    got = read_token_map(folder, make_config(golden, vocab, 3))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, stored)


def test_tokenizer_with_other_sizes_is_refused(golden: Path, tokenizer_path: Path) -> None:
    vocab = len(TOKENS_AND_CLASSES)
    with pytest.raises(CheckpointError, match=rf"of shape \({vocab},\), expected integers of shape \(128,\)"):
        read_token_map(tokenizer_path.parent, make_config(golden, 128, 10))
    with pytest.raises(CheckpointError, match=r"has 10 classes from 0 to 9, expected .* = 11"):
        read_token_map(tokenizer_path.parent, make_config(golden, vocab, 11))


@pytest.mark.parametrize(
    "stored",
    [np.zeros(4, np.float32), np.zeros((4, 1), np.int32), np.array([0, 1, 3, 3]), np.array([-1, 0, 1, 2])],
)
def test_stored_map_that_does_not_fit_is_refused(golden: Path, tmp_path: Path, stored: np.ndarray) -> None:
    np.save(tmp_path / "engram_token_map.npy", stored)
    with pytest.raises(CheckpointError, match="token map from"):
        read_token_map(tmp_path, make_config(golden, 4, 3))


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00"])
def test_damaged_map_is_refused(golden: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "engram_token_map.npy").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is no \.npy array"):
        read_token_map(tmp_path, make_config(golden, 4, 3))


def test_damaged_tokenizer_is_refused(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer file"):
        read_token_map(tmp_path, make_config(golden, 4, 3))


def test_neither_file_is_refused(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor engram_token_map\.npy"):
        read_token_map(tmp_path, make_config(golden, 4, 3))


def test_tokenizer_with_a_gap_in_its_ids_is_refused(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 2}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"2 token ids up to 2, expected .* without gaps"):
        engram_token_map(tmp_path / "tokenizer.json")
