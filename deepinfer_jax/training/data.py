"""The training corpus as packed rows of token ids: NumPy only, so that it runs without a device.

Separate from the trainer because it runs once and its result is cached.
Read next: `packing.py` (the form of a row), `mixture.py` (the order of rows), `lm.py` (the trainer).
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np

from ..text.tokenizer import ASSISTANT_TEXT, BEGIN_TEXT, END_TEXT, THINK_END_TEXT, USER_TEXT, Tokenizer
from .packing import FULL_CODE, ROW_TOKENS, USER_CODE, PackedRows, Piece, pack_pieces, read_rows, write_rows

KINDS = ("stories", "chat", "json")
"""Kinds of text, in the order in which their rows are concatenated and `Mixture` counts them."""

_TRAIN_FILES = {
    "stories": ("stories_train", "stories2_train"),
    "chat": ("chat_train",),
    "json": ("json_train",),
}
_VALID_FILES = {"stories": "stories_valid", "chat": "chat_valid", "json": "json_valid"}

MIN_STORY_TOKENS = 32
"""A chapter's last piece shorter than this is dropped from training."""

_RECORDS_A_BATCH = 512  # bounds the memory that encoding holds; larger batches are no faster
_PACKING_VERSION = 1  # raise when the rules change, so that caches of the old rules are not read


def read_records(folder: str | Path, name: str) -> list[dict[str, Any]]:
    """Read one compressed JSON Lines file of the corpus.

    Args:
        folder: the corpus folder.
        name: file name without `.jsonl.xz`.

    Returns:
        The rows.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line that is not JSON, with its number.
    """
    path = Path(folder) / f"{name}.jsonl.xz"
    if not path.is_file():
        raise FileNotFoundError(
            f"corpus file {str(path)!r}: got no such file, expected JSON Lines packed with xz; "
            "pass the folder that holds the corpus"
        )
    records: list[dict[str, Any]] = []
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path.name} line {number}: got {error}, expected JSON; fetch it again"
                ) from error
    return records


def normalise_story(text: str) -> str:
    """Put paragraphs in capitals into sentence case, as runs of capitals are learnt and repeated.

    Args:
        text: a chapter, paragraphs separated by a blank line.

    Returns:
        The chapter; paragraphs with a lower-case letter, and lone initials, are unchanged.

    Source: spec/nano_model.md section 6 (seen in samples).
    """
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        _sentence_case(p) if p.isupper() and re.search("[A-Z]{2}", p) else p for p in paragraphs
    )


def _sentence_case(paragraph: str) -> str:
    lowered = re.sub(r"\bi\b", "I", paragraph.lower())
    return re.sub(r"(^\W*|[.!?]\W*\s\W*)([a-z])", lambda m: m[1] + m[2].upper(), lowered)


def story_pieces(
    texts: Iterable[str], tokenizer: Tokenizer, min_tokens: int = MIN_STORY_TOKENS
) -> Iterator[Piece]:
    """Encode chapters as begin, text, end and cut each into rows.

    Args:
        texts: chapters.
        tokenizer: the model's.
        min_tokens: a shorter last piece of a chapter is dropped.

    Yields:
        Pieces of `ROW_TOKENS` tokens, and a chapter's shorter last one. A piece after the first does
        not begin with the begin token: it is a text met in its middle.
    """
    ends = np.asarray([tokenizer.bos_token_id], np.int32), np.asarray([tokenizer.eos_token_id], np.int32)
    for group in batched(texts, _RECORDS_A_BATCH):
        for ids in tokenizer.encode_batch([normalise_story(text) for text in group]):
            chapter = np.concatenate([ends[0], ids, ends[1]])
            for start in range(0, len(chapter), ROW_TOKENS):
                tokens = chapter[start : start + ROW_TOKENS]
                if len(tokens) >= min_tokens:
                    yield Piece(tokens, np.full(len(tokens), FULL_CODE, np.uint8))


def turn_text(question: str, answer: str) -> str:
    """Render one user turn and its answer in the official form without thinking.

    Args:
        question: the user's words.
        answer: the assistant's words.

    Returns:
        The text; encoded, its markers become special tokens.

    Source: spec/recipe.md section 3.
    """
    return f"{BEGIN_TEXT}{USER_TEXT}{question}{ASSISTANT_TEXT}{THINK_END_TEXT}{answer}{END_TEXT}"


def turn_pieces(records: Iterable[dict[str, Any]], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Encode conversations of one turn; what the assistant writes weighs 1, what precedes it 0.3.

    Args:
        records: rows with `messages`: a user's, then an assistant's.
        tokenizer: the model's.

    Yields:
        One piece a record, cut after `ROW_TOKENS` tokens.

    Raises:
        ValueError: other roles, or a text that spells a chat marker.
    """
    assistant = tokenizer.special_id(ASSISTANT_TEXT)
    for group in batched(records, _RECORDS_A_BATCH):
        for ids in tokenizer.encode_batch([_record_text(record) for record in group]):
            markers = np.flatnonzero(ids == assistant)
            if len(markers) != 1:
                raise ValueError(
                    f"chat record: got {len(markers)} assistant markers, expected 1; "
                    f"remove the text that spells {ASSISTANT_TEXT!r}"
                )
            answer_start = markers[0] + 2  # after the assistant marker and the end of empty thinking
            codes = np.where(np.arange(len(ids)) < answer_start, USER_CODE, FULL_CODE).astype(np.uint8)
            yield Piece(ids[:ROW_TOKENS], codes[:ROW_TOKENS])


def _record_text(record: dict[str, Any]) -> str:
    messages = record["messages"]
    roles = [message["role"] for message in messages]
    if roles != ["user", "assistant"]:
        raise ValueError(f"chat record: got roles {roles}, expected ['user', 'assistant']; split the record")
    return turn_text(messages[0]["content"], messages[1]["content"])


def training_rows(
    corpus: str | Path, tokenizer: Tokenizer, cache: str | Path | None = None
) -> dict[str, PackedRows]:
    """Encode and pack the training files, or read the result of an earlier call.

    Args:
        corpus: the corpus folder; not read when the cache has everything.
        tokenizer: the model's.
        cache: folder of packed rows, read and written; delete it when the corpus changes. Another
            tokenizer or another version of the rules makes other files there.

    Returns:
        Rows by kind, in the order of `KINDS`.

    Raises:
        FileNotFoundError: a corpus file is missing.
        ValueError: a damaged file or an unusable record.
    """
    rows: dict[str, PackedRows] = {}
    for kind in KINDS:
        name = f"{kind}-v{_PACKING_VERSION}-{tokenizer.fingerprint[:12]}.npz"
        cached = None if cache is None else Path(cache) / name
        if cached is not None and cached.is_file():
            rows[kind] = read_rows(cached)
            continue
        records = [record for file in _TRAIN_FILES[kind] for record in read_records(corpus, file)]
        rows[kind] = _pack_records(kind, records, tokenizer, MIN_STORY_TOKENS)
        if cached is not None:
            write_rows(cached, rows[kind])
    return rows


def _pack_records(
    kind: str, records: Sequence[dict[str, Any]], tokenizer: Tokenizer, min_story_tokens: int
) -> PackedRows:
    if kind == "stories":
        pieces = story_pieces((record["text"] for record in records), tokenizer, min_story_tokens)
    else:
        pieces = turn_pieces(records, tokenizer)
    return pack_pieces(list(pieces), tokenizer.pad_token_id)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Packed held-out text with what its loss is divided by.

    Args:
        rows: every row, packed like training rows; no short piece is dropped.
        num_tokens: tokens that are predicted (loss code over 0). Sum their losses unweighted.
        num_bytes: UTF-8 bytes that those tokens spell; special tokens spell none.
        num_answer_tokens: those of them that the assistant or the author writes (full loss code).
        num_answer_bytes: UTF-8 bytes of the latter.
    """

    rows: PackedRows
    num_tokens: int
    num_bytes: int
    num_answer_tokens: int
    num_answer_bytes: int

    def bits_per_byte(self, total_nats: float) -> float:
        """Convert the summed loss of all predicted tokens, in nats, to bits per byte of text."""
        return total_nats / float(np.log(2.0)) / self.num_bytes


def held_out(corpus: str | Path, tokenizer: Tokenizer) -> dict[str, HeldOut]:
    """Encode and pack the three held-out files.

    Args:
        corpus: the corpus folder.
        tokenizer: the model's.

    Returns:
        Held-out text by kind, in the order of `KINDS`.

    Raises:
        FileNotFoundError: a corpus file is missing.
        ValueError: a damaged file or an unusable record.
    """
    return {
        kind: measure_rows(
            _pack_records(kind, read_records(corpus, _VALID_FILES[kind]), tokenizer, min_story_tokens=1),
            tokenizer,
        )
        for kind in KINDS
    }


def measure_rows(rows: PackedRows, tokenizer: Tokenizer) -> HeldOut:
    """Count the predicted tokens of rows and the bytes that they spell."""
    lengths = tokenizer.byte_lengths()[rows.tokens]
    predicted, answer = rows.loss_codes > 0, rows.loss_codes == FULL_CODE
    return HeldOut(
        rows=rows,
        num_tokens=int(predicted.sum()),
        num_bytes=int(lengths[predicted].sum()),
        num_answer_tokens=int(answer.sum()),
        num_answer_bytes=int(lengths[answer].sum()),
    )


def evaluation_batches(rows: PackedRows, batch_rows: int) -> Iterator[PackedRows]:
    """Walk through rows once in order, in batches of equal size so that one compilation serves all.

    Args:
        rows: held-out rows.
        batch_rows: rows of a batch.

    Yields:
        Batches; the last is filled up with copies of row 0 whose loss codes and segments are 0.
    """
    for start in range(0, len(rows), batch_rows):
        indices = np.arange(start, start + batch_rows)
        is_real = indices < len(rows)
        batch = rows.take(np.where(is_real, indices, 0))
        mask = is_real[:, None].astype(np.uint8)
        yield PackedRows(batch.tokens, batch.segments * mask, batch.loss_codes * mask)
