"""Rows of fixed length that hold whole sequences side by side as segments.

Separate from `data.py`, which knows text: here are only ids, and the rules that the trainer's
attention relies on. Read next: `data.py` (what the pieces are), `mixture.py` (which rows, when).
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROW_TOKENS = 512
"""Tokens of a row: the context that the nano model is trained on (spec/nano_model.md section 4)."""

CODES_PER_UNIT = 10
FULL_CODE = 10
USER_CODE = 3
"""Loss weights are stored as whole tenths: 1 for what the model shall write, 0.3 for a user's words."""

_MAX_SEGMENTS = 255  # segment numbers are uint8 and 0 is padding


class Piece(NamedTuple):
    """A sequence that fits in a row: `tokens` integer [n], `loss_codes` uint8 [n]."""

    tokens: np.ndarray
    loss_codes: np.ndarray


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed sequences. Segments of a row must not see each other; each starts at an even offset.

    Args:
        tokens: uint16 [rows, row_tokens], the pad id where nothing is.
        segments: uint8 [rows, row_tokens], the segment's number in its row from 1; 0 is padding.
        loss_codes: uint8 [rows, row_tokens], tenths of the loss weight of predicting the token AT
            this position from those before it; 0 for a segment's first token and for padding.
    """

    tokens: np.ndarray
    segments: np.ndarray
    loss_codes: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: np.ndarray) -> PackedRows:
        """Select rows, int [n]."""
        return PackedRows(self.tokens[indices], self.segments[indices], self.loss_codes[indices])

    def positions(self) -> np.ndarray:
        """Derive each token's position within its segment, int32 [rows, row_tokens]; 0 in padding."""
        offsets = np.arange(self.segments.shape[1], dtype=np.int32)
        is_start = np.ones(self.segments.shape, bool)
        is_start[:, 1:] = self.segments[:, 1:] != self.segments[:, :-1]
        starts = np.maximum.accumulate(np.where(is_start, offsets[None, :], np.int32(0)), axis=1)
        return np.where(self.segments > 0, offsets[None, :] - starts, np.int32(0))

    def loss_weights(self) -> np.ndarray:
        """Derive the loss weights, float32 [rows, row_tokens]."""
        return self.loss_codes.astype(np.float32) / np.float32(CODES_PER_UNIT)


def concatenate_rows(parts: Iterable[PackedRows]) -> PackedRows:
    """Join packed rows in order, so that one index array can address all kinds of text."""
    listed = list(parts)
    return PackedRows(
        tokens=np.concatenate([part.tokens for part in listed]),
        segments=np.concatenate([part.segments for part in listed]),
        loss_codes=np.concatenate([part.loss_codes for part in listed]),
    )


def pack_pieces(pieces: Sequence[Piece], pad_token_id: int, row_tokens: int = ROW_TOKENS) -> PackedRows:
    """Place every piece whole into the fullest row that has room, opening rows as needed.

    Args:
        pieces: sequences of 1 to `row_tokens` tokens, in the order they are placed.
        pad_token_id: id for gaps and row ends.
        row_tokens: length of a row, even.

    Returns:
        The rows; every token of every piece is in them exactly once.

    Raises:
        ValueError: an odd row length, a piece that does not fit, or an id over 65535.

    Source: segments start at even offsets because ratio-2 compression joins tokens 2g and 2g+1 of a
        sequence (spec/model.md section 6), so a row offset may stand in for a position there.
    """
    if row_tokens % 2:
        raise ValueError(f"row_tokens: got {row_tokens}, expected an even number; token pairs are compressed")
    lengths = [len(piece.tokens) for piece in pieces]
    wrong = next((n for n in lengths if not 1 <= n <= row_tokens), None)
    if wrong is not None:
        raise ValueError(f"piece: got {wrong} tokens, expected 1 to {row_tokens}; cut it first")
    largest = max((int(piece.tokens.max()) for piece in pieces), default=0)
    if max(largest, pad_token_id) > np.iinfo(np.uint16).max:
        raise ValueError(f"token id: got {largest}, expected at most 65535; rows store uint16 ids")
    placed = _assign_rows(lengths, row_tokens)
    shape = (len(placed), row_tokens)
    rows = PackedRows(
        tokens=np.full(shape, pad_token_id, np.uint16),
        segments=np.zeros(shape, np.uint8),
        loss_codes=np.zeros(shape, np.uint8),
    )
    for row, members in enumerate(placed):
        start = 0
        for number, member in enumerate(members, start=1):
            end = start + lengths[member]
            rows.tokens[row, start:end] = pieces[member].tokens
            rows.segments[row, start:end] = number
            rows.loss_codes[row, start:end] = pieces[member].loss_codes
            rows.loss_codes[row, start] = 0  # nothing before it to be predicted from
            start = end + end % 2
    return rows


def _assign_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Best fit: rows are kept by free tokens, so the search for the fullest is a short scan."""
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(row_tokens + 1)]
    for piece, length in enumerate(lengths):
        space = length + length % 2
        room = next((r for r in range(space, row_tokens + 1) if rows_by_room[r]), row_tokens)
        if rows_by_room[room]:
            row = rows_by_room[room].pop()
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(piece)
        if len(rows[row]) < _MAX_SEGMENTS:
            rows_by_room[room - space].append(row)
    return rows


def write_rows(path: str | Path, rows: PackedRows) -> None:
    """Write rows as a compressed `.npz`, atomically.

    Args:
        path: the file; its folder is made if needed.
        rows: what to write.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial.npz")
    np.savez_compressed(partial, tokens=rows.tokens, segments=rows.segments, loss_codes=rows.loss_codes)
    partial.replace(target)


def read_rows(path: str | Path) -> PackedRows:
    """Read rows written by `write_rows`.

    Args:
        path: the file.

    Returns:
        The rows.

    Raises:
        ValueError: a file that is damaged or holds something else.
    """
    try:
        # Opened here, as np.load leaves its own handle open when the file is damaged.
        with open(path, "rb") as file, np.load(file) as stored:
            return PackedRows(stored["tokens"], stored["segments"], stored["loss_codes"])
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"packed rows {str(path)!r}: got {error}, expected the arrays tokens, segments and loss_codes; "
            "delete the file and it is made again"
        ) from error
