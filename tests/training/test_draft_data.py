"""Prompts are what the corpus says, and what slots ran becomes sequences supervised on answers.

Separate because it needs no model.
Read next: `test_draft_sampling.py`.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.text.tokenizer import ASSISTANT_TEXT, THINK_END_TEXT, Tokenizer
from deepinfer_jax.training.draft_data import (
    MAX_PROMPT_TOKENS,
    answer_rows,
    make_prompts,
    next_samples_file,
    read_prompts,
    read_samples,
    write_samples,
)

STORY = "The miller had three sons. The youngest of them loved the river. Nobody knew why he did."
CHAPTER = f"{STORY}\n\nToo short. Yes.\n\nOne sentence alone is no opening of two sentences\n\n{STORY}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(NANO_FOLDER)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")

    def turn(question: str) -> dict:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "The Elbe."}]
        return {"messages": messages}

    files = {
        "stories_train": [{"text": CHAPTER}] * 40,
        "chat_train": [turn("Name a river."), turn("Say it again. " * MAX_PROMPT_TOKENS)] * 40,
        "json_train": [turn("Name a river as JSON.")] * 80,
    }
    for name, records in files.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return folder


def test_prompts_are_openings_and_questions(corpus: Path, tokenizer: Tokenizer) -> None:
    prompts = read_prompts(corpus, tokenizer, 60, seed=1)
    texts = {
        tokenizer.decode(row[:length], keep_special=True)
        for row, length in zip(prompts.tokens, prompts.lengths, strict=True)
    }
    opening = "The miller had three sons. The youngest of them loved the river."
    assert len(texts) == 3
    assert {text for text in texts if text.endswith(opening)} == texts - {
        text for text in texts if text.endswith(ASSISTANT_TEXT + THINK_END_TEXT)
    }
    assert prompts.lengths.max() <= MAX_PROMPT_TOKENS
    assert (prompts.tokens[:, 0] == tokenizer.bos_token_id).all()


def test_half_of_the_prompts_are_at_temperature_one_and_a_quarter_greedy(corpus, tokenizer) -> None:
    temperatures = read_prompts(corpus, tokenizer, 60, seed=1).temperatures.tolist()
    counts = {value: temperatures.count(value) for value in set(temperatures)}
    total = len(temperatures)
    assert counts == {1.0: total / 2, np.float32(0.7): total / 4, 0.0: total / 4}


def test_prompts_repeat_by_seed(corpus: Path, tokenizer: Tokenizer) -> None:
    first, again, other = (read_prompts(corpus, tokenizer, 40, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.lengths, other.lengths)


def test_a_corpus_without_short_prompts_is_refused(corpus, tokenizer, tmp_path: Path) -> None:
    for name in ("stories_train", "chat_train", "json_train"):
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt"):
            pass
    with pytest.raises(ValueError, match="got none"):
        read_prompts(tmp_path, tokenizer, 10, seed=1)


def test_what_slots_ran_becomes_sequences() -> None:
    """Slot 0: an answer of 3, then a prompt cut off; slot 1: one token of an answer, which is too few."""
    prompts = make_prompts([np.array([5, 6]), np.array([7, 8, 9])])
    tokens = np.array([[5, 7], [6, 8], [21, 9], [22, 31], [1, 7], [7, 8]])
    positions = np.array([[0, 0], [1, 1], [2, 2], [3, 3], [4, 0], [0, 1]])
    ids = np.array([[0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [1, 1]])
    rows = answer_rows(tokens, positions, ids, prompts, pad_token_id=2)
    assert len(rows) == 1
    assert rows.tokens[0, :6].tolist() == [5, 6, 21, 22, 1, 2]
    assert rows.segments[0, :6].tolist() == [1, 1, 1, 1, 1, 0]
    assert rows.loss_codes[0, :6].tolist() == [0, 0, 10, 10, 10, 0]


def test_sampling_runs_have_files_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--sample"):
        read_samples(tmp_path)
    prompts = make_prompts([np.array([5, 6])])
    for number in range(2):
        path, found = next_samples_file(tmp_path)
        assert found == number
        tokens = np.array([[5], [6], [20 + number], [30 + number]])
        zeros = np.zeros_like(tokens)
        write_samples(path, answer_rows(tokens, np.arange(4)[:, None], zeros, prompts, pad_token_id=2))
    assert read_samples(tmp_path).tokens[:, :4].tolist() == [[5, 6, 20, 30], [5, 6, 21, 31]]
