"""Text in, text out, one prompt or thousands: the engine as a user sees it.

Separate from `engine.py`, which knows ids only, and from `load.py`, which runs nothing.
Read next: `completion.py` (what comes back), `engine.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, overload

from jax.sharding import Mesh

from ..config import ModelConfig
from ..engine_config import EngineConfig
from ..sampling_params import RequestError, SamplingParams
from ..sharding.layout import Layout
from ..sharding.mesh import MeshShape
from ..text.tokenizer import Tokenizer
from . import show
from .completion import Completion, Completions, StreamEvent
from .generate import params_of_each, refuse_invalid
from .handoff import PrefilledRequest
from .jobs import Job, Jobs
from .load import Model, Prompt, as_model
from .progress import counting
from .request import ABORTED_REASON, STOP_REASON
from .start import engine_for
from .stats import EngineStats


class LLM:
    """A model that answers: it keeps its slots, pages and prefixes until it is closed.

    Calls of several threads, streams and tasks take turns; what they ask for runs together.

    Attributes:
        model: what runs.
        options: how requests are run.
        engine: the engine below.
        is_closed: whether it gave its memory back.

    Args:
        model: a checkpoint folder, "nano" or None for the embedded model, or what `load` gave.
        numerics: as in `load`; for a loaded model, leave this and the next four out.
        batch_invariant: as in `load`.
        cache_format: as in `load`.
        mesh: as in `load`.
        layout: as in `load`.
        options: how requests are run.

    Raises:
        ValueError: a refused configuration, checkpoint, layout or option, before any compute.
    """

    def __init__(
        self,
        model: str | Path | Model | None = None,
        *,
        numerics: str = "official",
        batch_invariant: bool = True,
        cache_format: str | None = None,
        mesh: str | tuple[int, ...] | MeshShape | Mesh | None = None,
        layout: str | Layout | None = None,
        options: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
    ) -> None:
        self._owns_weights = not isinstance(model, Model)
        self.model = as_model(model, numerics, batch_invariant, cache_format, mesh, layout)
        self.options = options
        self.engine = engine_for(self.model, options)
        self._jobs = Jobs(self.model.tokenizer, self.model.config.eos_token_id)
        self._lock = threading.RLock()
        self.is_closed = False

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.model.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a checkpoint without one; prompts are token ids then."""
        return self.model.tokenizer

    @property
    def stats(self) -> EngineStats:
        """What was counted so far."""
        return self.engine.stats

    @property
    def has_work(self) -> bool:
        """Whether any job is not done."""
        return self.engine.has_work

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on the devices: of weights, and of slots, pages and snapshots."""
        weights = 0 if self.is_closed else self.model.num_bytes
        return {"weights": weights, "state": self.engine.runner.state_bytes}

    @overload
    def generate(self, prompts: str, params: SamplingParams = ...) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[Prompt] | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] = ...,
    ) -> Completions: ...
    def generate(
        self,
        prompts: str | list[Prompt] | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    ) -> Completion | Completions:
        """Generate from one text, or from a list of texts and token id lists.

        Args:
            prompts: a text, or a list whose entries are texts or lists of token ids.
            params: for all prompts, or one for each.

        Returns:
            A completion for a text; for a list all completions in order, `n` of each prompt. A text with
            `n` over 1 gives a list as well.

        Raises:
            RequestError: a prompt or parameter that is refused, before any is run.
            InvalidOutputError: a prompt whose logits are no distribution; the others' results are in it.
        """
        many = [prompts] if isinstance(prompts, str) else list(prompts)
        each = params_of_each(params, len(many))
        jobs = self._submit_all(many, each)
        completions = self._finish(jobs)
        return completions[0] if isinstance(prompts, str) and len(completions) == 1 else completions

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    ) -> Iterator[StreamEvent]:
        """Generate from one prompt, and tell what comes as it comes.

        The prompt is checked at once; leaving the loop early ends the request.

        Args:
            prompt: a text or a list of token ids.
            params: how its tokens are chosen.

        Returns:
            The events; the last one of each output has its completion.

        Raises:
            RequestError: a prompt or parameter that is refused.
        """
        return self._events(self._submit(prompt, params, "prompt", is_streamed=True))

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    ) -> AsyncIterator[StreamEvent]:
        """Do the same for `async for`; other tasks run while the devices compute."""
        events = self.stream(prompt, params)
        try:
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                yield event
        finally:
            close: Callable[[], None] = getattr(events, "close")  # noqa: B009 (a generator's)
            close()

    def prefill(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
    ) -> list[PrefilledRequest]:
        """Read prompts and sample their first tokens, for another engine to go on.

        Args:
            prompts: texts or lists of token ids.
            params: for all prompts, or one for each, with one output each.

        Returns:
            Requests that `resume` takes, here or in another process; `save` writes one to a file.

        Raises:
            RequestError: a prompt or parameter that is refused, before any is run.
        """
        each = params_of_each(params, len(prompts))
        for number, one in enumerate(each):
            if one.n > 1:
                raise RequestError(
                    f"prompt {number}: n: got {one.n}, expected 1 for a prefilled request; prefill once for "
                    "each output, with seeds of their own"
                )
        with self._lock:
            jobs = self._submit_all(list(prompts), each, is_held=True)
            requests = [job.samples[0].request for job in jobs]
            prefilled: dict[int, PrefilledRequest] = {}
            try:
                while len(prefilled) < len(requests):
                    for number, request in enumerate(requests):
                        if number not in prefilled and (request.is_over or request.is_exportable):
                            prefilled[number] = self.engine.export(request)
                    if len(prefilled) < len(requests):
                        self.step()
            finally:
                for job in jobs:
                    self.abort(job)
        return [prefilled[number] for number in range(len(requests))]

    def resume(self, prefilled: Sequence[PrefilledRequest]) -> Completions:
        """Go on with requests that were prefilled, here or elsewhere.

        Args:
            prefilled: from `prefill`, or loaded from files.

        Returns:
            Their completions in order, equal to those of `generate`.

        Raises:
            HandoffError: a request of another model or other settings.
            RequestError: a request that this engine has no room for.
            InvalidOutputError: as in `generate`.
        """
        with self._lock:
            self._require_open()
            requests = (
                self.engine.resume(one, f"prefilled request {number}") for number, one in enumerate(prefilled)
            )
            jobs = self._all_or_none(self._jobs.add([one], one.params, is_streamed=False) for one in requests)
        return self._finish(jobs)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    ) -> Job:
        """Put a prompt into the queue; `step` runs it.

        Args:
            prompt: a text or a list of token ids.
            params: how its tokens are chosen.

        Returns:
            The job.

        Raises:
            RequestError: a prompt or parameter that is refused.
        """
        return self._submit(prompt, params, "prompt")

    def step(self) -> list[Job]:
        """Run one step for all jobs.

        Returns:
            The jobs that are done with it.
        """
        with self._lock:
            self._require_open()
            done = []
            for request in self.engine.step():
                if self._jobs.read(request):
                    self.engine.abort(request, STOP_REASON)
                if request.is_over and (job := self._jobs.end(request)).is_done:
                    done.append(job)
            return done

    def abort(self, job: Job) -> None:
        """End a job now; its completions hold what came."""
        with self._lock:
            for sample in job.samples:
                if sample.completion is None:
                    self.engine.abort(sample.request, ABORTED_REASON)
                    self._jobs.read(sample.request)
                    self._jobs.end(sample.request)

    def warmup(self, logprobs: bool = False, prompt_logprobs: bool = False) -> None:
        """Compile every program that requests can need, so that none waits for it later.

        Args:
            logprobs: those that report log-probabilities as well.
            prompt_logprobs: those that report them for prompts as well.
        """
        with self._lock:
            self._require_open()
            self.engine.warmup(logprobs, prompt_logprobs)

    def close(self) -> None:
        """Give all device memory back: the state, and the weights unless they were loaded elsewhere."""
        with self._lock:
            if self.is_closed:
                return
            for job in self._jobs.all:
                self.abort(job)
            self.engine.close()
            if self._owns_weights:
                self.model.delete()
            self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return show.engine_text(self)

    def _repr_html_(self) -> str:
        return show.engine_html(self)

    def _require_open(self) -> None:
        if self.is_closed:
            raise RequestError("LLM: got a call after close, expected none; make a new one")

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        which: str,
        is_streamed: bool = False,
        is_held: bool = False,
    ) -> Job:
        with self._lock:
            self._require_open()
            if params.stop_strings and self.tokenizer is None:
                raise RequestError(
                    f"{which}: stop: got {list(params.stop_strings)}, expected none as this model has no "
                    "tokenizer; use stop_token_ids"
                )
            token_ids = self.model.encode(prompt, which)
            requests = [
                self.engine.submit(token_ids, params.for_sample(index), which, is_held)
                for index in range(params.n)
            ]
            return self._jobs.add(requests, params, is_streamed)

    def _submit_all(
        self, prompts: Sequence[Prompt], each: Sequence[SamplingParams], is_held: bool = False
    ) -> list[Job]:
        """Submit all prompts or none."""
        return self._all_or_none(
            self._submit(prompt, params, f"prompt {number}", is_held=is_held)
            for number, (prompt, params) in enumerate(zip(prompts, each, strict=True))
        )

    def _all_or_none(self, starting: Iterable[Job]) -> list[Job]:
        """Start jobs one after the other; end them all if one of them is refused."""
        jobs: list[Job] = []
        try:
            for job in starting:
                jobs.append(job)
        except BaseException:
            for job in jobs:
                self.abort(job)
            raise
        return jobs

    def _finish(self, jobs: Sequence[Job]) -> Completions:
        """Step until all of some jobs are done."""
        own = set(jobs)
        try:
            with counting("generating", len(jobs)) as count:
                for job in jobs:
                    # Another thread's step may end it as well.
                    while not job.is_done:
                        done = own.intersection(self.step())
                        count(len(done), self.stats.generated_tokens)
        finally:
            for job in jobs:
                self.abort(job)
        completions = Completions(one for job in jobs for one in job.completions)
        refuse_invalid([one.finish_reason for one in completions], completions)
        return completions

    def _events(self, job: Job) -> Iterator[StreamEvent]:
        assert job.events is not None
        try:
            while job.events or not job.is_done:
                while job.events:
                    yield job.events.popleft()
                if not job.is_done:
                    self.step()
        finally:
            self.abort(job)
