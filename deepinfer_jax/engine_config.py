"""How an engine runs requests: sizes, budgets, modes. NumPy only.

Separate from `config.py` because nothing here belongs to a checkpoint, and from `plans.py` because a
user writes it.
Read next: `engine/scheduler.py`, which obeys it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .config import PAGE_TOKENS, CacheConfig, ModelConfig
from .plans import (
    DEFAULT_SLOTS,
    DRAFT_MODES,
    PAGE_BUCKETS,
    PREFILL_MODES,
    ROW_BUCKETS,
    ROWS_PER_BLOCK,
    SLOT_BUCKETS,
    VERIFICATION_MODES,
    bucket_for,
)
from .sampling_params import RequestError

DEFAULT_CONTEXT = 8192
"""Tokens of one request unless the user says more: the reference attention reads all pages of a slot."""

SNAPSHOTS_PER_SLOT = 2
"""Stored window states for each slot by default; one costs as much memory as a slot without its pages."""

BLOCKS_OF_SLACK = 3
"""Draft blocks by which a sequence can be shortened: what one step rejects is overwritten by the next, and
a window state can still be stored for a page boundary that was passed a block ago."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests are run.

    With batch invariant numerics no choice changes a token but `prefill`, and `verification` where it is
    not "coupled".

    Args:
        prefill: "exact", or "bounded": the decoder half sees only the last `sliding_window` tokens of a
            prompt, which is faster and approximate by design.
        num_slots: sequences that run together, on each device that has its own, one of `SLOT_BUCKETS`;
            `DEFAULT_SLOTS` by default.
        max_context: tokens of one request at most, prompt and output; the model's limit or
            `DEFAULT_CONTEXT`, whichever is smaller, by default.
        num_pages: pages for all sequences and the prefix cache, on each device that has its own; by
            default every slot can be full. With fewer, a request is preempted when they run out.
        max_rows: prompt rows of a step at most, on each device, one of `ROW_BUCKETS`.
        max_chunk: prompt tokens of one request in a step at most, any number by default.
        token_budget: rows of a step at most, on each device that has slots of its own; running sequences
            come first, prompts get the rest. A small one keeps the time between tokens short.
        prefix_cache: whether prompts reuse what earlier ones left, bitwise as if computed again.
        num_snapshots: window states kept for reuse, on each device that has slots of its own.
        overlap: 1 to run a step while the host reads the one before, 0 to wait for each.
        drafts: "off"; or how many of a block of drafts are verified in a step: "fixed", all of them;
            "dynamic", as many as pay by the measured cost of a step; "threshold", up to the first whose
            confidence is below `draft_threshold`; "early_stop", as the published greedy search finds.
        verification: "coupled", which gives the tokens of plain decoding with the same seed; "rejection"
            or "block", which give tokens of the same distribution and accept more drafts.
        max_drafts: drafts of a sequence verified in a step at most; the model's whole block by default.
            The block is always drafted whole.
        draft_threshold: confidence between 0 and 1, for "threshold".
        choose_on_host: whether "dynamic" chooses on the host, from confidences that it has read, rather
            than on the devices.

    Raises:
        RequestError: a value that is not one of the choices.

    Source: spec/serving.md sections 1, 3 and 5, spec/dspark.md sections 4 and 5.
    """

    prefill: str = "exact"
    num_slots: int | None = None
    max_context: int | None = None
    num_pages: int | None = None
    max_rows: int = ROW_BUCKETS[-1]
    max_chunk: int | None = None
    token_budget: int | None = None
    prefix_cache: bool = True
    num_snapshots: int | None = None
    overlap: int = 1
    drafts: str = DRAFT_MODES[0]
    verification: str = VERIFICATION_MODES[0]
    max_drafts: int | None = None
    draft_threshold: float = 0.5
    choose_on_host: bool = False

    def __post_init__(self) -> None:
        _require_choice("prefill", self.prefill, PREFILL_MODES)
        _require_choice("max_rows", self.max_rows, ROW_BUCKETS)
        _require_choice("num_slots", self.num_slots, (None, *SLOT_BUCKETS))
        _require_choice("overlap", self.overlap, (0, 1))
        _require_choice("prefix_cache", self.prefix_cache, (True, False))
        _require_choice("drafts", self.drafts, DRAFT_MODES)
        _require_choice("verification", self.verification, VERIFICATION_MODES)
        _require_choice("choose_on_host", self.choose_on_host, (True, False))
        most = PAGE_BUCKETS[-1] * PAGE_TOKENS
        _require_number("max_context", self.max_context, 1, most)
        _require_number("num_pages", self.num_pages, 1)
        _require_number("max_chunk", self.max_chunk, 1)
        _require_number("token_budget", self.token_budget, ROWS_PER_BLOCK)
        _require_number("num_snapshots", self.num_snapshots, 0)
        _require_number("max_drafts", self.max_drafts, 1)
        _require_fraction("draft_threshold", self.draft_threshold)

    def num_drafts(self, config: ModelConfig) -> int:
        """Count the drafts of a sequence that one step may verify, 0 if none are made."""
        if self.drafts == DRAFT_MODES[0]:
            return 0
        block = config.draft.block_size
        return min(self.max_drafts or block, block)

    def cache_sizes(self, config: ModelConfig, slot_shares: int = 1) -> CacheConfig:
        """Size the cache of an engine.

        Args:
            config: the architecture.
            slot_shares: devices, or groups of them, that have slots of their own.

        Returns:
            The sizes, over all devices.

        Raises:
            RequestError: a context beyond the model's, or drafts of a model without draft stages.
        """
        has_drafts = self.drafts != DRAFT_MODES[0]
        if has_drafts and not config.draft.num_stages:
            raise RequestError(
                f"drafts: got {self.drafts!r}, expected {DRAFT_MODES[0]!r}, as this model has no draft "
                "stages (num_nextn_predict_layers is 0); leave drafts off, or use a checkpoint with `mtp.*` "
                "tensors"
            )
        limit = config.max_position_embeddings
        if self.max_context is not None and self.max_context > limit:
            raise RequestError(
                f"max_context: got {self.max_context}, expected at most the model's {limit} positions; "
                "lower max_context"
            )
        context = self.max_context or min(limit, DEFAULT_CONTEXT)
        slots = (self.num_slots or DEFAULT_SLOTS) * slot_shares
        per_slot = bucket_for(-(-context // PAGE_TOKENS), PAGE_BUCKETS, "pages of a request")
        pages = slots * per_slot if self.num_pages is None else self.num_pages * slot_shares
        if not has_drafts:
            return CacheConfig(slots, per_slot, pages)
        slack = BLOCKS_OF_SLACK * config.draft.block_size
        return CacheConfig(
            slots, per_slot, pages, window_slack=slack, num_draft_layers=config.draft.num_stages
        )

    def snapshots(self, slot_shares: int = 1) -> int:
        """Count the snapshots over all devices, 0 without a prefix cache."""
        if not self.prefix_cache:
            return 0
        each = SNAPSHOTS_PER_SLOT * (self.num_slots or DEFAULT_SLOTS)
        return (each if self.num_snapshots is None else self.num_snapshots) * slot_shares


def fitted(
    options: EngineConfig, num_tokens: Sequence[int], config: ModelConfig, slot_shares: int = 1
) -> EngineConfig:
    """Fill sizes that are left open in with the smallest buckets that fit some requests.

    Args:
        options: as the user gave them.
        num_tokens: tokens of each request, prompt and output.
        config: the architecture.
        slot_shares: devices, or groups of them, that have slots of their own.

    Returns:
        The options with `num_slots` and `max_context`.
    """
    each = min(-(-len(num_tokens) // slot_shares), DEFAULT_SLOTS)
    largest = max(num_tokens, default=1)
    return replace(
        options,
        num_slots=options.num_slots or bucket_for(each, SLOT_BUCKETS, "prompts"),
        max_context=options.max_context or min(largest, config.max_position_embeddings),
    )


def _require_choice(name: str, got: object, choices: Sequence[object]) -> None:
    if got not in choices:
        raise RequestError(f"{name}: got {got!r}, expected one of {list(choices)}; change the option")


def _require_number(name: str, got: Any, lowest: int, highest: int | None = None) -> None:
    is_number = isinstance(got, int | np.integer) and not isinstance(got, bool)
    if got is None or (is_number and lowest <= got and (highest is None or got <= highest)):
        return
    expected = f"{lowest} or more" if highest is None else f"an int in {lowest}..{highest}"
    raise RequestError(f"{name}: got {got!r}, expected {expected}; change the option")


def _require_fraction(name: str, got: Any) -> None:
    is_number = isinstance(got, int | float | np.integer | np.floating) and not isinstance(got, bool)
    # NaN is no fraction either.
    if not (is_number and 0 <= got <= 1):
        raise RequestError(f"{name}: got {got!r}, expected a number between 0 and 1; change the option")
