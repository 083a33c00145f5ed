"""Prompts for the target, and its own answers as packed rows: what the draft learns from. NumPy only.

Separate from `draft_sampling.py`, which runs the model: here are texts, files and rows.
Read next: `packing.py` (the form of a row), `draft_sampling.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..text.tokenizer import ASSISTANT_TEXT, BEGIN_TEXT, THINK_END_TEXT, USER_TEXT, Tokenizer
from .data import normalise_story, read_records
from .packing import FULL_CODE, PackedRows, Piece, concatenate_rows, pack_pieces, read_rows, write_rows

MAX_PROMPT_TOKENS = 96
"""A longer prompt is left out: each of its tokens costs a step like a token of the answer."""

MIN_ANSWER_TOKENS = 2
"""An anchor and a token to predict."""

TEMPERATURES = (1.0, 0.7, 1.0, 0.0)
"""In turn: half of the prompts at temperature 1, a quarter at 0.7, a quarter greedy."""

_SHARES = {"stories": 0.3, "chat": 0.35, "json": 0.35}
"""Share of prompts. Stories have the longest answers, so by tokens they come to well over half."""

_STORY_SENTENCES = 2
_MIN_STORY_CHARACTERS = 40


class Prompts(NamedTuple):
    """Prompts of one shape.

    Attributes:
        tokens: int32 [P, longest], 0 behind a prompt's end.
        lengths: int32 [P].
        temperatures: float32 [P], of the answer; 0 for greedy.
    """

    # NumPy arrays here, JAX arrays inside a step.
    tokens: Any
    lengths: Any
    temperatures: Any


def read_prompts(corpus: str | Path, tokenizer: Tokenizer, count: int, seed: int) -> Prompts:
    """Make prompts from the training files: openings of paragraphs, and users' turns.

    Args:
        corpus: the corpus folder.
        tokenizer: the model's.
        count: prompts wanted; fewer if the files have fewer.
        seed: of their choice and order.

    Returns:
        The prompts in random order.

    Raises:
        FileNotFoundError: a corpus file is missing.
        ValueError: a damaged file, or no usable prompt at all.

    Source: spec/nano_model.md section 5, second stage.
    """
    random = np.random.default_rng(seed)
    chosen: list[np.ndarray] = []
    for kind, share in _SHARES.items():
        texts = list(_story_openings(corpus) if kind == "stories" else _questions(corpus, f"{kind}_train"))
        order = random.permutation(len(texts))[: round(count * share * 1.2)]
        encoded = tokenizer.encode_batch([texts[i] for i in order])
        fitting = [ids for ids in encoded if len(ids) <= MAX_PROMPT_TOKENS]
        chosen += fitting[: round(count * share)]
    if not chosen:
        raise ValueError(
            f"prompts from {str(corpus)!r}: got none of at most {MAX_PROMPT_TOKENS} tokens, expected some; "
            "pass the folder that holds the corpus"
        )
    return make_prompts([chosen[i] for i in random.permutation(len(chosen))])


def make_prompts(prompts: list[np.ndarray]) -> Prompts:
    """Lay prompts out as arrays and give them their temperatures in turn."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    temperatures = np.resize(np.array(TEMPERATURES, np.float32), len(prompts))
    return Prompts(tokens, lengths, temperatures)


def _story_openings(corpus: str | Path) -> Iterator[str]:
    for record in read_records(corpus, "stories_train"):
        for paragraph in normalise_story(record["text"]).split("\n\n"):
            sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph)
            opening = " ".join(sentences[:_STORY_SENTENCES])
            if len(sentences) >= _STORY_SENTENCES and len(opening) >= _MIN_STORY_CHARACTERS:
                yield BEGIN_TEXT + opening


def _questions(corpus: str | Path, name: str) -> Iterator[str]:
    for record in read_records(corpus, name):
        question = record["messages"][0]["content"]
        yield f"{BEGIN_TEXT}{USER_TEXT}{question}{ASSISTANT_TEXT}{THINK_END_TEXT}"


def answer_rows(
    tokens: np.ndarray, positions: np.ndarray, prompt_ids: np.ndarray, prompts: Prompts, pad_token_id: int
) -> PackedRows:
    """Cut what slots ran into sequences and pack these; a draft is supervised on answers only.

    Args:
        tokens: int32 [steps, B], the token that each slot ran in each step.
        positions: int32 [steps, B], its position; 0 begins a sequence.
        prompt_ids: int32 [steps, B], which prompt the sequence began with.
        prompts: the prompts.
        pad_token_id: id for gaps.

    Returns:
        The rows; loss codes are full on answers and 0 elsewhere.
    """
    pieces = []
    for slot in range(tokens.shape[1]):
        starts = np.flatnonzero(positions[:, slot] == 0)
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            length = int(prompts.lengths[prompt_ids[start, slot]])
            if stop - start >= length + MIN_ANSWER_TOKENS:
                is_answer = np.arange(stop - start) >= length
                codes = np.where(is_answer, FULL_CODE, 0).astype(np.uint8)
                pieces.append(Piece(tokens[start:stop, slot], codes))
    return pack_pieces(pieces, pad_token_id)


def _sample_files(folder: str | Path) -> list[Path]:
    return sorted(path for path in Path(folder).glob("samples-*.npz") if "partial" not in path.name)


def next_samples_file(folder: str | Path) -> tuple[Path, int]:
    """Give the file of a new sampling run in a folder, and the run's number, which varies its seed."""
    number = len(_sample_files(folder))
    return Path(folder) / f"samples-{number:03d}.npz", number


def write_samples(path: str | Path, rows: PackedRows) -> None:
    """Write sampled rows; what is written again replaces the file at once."""
    write_rows(path, rows)


def read_samples(folder: str | Path) -> PackedRows:
    """Read the rows of all sampling runs in a folder.

    Args:
        folder: of the files.

    Returns:
        The rows in the order of the runs.

    Raises:
        FileNotFoundError: none there.
        ValueError: a damaged file.
    """
    files = _sample_files(folder)
    if not files:
        raise FileNotFoundError(
            f"samples in {str(folder)!r}: got no samples-*.npz, expected one at least; run --sample first"
        )
    return concatenate_rows(read_rows(file) for file in files)
