"""Jobs: prompts on their way, whose tokens become text here and nowhere else.

Separate from `llm.py`, which is what a user calls, and from `engine.py`, which knows ids only.
Read next: `../text/stream.py`; `completion.py`, what comes of a job.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from ..sampling_params import SamplingParams
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .completion import Completion, Completions, RequestTiming, StreamEvent
from .request import Request


class Sample:
    """One output of a job, as its tokens come.

    Args:
        request: what the engine runs.
        params: of the job.
        index: which of the outputs.
        tokenizer: None for a model without one.
        eos_token_id: a stop token that is no reason to name.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        index: int,
        tokenizer: Tokenizer | None,
        eos_token_id: int,
    ) -> None:
        self.request, self.index = request, index
        self.completion: Completion | None = None
        self._params, self._eos_token_id = params, eos_token_id
        stops = (params.stop_strings, bool(params.include_stop))
        self._stream = None if tokenizer is None else TextStream(tokenizer, *stops)
        self._text: list[str] = []
        self._num_read = 0
        self._first_token = 0.0

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stream is None else self._stream.stop_found

    def read(self) -> StreamEvent:
        """Turn the request's new tokens into text.

        Returns:
            The news. If `stop_found` is set by now, the request is to be aborted.
        """
        seconds = time.monotonic() - self.request.submitted_at
        news, pieces = self.request.token_ids[self._num_read :], []
        for token in news:
            self._num_read += 1
            may_stop = self._num_read >= self._params.min_tokens
            pieces.append("" if self._stream is None else self._stream.push(token, may_stop))
            if self.stop_found is not None:
                # Tokens of the same step that come after the stop are nobody's.
                del self.request.token_ids[self._num_read :], self.request.logprobs[self._num_read :]
                break
        if news and not self._first_token:
            self._first_token = seconds
        self._text += pieces
        return StreamEvent("".join(pieces), news[: len(pieces)], self.index)

    def end(self) -> StreamEvent:
        """Make the completion of a request that is over, and the last event."""
        rest = "" if self._stream is None else self._stream.finish()
        self._text.append(rest)
        request, reason = self.request, self.request.finish_reason or ""
        stop_token = None if request.stop_token == self._eos_token_id else request.stop_token
        self.completion = Completion(
            text="".join(self._text),
            token_ids=list(request.token_ids),
            finish_reason=reason,
            prompt_ids=request.prompt.tolist(),
            logprobs=list(request.logprobs),
            stop_reason=self.stop_found if self.stop_found is not None else stop_token,
            prompt_logprobs=list(request.prompt_logprobs),
            index=self.index,
            timing=RequestTiming(
                queued=max(0.0, request.entered_at - request.submitted_at),
                first_token=self._first_token,
                total=time.monotonic() - request.submitted_at,
                num_cached=request.num_cached,
                num_preemptions=request.num_preemptions,
            ),
        )
        return StreamEvent(rest, [], self.index, reason, self.completion)


class Job:
    """A submitted prompt.

    Attributes:
        samples: its outputs.
        events: what happened since somebody last looked; only kept for a stream.
    """

    def __init__(self, samples: Iterable[Sample], is_streamed: bool = False) -> None:
        self.samples = list(samples)
        self.events: deque[StreamEvent] | None = deque() if is_streamed else None

    def tell(self, event: StreamEvent) -> None:
        """Keep an event, if anybody is going to ask."""
        if self.events is not None:
            self.events.append(event)

    @property
    def is_done(self) -> bool:
        """Whether all outputs are there."""
        return all(sample.completion is not None for sample in self.samples)

    @property
    def completions(self) -> Completions:
        """The outputs that are there."""
        return Completions(sample.completion for sample in self.samples if sample.completion is not None)


class Jobs:
    """All jobs that are not done.

    Args:
        tokenizer: None for a model without one.
        eos_token_id: a stop token that is no reason to name.
    """

    def __init__(self, tokenizer: Tokenizer | None, eos_token_id: int) -> None:
        self._arguments = (tokenizer, eos_token_id)
        self._by_request: dict[Request, tuple[Job, Sample]] = {}

    @property
    def all(self) -> set[Job]:
        """The jobs."""
        return {job for job, _ in self._by_request.values()}

    def add(self, requests: Sequence[Request], params: SamplingParams, is_streamed: bool) -> Job:
        """Make a job of requests that the engine has.

        Args:
            requests: one for each output.
            params: of the job.
            is_streamed: whether its events are kept for somebody who asks.

        Returns:
            The job.
        """
        samples = [Sample(one, params, index, *self._arguments) for index, one in enumerate(requests)]
        job = Job(samples, is_streamed)
        for sample in samples:
            self._by_request[sample.request] = (job, sample)
            if sample.request.is_over:
                self.read(sample.request)
                self.end(sample.request)
        return job

    def read(self, request: Request) -> bool:
        """Turn a request's new tokens into text.

        Returns:
            Whether a stop string ended the text, so that the request is to be aborted.
        """
        job, sample = self._by_request[request]
        event = sample.read()
        if event.text or event.token_ids:
            job.tell(event)
        return sample.stop_found is not None

    def end(self, request: Request) -> Job:
        """Make the completion of a request that is over."""
        job, sample = self._by_request.pop(request)
        job.tell(sample.end())
        return job
