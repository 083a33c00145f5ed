"""Packing, loss weights, held-out sizes and the order of rows, on texts made here.

Separate from the trainer's tests, as this side runs without JAX.
Read next: `deepinfer_jax/training/packing.py`.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.text.tokenizer import ASSISTANT_TEXT, THINK_END_TEXT, Tokenizer
from deepinfer_jax.training import data
from deepinfer_jax.training.mixture import Mixture, batch_indices, rows_before, steps_indices
from deepinfer_jax.training.packing import (
    FULL_CODE,
    ROW_TOKENS,
    USER_CODE,
    PackedRows,
    Piece,
    concatenate_rows,
    pack_pieces,
    read_rows,
    write_rows,
)

PAD = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(NANO_FOLDER)


def turn(question: str, answer: str) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"kind": "talk", "messages": messages}


def numbered_pieces(lengths: list[int]) -> list[Piece]:
    """Pieces whose tokens are all different, so that a lost or doubled one shows."""
    starts = np.cumsum([3, *lengths])
    return [
        Piece(s + np.arange(n), np.full(n, FULL_CODE, np.uint8))
        for s, n in zip(starts, lengths, strict=False)
    ]


def segments_of(rows: PackedRows) -> list[tuple[int, np.ndarray]]:
    """Every segment as (row offset, tokens)."""
    found = []
    for tokens, numbers in zip(rows.tokens, rows.segments, strict=True):
        for number in range(1, numbers.max() + 1):
            offsets = np.flatnonzero(numbers == number)
            assert np.array_equal(offsets, np.arange(offsets[0], offsets[-1] + 1))
            found.append((int(offsets[0]), tokens[offsets]))
    return found


@given(st.lists(st.integers(1, 16), max_size=40))
def test_packing_loses_and_doubles_nothing(lengths: list[int]) -> None:
    pieces = numbered_pieces(lengths)
    rows = pack_pieces(pieces, PAD, row_tokens=16)
    found = segments_of(rows)
    assert all(offset % 2 == 0 for offset, _ in found)
    assert sorted(tuple(tokens) for _, tokens in found) == sorted(tuple(p.tokens) for p in pieces)
    assert np.all(rows.tokens[rows.segments == 0] == PAD)
    assert np.all(rows.loss_codes[rows.segments == 0] == 0)
    assert np.all((rows.loss_codes > 0) == (rows.positions() > 0))


def test_packing_is_dense() -> None:
    lengths = np.random.default_rng(0).integers(10, 200, 400).tolist()
    rows = pack_pieces(numbered_pieces(lengths), PAD)
    assert (rows.segments > 0).mean() > 0.95


def test_positions_restart_with_each_segment() -> None:
    rows = pack_pieces(numbered_pieces([3, 4]), PAD, row_tokens=10)
    assert rows.segments.tolist() == [[1, 1, 1, 0, 2, 2, 2, 2, 0, 0]]
    assert rows.positions().tolist() == [[0, 1, 2, 0, 0, 1, 2, 3, 0, 0]]
    assert rows.loss_weights().tolist() == [[0, 1, 1, 0, 0, 1, 1, 1, 0, 0]]


def test_row_takes_at_most_255_segments() -> None:
    rows = pack_pieces(numbered_pieces([1] * 300), PAD, row_tokens=1024)
    assert rows.segments.max(axis=1).tolist() == [255, 45]


@pytest.mark.parametrize(
    ("pieces", "row_tokens", "message"),
    [
        pytest.param(numbered_pieces([9]), 8, "got 9 tokens, expected 1 to 8", id="too_long"),
        pytest.param(numbered_pieces([3]), 7, "expected an even number", id="odd_row"),
        pytest.param([Piece(np.array([70_000]), np.array([0]))], 8, "at most 65535", id="large_id"),
    ],
)
def test_impossible_packing_is_refused(pieces: list[Piece], row_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_pieces(pieces, PAD, row_tokens)


def test_story_is_cut_into_whole_rows_and_a_last_piece(tokenizer: Tokenizer) -> None:
    text = " ".join(f"The fox met {i} hens." for i in range(200))
    expected = [0, *tokenizer.encode(text, add_bos=False), 1]
    pieces = list(data.story_pieces([text], tokenizer))
    assert [len(p.tokens) for p in pieces[:-1]] == [ROW_TOKENS] * (len(pieces) - 1)
    assert len(pieces[-1].tokens) >= data.MIN_STORY_TOKENS
    assert np.concatenate([p.tokens for p in pieces]).tolist() == expected


def test_short_last_piece_is_dropped_unless_all_is_wanted(tokenizer: Tokenizer) -> None:
    assert list(data.story_pieces(["A fox."], tokenizer)) == []
    (piece,) = data.story_pieces(["A fox."], tokenizer, min_tokens=1)
    assert piece.tokens.tolist() == [0, *tokenizer.encode("A fox.", add_bos=False), 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("THE END", "The end"),
        (
            'It ran.\n\n"I DO!" SAID HE. I WENT\n\nSo be it.',
            'It ran.\n\n"I do!" Said he. I went\n\nSo be it.',
        ),
        ('"I?"', '"I?"'),
        ("A. B.", "A. B."),
        ("It was the USA.", "It was the USA."),
    ],
)
def test_capital_paragraphs_become_sentences(text: str, expected: str) -> None:
    assert data.normalise_story(text) == expected


def test_turn_is_encoded_in_the_official_form_with_its_weights(tokenizer: Tokenizer) -> None:
    (piece,) = data.turn_pieces([turn("What is a fox?", "An animal.")], tokenizer)
    assert tokenizer.decode(piece.tokens, keep_special=True) == (
        "<｜begin▁of▁sentence｜><｜User｜>What is a fox?"
        "<｜Assistant｜></think>An animal.<｜end▁of▁sentence｜>"
    )
    start = piece.tokens.tolist().index(tokenizer.special_id(THINK_END_TEXT)) + 1
    assert piece.loss_codes.tolist() == [USER_CODE] * start + [FULL_CODE] * (len(piece.tokens) - start)
    weights = pack_pieces([piece], PAD).loss_weights()[0, : len(piece.tokens)]
    assert weights[0] == 0
    assert np.allclose(weights[1:start], 0.3)
    assert np.all(weights[start:] == 1)


def test_long_turn_is_cut(tokenizer: Tokenizer) -> None:
    (piece,) = data.turn_pieces([turn("Count.", "one two " * 600)], tokenizer)
    assert len(piece.tokens) == len(piece.loss_codes) == ROW_TOKENS


@pytest.mark.parametrize(
    ("record", "message"),
    [
        pytest.param(turn(f"a {ASSISTANT_TEXT} b", "c"), "got 2", id="marker_in_text"),
        pytest.param({"messages": [{"role": "user", "content": "a"}]}, "got roles", id="no_answer"),
    ],
)
def test_unusable_record_is_refused(tokenizer: Tokenizer, record: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(data.turn_pieces([record], tokenizer))


def write_corpus(folder: Path) -> None:
    story = " ".join(f"The fox met {i} hens." for i in range(150))
    files = {
        "stories_train": [{"book": "A", "text": story}],
        "stories2_train": [{"book": "B", "text": story.upper()}],
        "stories_valid": [{"book": "C", "text": "A fox."}, {"book": "D", "text": story}],
    }
    for kind in ("chat", "json"):
        files[f"{kind}_train"] = [turn(f"What is {i}?", f"The number {i}.") for i in range(60)]
        files[f"{kind}_valid"] = [turn("What is naïve?", "A word.")]
    for name, records in files.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)


def test_training_rows_come_from_the_cache_the_second_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_corpus(tmp_path)
    made = data.training_rows(tmp_path, tokenizer, tmp_path / "cache")
    read = data.training_rows(tmp_path / "no_corpus", tokenizer, tmp_path / "cache")
    assert tuple(made) == tuple(read) == data.KINDS
    for kind in data.KINDS:
        for name in ("tokens", "segments", "loss_codes"):
            assert np.array_equal(getattr(made[kind], name), getattr(read[kind], name))
    assert not list((tmp_path / "cache").glob("*partial*"))
    joined = concatenate_rows(made.values())
    assert len(joined) == sum(len(rows) for rows in made.values())
    assert np.array_equal(joined.take(np.array([len(joined) - 1])).tokens[0], made["json"].tokens[-1])


def test_missing_corpus_and_bad_line_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(FileNotFoundError, match=r"stories_train\.jsonl\.xz.*pass the folder"):
        data.training_rows(tmp_path, tokenizer)
    with lzma.open(tmp_path / "x.jsonl.xz", "wt") as lines:
        lines.write('{"a": 1}\n{"a"\n')
    with pytest.raises(ValueError, match=r"x\.jsonl\.xz line 2"):
        data.read_records(tmp_path, "x")


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.npz", pack_pieces(numbered_pieces([5]), PAD))
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="delete the file"):
        read_rows(tmp_path / "a.npz")


def test_held_out_counts_predicted_tokens_and_their_bytes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_corpus(tmp_path)
    found = data.held_out(tmp_path, tokenizer)
    assert tuple(found) == data.KINDS
    chat = found["chat"]
    assert chat.num_bytes == len("What is naïve?A word.".encode())
    assert chat.num_answer_bytes == len(b"A word.")
    assert chat.num_tokens == (chat.rows.segments > 0).sum() - 1
    assert chat.bits_per_byte(chat.num_bytes * float(np.log(2))) == pytest.approx(1.0)
    stories = found["stories"]
    assert stories.num_answer_tokens == stories.num_tokens
    assert any(len(tokens) < data.MIN_STORY_TOKENS for _, tokens in segments_of(stories.rows))


def test_evaluation_batches_count_every_row_once() -> None:
    rows = pack_pieces(numbered_pieces([ROW_TOKENS - 1] * 5), PAD)
    batches = list(data.evaluation_batches(rows, 2))
    assert [len(batch) for batch in batches] == [2, 2, 2]
    joined = concatenate_rows(batches)
    assert np.array_equal(joined.loss_codes[:5], rows.loss_codes)
    assert joined.loss_codes[5:].sum() == joined.segments[5:].sum() == 0


MIXTURE = Mixture(num_rows=(50, 20, 7), batch_rows=16, num_steps=100)


def kind_of(indices: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.cumsum(MIXTURE.num_rows), indices, side="right")


def test_batches_are_a_function_of_seed_and_step() -> None:
    whole = steps_indices(MIXTURE, 3, 0, 100)
    assert whole.shape == (100, 16)
    assert np.array_equal(steps_indices(MIXTURE, 3, 61, 10), whole[61:71])
    assert np.array_equal(batch_indices(MIXTURE, 3, 99), whole[99])
    assert not np.array_equal(batch_indices(MIXTURE, 4, 99), whole[99])


def test_first_phase_reads_the_first_kind_only_then_shares_hold() -> None:
    kinds = kind_of(steps_indices(MIXTURE, 0, 0, 100))
    assert np.all(kinds[:30] == 0)
    counts = np.bincount(kinds[30:].ravel(), minlength=3)
    assert np.allclose(counts / counts.sum(), MIXTURE.shares, atol=1e-3)
    for step in range(30, 100):
        in_step = np.bincount(kinds[step], minlength=3)
        assert np.all(np.abs(in_step - 16 * np.array(MIXTURE.shares)) < 2)


def test_every_row_is_read_once_an_epoch() -> None:
    read = steps_indices(MIXTURE, 0, 0, 100).ravel()
    for kind, count in enumerate(MIXTURE.num_rows):
        of_kind = read[kind_of(read) == kind]
        epochs = [of_kind[i : i + count] for i in range(0, len(of_kind) - count + 1, count)]
        assert len(epochs) > 1
        assert all(max(Counter(epoch.tolist()).values()) == 1 for epoch in epochs)
        assert not np.array_equal(epochs[0], epochs[1])


def test_impossible_mixtures_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        Mixture((5, 5), 2, 3)
    with pytest.raises(ValueError, match="positive"):
        Mixture((5, 0, 5), 2, 3)
    with pytest.raises(ValueError, match=r"expected 0\.\.100"):
        rows_before(MIXTURE, 101)
    with pytest.raises(ValueError, match=r"expected 0\.\.100"):
        batch_indices(MIXTURE, 0, 100)
