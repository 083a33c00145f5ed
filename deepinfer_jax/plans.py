"""What host and device exchange: step shapes, admissions, prefill plans. NumPy only.

Separate because both sides depend on it: the engine fills plans in, the step reads them.
Read next: `step.py` (the device side), `engine/driver.py` (the host side).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    spans: Sequence[PromptSpan], num_slots: int, max_rows: int = ROW_BUCKETS[-1], max_chunk: int | None = None
) -> list[PrefillPlan]:
    """Pack prompts into steps, in order, each step as full as it gets.

    Args:
        spans: what to run, at most one for each slot.
        num_slots: B.
        max_rows: rows of the largest step, one of `ROW_BUCKETS`.
        max_chunk: tokens of one slot in one step at most, any number by default.

    Returns:
        The steps in order.
    """
    starts = [span.start for span in spans]
    plans = []
    while any(start < span.stop for start, span in zip(starts, spans, strict=True)):
        pieces, used = [], 0
        for number, span in enumerate(spans):
            room = min(max_rows - used, max_chunk or max_rows)
            stop = min(span.stop, starts[number] + room)
            if stop > starts[number]:
                pieces.append(PromptSpan(span.slot, span.token_ids, starts[number], stop))
                used += -(-(stop - starts[number]) // ROWS_PER_BLOCK) * ROWS_PER_BLOCK
                starts[number] = stop
        plans.append(_pack(pieces, num_slots, bucket_for(used, ROW_BUCKETS, "prefill rows")))
    return plans


def _pack(pieces: Sequence[PromptSpan], num_slots: int, num_rows: int) -> PrefillPlan:
    plan = PrefillPlan(
        token_ids=np.zeros(num_rows, np.int32),
        slots=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        is_valid=np.zeros(num_rows, bool),
        last_rows=np.full(num_slots, NOTHING, np.int32),
    )
    row = 0
    for piece in pieces:
        count = piece.stop - piece.start
        padded = -(-count // ROWS_PER_BLOCK) * ROWS_PER_BLOCK
        plan.token_ids[row : row + count] = piece.token_ids[piece.start : piece.stop]
        plan.slots[row : row + padded] = piece.slot
        plan.positions[row : row + padded] = np.arange(piece.start, piece.start + padded)
        plan.is_valid[row : row + count] = True
        if piece.stop == len(piece.token_ids):
            plan.last_rows[piece.slot] = row + count - 1
        row += padded
    return plan
