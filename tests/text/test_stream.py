"""Streaming text over split characters (BC64)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.text.stream import TextStream
from deepinfer_jax.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(NANO_FOLDER)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("text", ["😀", "ď", "삼겹살", "a😀b", "The café said “hi”."])
def test_bc64_pieces_join_to_the_text_and_hold_no_half_character(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_bos=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bc64_emoji_spans_tokens_and_waits_for_the_last(tokenizer: Tokenizer):
    ids = tokenizer.encode("😀", add_bos=False)
    assert len(ids) > 1
    assert pieces_of(tokenizer, ids) == [""] * (len(ids) - 1) + ["😀", ""]


def test_bc64_cut_tail_gives_one_replacement_at_the_end_only(tokenizer: Tokenizer):
    ids = tokenizer.encode("ok 😀", add_bos=False)[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == "ok \ufffd"
    assert pieces[-1] == "\ufffd"
    assert not any("\ufffd" in piece for piece in pieces[:-1])


@given(ids=st.lists(st.integers(3, 4038), max_size=12))
@settings(max_examples=100)
def test_any_tokens_stream_to_their_joint_decoding(tokenizer: Tokenizer, ids: list[int]):
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
