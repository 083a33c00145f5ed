"""The loop: plan a step, give it to the devices, read the one before.

Separate from `scheduler.py`, which decides, and `runner.py`, which computes; this joins them and knows
ids, never text.
Read next: `scheduler.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..config import NOTHING, ModelConfig
from ..engine_config import EngineConfig
from ..model.numerics import Numerics
from ..model.weights import Weights
from ..plans import LOGPROB_BUCKETS, ROW_BUCKETS, StepPlan
from ..sampling_params import RequestError, SamplingParams, check_request
from ..spec_decode.calibration import Calibration
from ..spec_decode.costs import CostTable
from ..step import ONE_DEVICE, StepOutput, Target
from .dispatch import Dispatcher
from .drafting import Drafting
from .handoff import PrefilledRequest
from .handover import check_arrays, describe, restore, settings_of
from .lengths import accept
from .reading import read_prompt_logprobs, read_tokens
from .request import ABORTED_REASON, HANDED_OVER_REASON, LENGTH_REASON, Request, num_pages
from .runner import Outputs, Runner
from .scheduler import Scheduled, Scheduler
from .stats import EngineStats
from .target import num_row_shares, num_slot_shares, refuse_draft


class Engine:
    """Runs requests of token ids, as many together as there are slots.

    Attributes:
        on_dispatch: called with the time at which a step was given to the devices and its results, which
            are still being computed; None by default.
        drafting: what steps are told of drafts and what came of these; None where none are made.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        options: how requests are run.
        forbidden_ids: tokens that no request may get, besides the image token.
        target: where the weights lie.
        calibration: of the confidence in drafts; by default it stays as it is.
        costs: step times measured on these devices, for the schedules of drafts that weigh them.
    """

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        numerics: Numerics,
        options: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
        forbidden_ids: Sequence[int] = (),
        target: Target = ONE_DEVICE,
        calibration: Calibration | None = None,
        costs: CostTable | None = None,
    ) -> None:
        self.config, self.numerics, self.options, self.target = config, numerics, options, target
        shares = num_slot_shares(target)
        self.sizes = options.cache_sizes(config, shares)
        # On one device a step skips what it has no rows for; devices that meet in it cannot.
        buckets = (options.max_rows,) if target.mesh is None else ROW_BUCKETS
        self.scheduler = Scheduler(config, options, self.sizes, shares, num_row_shares(target), buckets)
        is_forbidden = np.zeros(config.vocab_size, bool)
        is_forbidden[[config.image_token_id, *forbidden_ids]] = True
        sizes = (self.sizes, options.snapshots(shares))
        self.drafting = None
        if options.num_drafts(config):
            # Weights whose draft stages the layout could not divide were placed without them.
            refuse_draft(config, target)
            controls = (config, options, self.sizes, numerics, calibration, costs, target)
            self.drafting = Drafting(*controls)
        self.runner = Runner(weights, config, numerics, *sizes, is_forbidden, target, self.drafting)
        self.on_dispatch: Callable[[float, Outputs], object] | None = None
        # Processes that share a mesh must give it the same work in the same order: no thread there.
        self._is_shared = target.mesh is not None and target.mesh.is_multi_process
        self._dispatcher = Dispatcher(has_thread=options.overlap > 0 and not self._is_shared)
        self._unread: deque[tuple[Scheduled, Future[tuple[float, Outputs]]]] = deque()
        self._ready_at = 0.0
        self._num_steps = self._num_generated = 0
        self._seconds = {"host": 0.0, "dispatch": 0.0, "wait": 0.0, "busy": 0.0}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What an engine must have in common with this one to take over its requests."""
        return settings_of(self.runner.weights, self.config, self.numerics, self.options, self.sizes)

    @property
    def has_work(self) -> bool:
        """Whether any request is not over, or any step not read."""
        return self.scheduler.has_work or bool(self._unread)

    @property
    def stats(self) -> EngineStats:
        """What was counted so far."""
        scheduler, places = self.scheduler, self.scheduler.places
        return EngineStats(
            steps=self._num_steps,
            prompt_tokens=scheduler.num_prompt_tokens,
            generated_tokens=self._num_generated,
            **{f"{name}_seconds": seconds for name, seconds in self._seconds.items()},
            encoder_rows=scheduler.num_encoder_rows,
            decoder_rows=scheduler.num_decoder_rows,
            preemptions=scheduler.num_preemptions,
            prefix=places.counters,
            slots_running=len(places.running),
            slots=self.sizes.num_slots,
            pages_used=places.num_pages_used,
            pages=self.sizes.num_pages,
            waiting=len(scheduler.waiting),
            draft=None if self.drafting is None else self.drafting.stats.summary(),
        )

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        which: str = "prompt",
        is_held: bool = False,
    ) -> Request:
        """Put a request into the queue.

        Args:
            token_ids: the prompt.
            params: how its tokens are chosen, one output; stop strings are left to who knows text.
            which: names the request in messages.
            is_held: whether it stops after its first token, for `export`.

        Returns:
            The request; `step` fills it in.

        Raises:
            RequestError: a prompt or parameter that is refused.
        """
        ids = [int(token) if isinstance(token, np.integer) else token for token in token_ids]
        check_request(ids, params, self.config, which)
        if params.n > 1:
            raise RequestError(
                f"{which}: n: got {params.n}, expected 1, as a request of an engine is one output; use LLM, "
                "or submit `params.for_sample(index)` for each"
            )
        request = Request(0, np.asarray(ids, np.int32), params, is_held=is_held)
        request.submitted_at = time.monotonic()
        self.scheduler.check(request, which)
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            self.scheduler.finish(request, LENGTH_REASON)
        else:
            self.scheduler.submit(request)
        return request

    def export(self, request: Request) -> PrefilledRequest:
        """Take a held request out, with all that another engine needs to go on.

        Args:
            request: one that has its first token; it is over here with that.

        Returns:
            The request as a value.
        """
        arrays = {}
        if not request.is_over:
            assert request.is_exportable
            slot, pages = request.slot, self.scheduler.places.page_table[request.slot].copy()
            # The page of the next token may be there already; only what was computed travels.
            pages[num_pages(request.num_computed) :] = NOTHING
            arrays = self._dispatcher.submit(lambda: self.runner.export(slot, pages)).result()
        prefilled = describe(request, self.settings, arrays)
        self.scheduler.finish(request, HANDED_OVER_REASON)
        return prefilled

    def resume(self, prefilled: PrefilledRequest, which: str = "prefilled request") -> Request:
        """Put a request that another engine prefilled into the queue.

        Args:
            prefilled: from `export`.
            which: names it in messages.

        Returns:
            The request; `step` goes on with it.

        Raises:
            HandoffError: another model, other settings, or arrays that are not those of the header.
            RequestError: a request that this engine has no room for.
        """
        request = restore(prefilled, self.settings, which)
        check_request(request.prompt.tolist(), request.params, self.config, which)
        self.scheduler.check(request, which)
        request.submitted_at = time.monotonic()
        if request.sequence is not None:
            # The latest token has not run yet.
            shapes = self.runner.sequence_shapes(num_pages(request.num_known - 1))
            check_arrays(request.sequence, shapes, which)
            self.scheduler.submit(request)
        return request

    def abort(self, request: Request, reason: str) -> None:
        """End a request now; the tokens that it has stay."""
        self.scheduler.finish(request, reason)

    def step(self) -> list[Request]:
        """Run one step, and read the one before it.

        Returns:
            The requests that have new tokens or are over, in the order of their slots.

        Raises:
            Exception: what the devices refused. The requests are in the queue again.
        """
        started = time.monotonic()
        try:
            scheduled = self._timed("host", self.scheduler.plan)
            if scheduled is not None:
                self._dispatch(scheduled)
            is_behind = len(self._unread) > self.options.overlap
            changed = self._read() if self._unread and (is_behind or scheduled is None) else []
        except BaseException:
            self._recover()
            raise
        self._seconds["busy"] += time.monotonic() - started
        return changed

    def warmup(self, logprobs: bool = False, prompt_logprobs: bool = False) -> None:
        """Compile every program that requests can need.

        Args:
            logprobs: those that report log-probabilities as well.
            prompt_logprobs: those that report them for prompts as well.
        """
        counts = LOGPROB_BUCKETS if logprobs else LOGPROB_BUCKETS[:1]
        prompt_counts = [None, *(LOGPROB_BUCKETS if prompt_logprobs else ())]
        for plan in self.scheduler.empty_plans(counts, prompt_counts):
            self.runner.read(self._dispatcher.submit(partial(self.runner.run, plan)).result())

    def close(self) -> None:
        """End all requests and give the devices' memory back; the weights stay."""
        self._dispatcher.close()
        self._unread.clear()
        for request in [*self.scheduler.waiting, *self.scheduler.places.in_order()]:
            self.scheduler.finish(request, ABORTED_REASON)
        self.runner.close()

    def _dispatch(self, scheduled: Scheduled) -> None:
        for request in scheduled.admitted:
            request.entered_at = request.entered_at or time.monotonic()
        if self.drafting is not None:
            for request in scheduled.admitted:
                self.drafting.forget(request.slot)
            scheduled.plan.draft_choice = self.drafting.choice(list(scheduled.decoded))
        self._unread.append((scheduled, self._dispatcher.submit(partial(self._run, scheduled.plan))))
        self._num_steps += 1

    def _run(self, plan: StepPlan) -> tuple[float, Outputs]:
        started = time.monotonic()
        outputs = self._timed("dispatch", lambda: self.runner.run(plan))
        if self.on_dispatch is not None:
            self.on_dispatch(started, outputs)
        return started, outputs

    def _read(self) -> list[Request]:
        scheduled, run = self._unread.popleft()
        started, outputs = self._timed("wait", run.result)
        read = self._timed("wait", lambda: self.runner.read(outputs))
        now = time.monotonic()
        milliseconds = 1000 * (now - max(started, self._ready_at))
        self._ready_at = now
        return self._timed("host", lambda: self._accept(scheduled, read, milliseconds))

    def _accept(self, scheduled: Scheduled, outputs: Outputs, milliseconds: float) -> list[Request]:
        """Note what a step gave, and how long it took."""
        changed = []
        for request, start, count, first_row in scheduled.prompt_rows:
            assert outputs.prefill is not None and outputs.prefill.prompt is not None
            read_prompt_logprobs(request, start, count, first_row, outputs.prefill.prompt)
        for request in scheduled.ended:
            self.scheduler.finish(request, LENGTH_REASON)
            changed.append(request)
        if outputs.decode is not None and self.drafting is not None:
            is_alone = scheduled.plan.prefill is None and scheduled.plan.encode is None
            # Each process has its own clock, and all must choose alike.
            is_timed = is_alone and not self._is_shared
            self._accept_drafts(scheduled, outputs.decode, milliseconds if is_timed else None)
        for requests, output in ((scheduled.decoded, outputs.decode), (scheduled.sampled, outputs.prefill)):
            for slot, request in sorted(requests.items()):
                assert output is not None
                if self._accept_tokens(request, slot, output):
                    changed.append(request)
        return changed

    def _accept_drafts(self, scheduled: Scheduled, output: StepOutput, milliseconds: float | None) -> None:
        """Count the rows of a step that may have drafts, and learn from it for those who are still there."""
        assert self.drafting is not None
        requests = scheduled.decoded
        num_rows = np.asarray(self.drafting.output_of(output).num_rows)
        self.scheduler.count_rows(int(num_rows[list(requests)].sum()))
        present = {slot: request.params for slot, request in requests.items() if not request.is_over}
        self.drafting.note(present, output, scheduled.plan.draft_choice, milliseconds)

    def _accept_tokens(self, request: Request, slot: int, output: StepOutput) -> bool:
        """Note what a slot gave its request; tell whether anything came of it."""
        num_given = int(output.num_tokens[slot])
        if request.is_over or not (num_given or output.is_invalid[slot]):
            request.in_flight -= 1
            return False
        num_tokens = len(request.token_ids)
        reason = read_tokens(request, slot, output)
        self._num_generated += len(request.token_ids) - num_tokens
        accept(request, num_given, reason is not None)
        if reason is not None:
            self.scheduler.finish(request, reason)
        return True

    def _timed[T](self, what: str, work: Callable[[], T]) -> T:
        started = time.monotonic()
        result = work()
        self._seconds[what] += time.monotonic() - started
        return result

    def _recover(self) -> None:
        """Start over on empty devices, as an interrupted step leaves no state; no token is lost."""
        self._dispatcher.drain()
        self._unread.clear()
        self.scheduler.lose_devices()
        self.runner.reset()
