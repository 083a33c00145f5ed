"""Decides what each step runs: who gets a slot, pages, a chunk of its prompt, or must give way.

Separate because it is a deterministic function of the order of calls, without JAX and without clocks:
the same requests give the same plans, on every process of a mesh.
Read next: `places.py` (slots, pages and reuse), `engine.py` (who calls it).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..config import NOTHING, PAGE_TOKENS, CacheConfig, ModelConfig
from ..engine_config import EngineConfig
from ..plans import (
    BARE_STEP,
    LOGPROB_BUCKETS,
    PLAIN_STEP,
    ROW_BUCKETS,
    ROWS_PER_BLOCK,
    PrefillPlan,
    PromptSpan,
    StepPlan,
    bucket_for,
    pack_rows,
    padded_rows,
)
from ..sampling_params import RequestError
from .admission import admission_of, moving_plans, notes_of
from .lengths import boundary_to_save, positions_to_own
from .places import Entry, Places
from .request import Phase, Request


@dataclass(slots=True)
class Scheduled:
    """A plan, and whom its results belong to.

    Attributes:
        plan: what the devices do.
        admitted: requests that got a slot.
        decoded: requests that run their latest token, and drafts after it, by slot.
        sampled: requests whose prompt ends and that get a token, by slot.
        prompt_rows: (request, first position, number of rows, first row) of reported prompt tokens.
        ended: requests of no tokens whose prompt ends.
    """

    plan: StepPlan
    admitted: list[Request] = field(default_factory=list)
    decoded: dict[int, Request] = field(default_factory=dict)
    sampled: dict[int, Request] = field(default_factory=dict)
    prompt_rows: list[tuple[Request, int, int, int]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)


class Scheduler:
    """The queue and the running requests of one engine.

    Args:
        config: the architecture.
        options: how requests are run.
        sizes: of the cache, over all devices.
        slot_shares: devices, or groups of them, that have slots of their own.
        row_shares: devices that share the rows of a slot.
        row_buckets: rows of a prefill step on each device, in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineConfig,
        sizes: CacheConfig,
        slot_shares: int = 1,
        row_shares: int = 1,
        row_buckets: tuple[int, ...] = ROW_BUCKETS,
    ) -> None:
        self.config, self.options, self.sizes = config, options, sizes
        self.row_shares, self.num_drafts = row_shares, options.num_drafts(config)
        self.row_buckets = tuple(size for size in row_buckets if size <= options.max_rows)
        self.waiting: list[Request] = []
        self.places = Places(sizes, options.snapshots(slot_shares), slot_shares)
        self.num_preemptions = self.num_prompt_tokens = 0
        self.num_encoder_rows = self.num_decoder_rows = 0
        self._num_submitted = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not over."""
        return bool(self.waiting) or bool(self.places.running)

    def check(self, request: Request, which: str) -> None:
        """Refuse a request that no slot can hold.

        Raises:
            RequestError: more tokens than the context of this engine.
        """
        total = len(request.prompt) + request.params.max_tokens
        limit = min(self.sizes.capacity, self.places.pages_each * PAGE_TOKENS)
        if total > limit:
            raise RequestError(
                f"{which}: got {len(request.prompt)} prompt tokens + max_tokens "
                f"{request.params.max_tokens} = {total}, expected at most {limit}, the context of this "
                "engine; shorten the prompt, lower max_tokens, or make the engine with more max_context or "
                "num_pages"
            )

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue; its number becomes its place there."""
        request.number = self._num_submitted
        self._num_submitted += 1
        if self.options.prefill == "bounded" and request.params.prompt_logprobs is None:
            # As many with slack as without, so that drafts change no token.
            request.decoder_start = max(0, len(request.prompt) - self.config.sliding_window)
        self.waiting.append(request)

    def plan(self) -> Scheduled | None:
        """Decide the next step.

        Returns:
            The step, or None if nothing can run before an earlier step is read, or at all.
        """
        scheduled = Scheduled(StepPlan())
        self.places.has_changed = False
        is_crowded = self._grow(scheduled.plan)
        admitted = scheduled.admitted = [] if is_crowded else self._admit(scheduled.plan)
        self._decode(scheduled)
        self._prefill(scheduled)
        self._give_places(scheduled.plan, admitted)
        plan = scheduled.plan
        # Those of all running requests, whoever samples now: a step has fewer programs then.
        plan.num_logprobs = _logprob_bucket(self.places.running.values())
        is_empty = plan.is_decoding is None and plan.encode is None and plan.prefill is None
        return None if is_empty and not admitted else scheduled

    def empty_plans(
        self, num_logprobs: Sequence[int], num_prompt_logprobs: Sequence[int | None]
    ) -> list[StepPlan]:
        """Make plans of every shape that change nothing, so that running them compiles every program.

        Args:
            num_logprobs: numbers of most probable tokens to report.
            num_prompt_logprobs: the same for prompts.

        Returns:
            The plans.
        """
        page_table = self.places.page_table
        plans = moving_plans(page_table, self.config.eos_token_id, self.places.has_cache)
        # Where drafts may not pay, steps without any are programs of their own.
        choices = (NOTHING, PLAIN_STEP, BARE_STEP) if self.options.drafts == "dynamic" else (NOTHING,)
        plans += [
            StepPlan(is_decoding=np.zeros(len(page_table), bool), num_logprobs=count, draft_choice=choice)
            for count in num_logprobs
            for choice in choices
        ]
        for rows in self.row_buckets:
            step = pack_rows([[]] * self.places.num_shares, len(page_table), rows * self.row_shares)
            if self.options.prefill == "bounded":
                plans.append(StepPlan(encode=step))
            plans += [
                StepPlan(prefill=step, num_logprobs=count, num_prompt_logprobs=prompt_count)
                for count in num_logprobs
                for prompt_count in num_prompt_logprobs
            ]
        return plans

    def finish(self, request: Request, reason: str) -> None:
        """End a request; its slot and pages are free for the next plan."""
        if request.is_over:
            return
        request.finish_reason = reason
        if request.slot != NOTHING:
            self.places.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED

    def lose_devices(self) -> None:
        """Put all running requests back into the queue, as what the devices held is lost."""
        for request in self.places.in_order():
            request.in_flight = 0
            self._preempt(request)
        for request in self.waiting:
            request.in_flight = 0
        self.places.forget()

    def _grow(self, plan: StepPlan) -> bool:
        """Give every running sequence the pages of its next step; preempt the latest where there are none.

        Returns:
            Whether any request had to give way.
        """
        is_crowded = False
        for request in self.places.in_order():
            if not _can_decode(request):
                continue
            boundary = boundary_to_save(request, self.num_drafts, self.sizes.window_slack)
            if boundary is not None:
                plan.saves_before += self.places.save(request, boundary)
            num_positions = positions_to_own(request, self.num_drafts)
            while request.phase is Phase.DECODING and not self.places.grow(request, num_positions):
                self._preempt(self.places.latest_beside(request))
                is_crowded = True
        return is_crowded

    def _preempt(self, request: Request) -> None:
        """Take a request's slot and pages; it will be computed again, with the same tokens."""
        self.places.leave(request)
        request.phase = Phase.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=lambda one: one.number)

    def _admit(self, plan: StepPlan) -> list[Request]:
        """Start waiting requests in order, as long as there is room for the first of them."""
        admitted = []
        index = 0
        while index < len(self.waiting):
            request = self.waiting[index]
            entry = Entry.FULL if request.in_flight else self.places.enter(request)
            if entry is Entry.FULL:
                break
            if entry is Entry.LATER:
                index += 1
                continue
            del self.waiting[index]
            admitted.append(request)
            self.num_prompt_tokens += 0 if request.num_preemptions else len(request.prompt)
            if request.restored is not None:
                plan.restores.append((request.slot, request.restored))
            if request.sequence is not None:
                plan.imports.append(
                    (request.slot, self.places.page_table[request.slot].copy(), request.sequence)
                )
        return admitted

    def _decode(self, scheduled: Scheduled) -> None:
        """Let every sequence that has a token run it."""
        decoding = [one for one in self.places.in_order() if _can_decode(one)]
        if not decoding:
            return
        scheduled.plan.is_decoding = np.zeros(self.sizes.num_slots, bool)
        for request in decoding:
            scheduled.plan.is_decoding[request.slot] = True
            request.num_computed += 1
            request.in_flight += 1
            scheduled.decoded[request.slot] = request
        if not self.num_drafts:
            self.count_rows(len(decoding))

    def count_rows(self, num_rows: int) -> None:
        """Count rows that went through all layers after the prompts; with drafts the devices say how many.

        Args:
            num_rows: of one step.
        """
        self.num_encoder_rows += num_rows
        self.num_decoder_rows += num_rows

    def _prefill(self, scheduled: Scheduled) -> None:
        """Fill the rest of the budget with chunks of prompts, in the order of arrival."""
        encode: list[list[PromptSpan]] = [[] for _ in range(self.places.num_shares)]
        prefill: list[list[PromptSpan]] = [[] for _ in range(self.places.num_shares)]
        room = [self._prompt_rows(share, scheduled) for share in range(self.places.num_shares)]
        reported = []
        for request in self.places.in_order():
            if request.phase is not Phase.PREFILLING:
                continue
            share = self.places.share_of(request.slot)
            piece = self._next_piece(request, room[share])
            if piece is None:
                continue
            room[share] -= padded_rows(piece)
            is_encoded = piece.stop <= request.decoder_start
            (encode if is_encoded else prefill)[share].append(piece)
            if request.params.prompt_logprobs is not None:
                reported.append((request, piece))
            self._advance(request, piece, scheduled)
        scheduled.plan.encode, num_encoded = self._pack(encode)
        scheduled.plan.prefill, num_prefilled = self._pack(prefill)
        self.num_encoder_rows += num_encoded + num_prefilled
        self.num_decoder_rows += num_prefilled
        self._report(scheduled, reported)

    def _prompt_rows(self, share: int, scheduled: Scheduled) -> int:
        """Count the prompt rows that a share's part of the step has room for."""
        rows = self.row_buckets[-1] * self.row_shares
        if self.options.token_budget is None:
            return rows
        running = sum(self.places.share_of(slot) == share for slot in scheduled.decoded)
        # A prompt always advances, so that nothing waits for ever behind a full house.
        left = max(self.options.token_budget - running * (1 + self.num_drafts), ROWS_PER_BLOCK)
        return min(rows, left // ROWS_PER_BLOCK * ROWS_PER_BLOCK)

    def _next_piece(self, request: Request, room: int) -> PromptSpan | None:
        """Cut the next chunk of a prompt: within one half of bounded prefill, up to a boundary to store."""
        start, stop = request.num_computed, request.target_length
        ends = [cut for cut in (*request.cuts, request.decoder_start) if cut > start]
        stop = min([stop, *ends, start + room, start + (self.options.max_chunk or room)])
        if stop <= start:
            return None
        samples = request.target_length == request.num_known and request.params.max_tokens > 0
        return PromptSpan(request.slot, request.rows_to_run, start, stop, samples)

    def _advance(self, request: Request, piece: PromptSpan, scheduled: Scheduled) -> None:
        """Note that a chunk runs in this step."""
        request.num_computed = piece.stop
        if piece.stop in request.cuts:
            scheduled.plan.saves_after += self.places.save(request, piece.stop)
        if piece.stop < request.target_length:
            return
        request.phase = Phase.DECODING
        if piece.samples:
            request.in_flight += 1
            scheduled.sampled[request.slot] = request
        elif not request.is_held:
            scheduled.ended.append(request)

    def _pack(self, pieces: list[list[PromptSpan]]) -> tuple[PrefillPlan | None, int]:
        used = max(sum(padded_rows(piece) for piece in share) for share in pieces)
        if not used:
            return None, 0
        rows = bucket_for(-(-used // self.row_shares), self.row_buckets, "prefill rows") * self.row_shares
        num_rows = sum(piece.stop - piece.start for share in pieces for piece in share)
        return pack_rows(pieces, self.sizes.num_slots, rows), num_rows

    def _report(self, scheduled: Scheduled, reported: list[tuple[Request, PromptSpan]]) -> None:
        """Say which log-probabilities a prefill step reports, and where they will be."""
        plan = scheduled.plan
        if plan.prefill is None or not reported:
            return
        wanted = max(one.params.prompt_logprobs or 0 for one, _ in reported)
        plan.num_prompt_logprobs = bucket_for(wanted, LOGPROB_BUCKETS, "prompt_logprobs")
        for request, piece in reported:
            is_own = plan.prefill.is_valid & (plan.prefill.slots == request.slot)
            place = (piece.start, piece.stop - piece.start, int(np.argmax(is_own)))
            scheduled.prompt_rows.append((request, *place))

    def _give_places(self, plan: StepPlan, admitted: Sequence[Request]) -> None:
        """Tell the devices who starts where, or the page table alone where only that changed."""
        if admitted:
            plan.admission = admission_of(admitted, self.places.page_table, self.config.eos_token_id)
            plan.notes += notes_of(admitted)
        elif self.places.has_changed:
            plan.page_table = self.places.page_table.copy()
        for request in admitted:
            request.sequence = None


def _can_decode(request: Request) -> bool:
    num_sampled = len(request.token_ids) + request.in_flight
    is_ready = request.phase is Phase.DECODING and not request.is_held
    return is_ready and 0 < num_sampled < request.params.max_tokens


def _logprob_bucket(requests: Iterable[Request]) -> int:
    wanted = max((one.params.logprobs or 0 for one in requests), default=0)
    return bucket_for(wanted, LOGPROB_BUCKETS, "logprobs")
