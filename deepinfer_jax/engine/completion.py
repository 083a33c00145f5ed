"""What a user gets: completions and the events of a stream.

Separate from `jobs.py`, which fills them in, because these are values.
Read next: `jobs.py`; `show.py`, how they look.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import show
from .request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When things happened to a request, in seconds since it was submitted.

    Attributes:
        queued: until it got a slot.
        first_token: until its first token was known.
        total: until it was over.
        num_cached: prompt tokens that the prefix cache had.
        num_preemptions: how often it lost its slot and was computed again.
    """

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    num_cached: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """One output of one prompt.

    Attributes:
        text: generated text, "" if the model has no tokenizer.
        token_ids: generated tokens, without the stop token; the last one may hold the end of a stop
            string, which `text` leaves out.
        finish_reason: "stop", "length", "invalid" (the model's output was no distribution) or "aborted".
        prompt_ids: tokens of the prompt.
        logprobs: one for each token, if asked for.
        stop_reason: the stop string or the stop token that ended it, None for the end of sequence.
        prompt_logprobs: one for each prompt token after the first, if asked for.
        index: which of the prompt's `n` outputs.
        timing: how long it took; not compared.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    index: int = 0
    timing: RequestTiming = field(default_factory=RequestTiming, compare=False)

    def __repr__(self) -> str:
        return show.completion_text(self)

    def _repr_html_(self) -> str:
        return show.completion_html(self)


class Completions(list[Completion]):
    """Completions in the order of their prompts, shown as a table in a notebook."""

    def _repr_html_(self) -> str:
        return show.completions_html(self)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """News of one output.

    Attributes:
        text: what came to the text, "" while a character or a stop string may be incomplete.
        token_ids: tokens that came.
        index: which of the prompt's `n` outputs.
        finish_reason: in the last event of an output.
        completion: all of it, in the last event of an output.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    completion: Completion | None = None
