"""What host and device exchange: step shapes, admissions, plans. NumPy only.

Separate because both sides depend on it: the scheduler fills plans in, the steps read them.
Read next: `step.py` (the device side), `engine/scheduler.py` (the host side).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from .config import NOTHING
from .sampling_params import MAX_LOGPROBS, RequestError
from .slot_parameters import SlotParameters

SLOT_BUCKETS = (1, 8, 16, 64, 256)
"""Sequences that run together."""

DEFAULT_SLOTS = 64
"""Sequences that run together unless the user says more; more requests than that wait."""

ROW_BUCKETS = (64, 256)
"""Rows of one prefill step, over all slots."""

PAGE_BUCKETS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Pages that one slot can have."""

LOGPROB_BUCKETS = (0, MAX_LOGPROBS)
"""Most probable tokens that a step reports."""

ROWS_PER_BLOCK = 16
"""Adjacent rows of a prefill step that are sure to share a slot, so that kernels share its index keys."""

PREFILL_MODES = ("exact", "bounded")
"""Whether the decoder half sees a whole prompt, or only its last `sliding_window` tokens."""

DRAFT_MODES = ("off", "fixed", "dynamic", "threshold", "early_stop")
"""How many drafts are verified: none are made; all; as many as pay; up to the first of low confidence;
as the greedy search with an early stop finds."""

PROBE, PLAIN_STEP, BARE_STEP = -2, -3, -4
"""What a step with drafts may be told instead of a choice: to draft but verify as little as can be, to see
what drafts are worth; to be a decode step that drafts nothing; or one that does not even leave behind what
draft stages read of its tokens, where no draft will be made before that has left the window."""

PRIOR_CONFIDENCE = 0.7
"""How likely a draft is accepted if those before were, of a sequence that has had no draft yet: a guess."""

VERIFICATION_MODES = ("coupled", "rejection", "block")
"""How drafts are accepted: where they equal the tokens of plain decoding with the same seed; by rejection
sampling, token by token; by rejection sampling of whole blocks."""


class Admission(NamedTuple):
    """Requests for some of B slots, and the pages of all.

    Attributes:
        is_admitted: bool [B]; all fields but `page_table` count only there.
        page_table: int32 [B, pages of a slot], NOTHING where a slot has none.
        decoder_starts: int32 [B], first prompt position that the decoder half will see.
        lengths: int32 [B], tokens that are in the slot's cache already.
        tokens: int32 [B], latest token, not yet in the cache, of a slot that runs.
        is_running: bool [B], whether the slot goes on from that token, rather than from rows to come.
        prompt_lengths: int32 [B], tokens of the prompt.
        num_generated: int32 [B], tokens of the output that will not come as rows.
        parameters: sampling parameters.
    """

    is_admitted: np.ndarray
    page_table: np.ndarray
    decoder_starts: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    is_running: np.ndarray
    prompt_lengths: np.ndarray
    num_generated: np.ndarray
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
        next_ids: int32 [R], the token after each row, NOTHING where it is not known yet.
        last_rows: int32 [B], row where each slot's prompt ends, so that a token is sampled from it;
            NOTHING for a slot whose prompt does not end in this step.
    """

    token_ids: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    is_valid: np.ndarray
    next_ids: np.ndarray
    last_rows: np.ndarray


@dataclass(slots=True)
class StepPlan:
    """One step of an engine: what the devices do, in this order.

    Attributes:
        saves_before: (snapshot, slot) to copy before anything changes.
        restores: (slot, snapshot) to copy.
        imports: (slot, pages of the slot, what another engine exported) to copy.
        admission: requests that start in a slot, with the pages of all slots.
        page_table: int32 [B, pages of a slot], where only that changed.
        notes: (slot, token ids) of sequences that come without rows, for the penalties.
        is_decoding: bool [B], slots that run their latest token, and drafts after it.
        draft_choice: how many drafts to verify, as `speculate.py` numbers it; `PROBE`, `PLAIN_STEP`,
            `BARE_STEP`, or NOTHING for the devices to choose.
        encode: prompt rows for the encoder half alone.
        prefill: prompt rows for all layers.
        saves_after: (snapshot, slot) to copy at the end.
        num_logprobs: most probable tokens to report, one of `LOGPROB_BUCKETS`.
        num_prompt_logprobs: the same after each prompt row, None for none.
    """

    saves_before: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    imports: list[tuple[int, np.ndarray, Any]] = field(default_factory=list)
    admission: Admission | None = None
    page_table: np.ndarray | None = None
    notes: list[tuple[int, np.ndarray]] = field(default_factory=list)
    is_decoding: np.ndarray | None = None
    draft_choice: int = NOTHING
    encode: PrefillPlan | None = None
    prefill: PrefillPlan | None = None
    saves_after: list[tuple[int, int]] = field(default_factory=list)
    num_logprobs: int = 0
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Consecutive tokens of a slot's prompt that are still to run.

    Args:
        slot: where it lives.
        token_ids: int32, the whole prompt.
        start: first position to run.
        stop: position after the last one.
        samples: whether a token is sampled after the last token of the prompt.
    """

    slot: int
    token_ids: np.ndarray
    start: int
    stop: int
    samples: bool = True


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
        used = max(sum(padded_rows(piece) for piece in share) for share in pieces)
        rows = bucket_for(-(-used // row_shares), ROW_BUCKETS, "prefill rows") * row_shares
        plans.append(pack_rows(pieces, num_slots, rows))
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
                used += padded_rows(pieces[-1])
                starts[number] = stop
        yield pieces


def padded_rows(piece: PromptSpan) -> int:
    """Count the rows that a piece of a prompt takes, in whole blocks."""
    return -(-(piece.stop - piece.start) // ROWS_PER_BLOCK) * ROWS_PER_BLOCK


def pack_rows(shares: Sequence[Sequence[PromptSpan]], num_slots: int, rows_each: int) -> PrefillPlan:
    """Make a step of pieces of prompts.

    Args:
        shares: the pieces on each share of the slots, at most one a slot.
        num_slots: B.
        rows_each: rows of each share.

    Returns:
        The step.
    """
    num_rows = rows_each * len(shares)
    # Padding stands for the first slot of its share: each device knows its own slots only.
    first_slots = np.arange(len(shares), dtype=np.int32) * (num_slots // len(shares))
    plan = PrefillPlan(
        token_ids=np.zeros(num_rows, np.int32),
        slots=np.repeat(first_slots, rows_each),
        positions=np.zeros(num_rows, np.int32),
        is_valid=np.zeros(num_rows, bool),
        next_ids=np.full(num_rows, NOTHING, np.int32),
        last_rows=np.full(num_slots, NOTHING, np.int32),
    )
    for number, pieces in enumerate(shares):
        row = number * rows_each
        for piece in pieces:
            count, padded = piece.stop - piece.start, padded_rows(piece)
            plan.token_ids[row : row + count] = piece.token_ids[piece.start : piece.stop]
            plan.slots[row : row + padded] = piece.slot
            plan.positions[row : row + padded] = np.arange(piece.start, piece.start + padded)
            plan.is_valid[row : row + count] = True
            following = piece.token_ids[piece.start + 1 : piece.stop + 1]
            plan.next_ids[row : row + len(following)] = following
            if piece.stop == len(piece.token_ids) and piece.samples:
                plan.last_rows[piece.slot] = row + count - 1
            row += padded
    return plan
