"""What host and device exchange: step shapes, admissions, prefill plans. NumPy only.

Separate because both sides depend on it: the engine fills plans in, the step reads them.
Read next: `step.py` (the device side), `engine/driver.py` (the host side).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from .config import NOTHING
from .sampling_params import MAX_LOGPROBS, RequestError, SlotParameters

SLOT_BUCKETS = (1, 8, 64)
"""Sequences that run together; a larger batch is cut into groups of the last size."""

ROW_BUCKETS = (64, 256)
"""Rows of one prefill step, over all slots."""

PAGE_BUCKETS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Pages that one slot can have."""

LOGPROB_BUCKETS = (0, MAX_LOGPROBS)
"""Most probable tokens that a step reports."""

ROWS_PER_BLOCK = 16
"""Adjacent rows of a prefill step that are sure to share a slot, so that kernels share its index keys."""

PREFILL_MODES = ("exact", "bounded")
"""Whether the decoder half sees a whole prompt, or only its last `sliding_window + slack` tokens."""


class Admission(NamedTuple):
    """New requests for some of B slots.

    Attributes:
        is_admitted: bool [B]; the other fields count only there.
        page_table: int32 [B, pages of a slot], NOTHING where a slot has none.
        decoder_starts: int32 [B], first prompt position that the decoder half will see.
        parameters: sampling parameters.
    """

    is_admitted: np.ndarray
    page_table: np.ndarray
    decoder_starts: np.ndarray
    parameters: SlotParameters


class PrefillPlan(NamedTuple):
    """One prefill step: rows of prompts, the rows of a slot adjacent, in blocks of `ROWS_PER_BLOCK`.

    Where slots are divided over devices, the rows of each device's slots follow those of the one before,
    as many for each.

    Attributes:
        token_ids: int32 [R], padded with 0.
        slots: int32 [R].
        positions: int32 [R].
        is_valid: bool [R].
        last_rows: int32 [B], row where each slot's prompt ends, so that a token is sampled from it;
            NOTHING for a slot whose prompt does not end in this step.
    """

    token_ids: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    is_valid: np.ndarray
    last_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive tokens of a slot's prompt that are still to run.

    Args:
        slot: where it lives.
        token_ids: int32, the whole prompt.
        start: first position to run.
        stop: position after the last one.
    """

    slot: int
    token_ids: np.ndarray
    start: int
    stop: int


def bucket_for(size: int, buckets: tuple[int, ...], what: str) -> int:
    """Give the smallest bucket that holds `size`.

    Raises:
        RequestError: a size over the largest bucket.
    """
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise RequestError(f"{what}: got {size}, expected at most {buckets[-1]}; make the request smaller")


def prefill_plans(
    spans: Sequence[PromptSpan],
    num_slots: int,
    max_rows: int = ROW_BUCKETS[-1],
    max_chunk: int | None = None,
    slot_shares: int = 1,
    row_shares: int = 1,
) -> list[PrefillPlan]:
    """Pack prompts into steps, in order, each step as full as it gets.

    Args:
        spans: what to run, at most one for each slot.
        num_slots: B.
        max_rows: rows of the largest step on each device, one of `ROW_BUCKETS`.
        max_chunk: tokens of one slot in one step at most, any number by default.
        slot_shares: devices, or groups of them, that have slots of their own.
        row_shares: devices that share the rows of a slot.

    Returns:
        The steps in order.
    """
    slots_each = num_slots // slot_shares
    shares = [[span for span in spans if span.slot // slots_each == share] for share in range(slot_shares)]
    queues = [_pieces(share, max_rows * row_shares, max_chunk) for share in shares]
    plans = []
    for pieces in zip_longest(*queues, fillvalue=[]):
        used = max(sum(_padded_rows(piece) for piece in share) for share in pieces)
        rows = bucket_for(-(-used // row_shares), ROW_BUCKETS, "prefill rows") * row_shares
        plans.append(_pack(pieces, num_slots, rows))
    return plans


def _pieces(spans: Sequence[PromptSpan], max_rows: int, max_chunk: int | None) -> Iterator[list[PromptSpan]]:
    """Cut prompts into what runs in each step on one share of the slots."""
    starts = [span.start for span in spans]
    while any(start < span.stop for start, span in zip(starts, spans, strict=True)):
        pieces, used = [], 0
        for number, span in enumerate(spans):
            room = min(max_rows - used, max_chunk or max_rows)
            stop = min(span.stop, starts[number] + room)
            if stop > starts[number]:
                pieces.append(PromptSpan(span.slot, span.token_ids, starts[number], stop))
                used += _padded_rows(pieces[-1])
                starts[number] = stop
        yield pieces


def _padded_rows(piece: PromptSpan) -> int:
    return -(-(piece.stop - piece.start) // ROWS_PER_BLOCK) * ROWS_PER_BLOCK


def _pack(shares: Sequence[Sequence[PromptSpan]], num_slots: int, rows_each: int) -> PrefillPlan:
    num_rows = rows_each * len(shares)
    # Padding stands for the first slot of its share: each device knows its own slots only.
    first_slots = np.arange(len(shares), dtype=np.int32) * (num_slots // len(shares))
    plan = PrefillPlan(
        token_ids=np.zeros(num_rows, np.int32),
        slots=np.repeat(first_slots, rows_each),
        positions=np.zeros(num_rows, np.int32),
        is_valid=np.zeros(num_rows, bool),
        last_rows=np.full(num_slots, NOTHING, np.int32),
    )
    for number, pieces in enumerate(shares):
        row = number * rows_each
        for piece in pieces:
            count, padded = piece.stop - piece.start, _padded_rows(piece)
            plan.token_ids[row : row + count] = piece.token_ids[piece.start : piece.stop]
            plan.slots[row : row + padded] = piece.slot
            plan.positions[row : row + padded] = np.arange(piece.start, piece.start + padded)
            plan.is_valid[row : row + count] = True
            if piece.stop == len(piece.token_ids):
                plan.last_rows[piece.slot] = row + count - 1
            row += padded
    return plan
