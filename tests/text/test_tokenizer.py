"""The tokenizer: round trips, special tokens by spelling, refusals; on the embedded nano tokenizer.

Separate from the chat encoding, which is built on it.
Read next: `deepinfer_jax/text/tokenizer.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_jax
from deepinfer_jax.text.tokenizer import (
    ASSISTANT_TEXT,
    IMAGE_TEXT,
    THINK_END_TEXT,
    USER_TEXT,
    Tokenizer,
    TokenizerError,
)

NANO = Path(deepinfer_jax.__path__[0]) / "assets" / "nano"
NANO_TOKENIZER = Tokenizer.from_folder(NANO)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return NANO_TOKENIZER


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Once upon a time, there was a fox.\n\nIt ran away.", id="english"),
        pytest.param(f"{USER_TEXT}Hi{ASSISTANT_TEXT}{THINK_END_TEXT}Hello!", id="chat"),
        pytest.param("你好,世界。カタカナ 한국어", id="cjk"),
        pytest.param("naïve café Ångström coöperate ṩ", id="accents"),
        pytest.param('{"word": "fox", "synonyms": ["a\\n", 12345], "x": null}', id="json"),
        pytest.param("  two  spaces\t\ttabs \r\n ends ", id="whitespace"),
        pytest.param("😀👩‍👩‍👧", id="emoji"),
        pytest.param("", id="empty"),
    ],
)
def test_decode_returns_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=60))
def test_any_text_round_trips(text: str) -> None:
    assert NANO_TOKENIZER.decode(NANO_TOKENIZER.encode(text, add_bos=False), keep_special=True) == text


@given(st.lists(st.integers(0, 4095), max_size=20))
def test_any_ids_decode(ids: list[int]) -> None:
    assert isinstance(NANO_TOKENIZER.decode(ids), str)


def test_incomplete_character_decodes_to_the_replacement_mark(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("你", add_bos=False)
    assert len(ids) > 1
    assert tokenizer.decode(ids[:-1]) == "\N{REPLACEMENT CHARACTER}"


def test_begin_token_is_optional_and_dropped_in_decoding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("A fox")
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1:] == tokenizer.encode("A fox", add_bos=False)
    ended = [*ids, tokenizer.eos_token_id]
    assert tokenizer.decode(ended) == "A fox"
    assert tokenizer.decode(ended, keep_special=True).startswith("<｜begin▁of▁sentence｜>A fox<｜end")


def test_numpy_ids_decode(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(np.array(tokenizer.encode("A fox"), np.uint16)) == "A fox"


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    for text in (USER_TEXT, ASSISTANT_TEXT, THINK_END_TEXT, IMAGE_TEXT):
        assert tokenizer.encode(text, add_bos=False) == [tokenizer.special_id(text)]
    # Like the released tokenizer, and unlike it above id 2.
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert tokenizer.vocab_size == 4096


def test_batch_equals_single(tokenizer: Tokenizer) -> None:
    texts = ["A fox ran.", "", "naïve 你", f"{USER_TEXT}Hi"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == tokenizer.encode(text, add_bos=False)


def test_byte_lengths_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 你好 😀 plain words\n"
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[tokenizer.encode(text + USER_TEXT)].sum() == len(text.encode())


def test_missing_folder_and_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no such folder, expected one with tokenizer\.json"):
        Tokenizer.from_folder(tmp_path / "absent")
    with pytest.raises(TokenizerError, match=r"no such file, expected .* copy it there"):
        Tokenizer.from_folder(tmp_path)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ', encoding="utf-8")
    with pytest.raises(TokenizerError, match="download the file again"):
        Tokenizer.from_folder(tmp_path)


def test_unknown_special_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"'<no such>'.*4096 ids without it"):
        tokenizer.special_id("<no such>")


@pytest.mark.parametrize("wrong", [-1, 4096])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(TokenizerError, match=r"outside the vocabulary, expected 0\.\.4095"):
        tokenizer.decode([5, wrong])
