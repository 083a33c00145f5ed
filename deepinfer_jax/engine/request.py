"""One request from submission to its last token.

Separate because scheduler, engine and text all look at it and only the scheduler changes it. No JAX.
Read next: `scheduler.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import NOTHING, PAGE_TOKENS
from ..sampling_params import SamplingParams
from .prefix import page_keys

STOP_REASON = "stop"
LENGTH_REASON = "length"
INVALID_REASON = "invalid"
ABORTED_REASON = "aborted"
HANDED_OVER_REASON = "handed over"


class Phase(enum.Enum):
    """Where a request is: in the queue, reading its prompt, generating, or over."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one token, of the model's own distribution.

    Attributes:
        logprob: of the token.
        top: of the most probable tokens, by token id, best first.
    """

    logprob: float
    top: dict[int, float]


@dataclass(slots=True, eq=False)
class Request:
    """A request and what became of it so far.

    Attributes:
        number: place in the order of arrival, which is also its priority.
        prompt: int32 ids.
        params: how its tokens are chosen; `n` is 1.
        decoder_start: first prompt position that the decoder half sees.
        token_ids: generated tokens that the host has read, without a stop token.
        logprobs: one for each token, if asked for.
        prompt_logprobs: one for each prompt token after the first, if asked for.
        finish_reason: "stop", "length", "invalid" or "aborted"; None while it goes on.
        stop_token: the stop token that ended it.
        phase: where it is.
        slot: where it runs, NOTHING while it does not.
        pages: page of each 128 positions.
        num_computed: positions whose rows have been given to the devices, at least: an unread step with
            drafts counts as one row.
        rows_to_run: int32, tokens to run as rows before the next one is sampled.
        num_reused: positions that were in the cache when it got its slot.
        num_saved: positions up to the last page boundary whose window state it left for reuse, or found.
        restored: snapshot that its slot starts from.
        in_flight: steps whose tokens, at least one each, the host has not read yet.
        cuts: positions at which a chunk must end, so that the window state there can be stored.
        promised: keys of the boundaries that it will store.
        is_held: whether it stops after its first token, to be handed to another engine.
        sequence: what another engine exported, until it is put into a slot.
        num_cached: prompt tokens that were not computed, as the prefix cache had them.
        num_preemptions: how often it lost its slot.
        submitted_at: when it came, in seconds of the monotonic clock; as the next, for reports alone.
        entered_at: when it first got a slot, 0 if it has not.
    """

    number: int
    prompt: np.ndarray
    params: SamplingParams
    decoder_start: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token: int | None = None
    phase: Phase = Phase.WAITING
    slot: int = NOTHING
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    rows_to_run: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    num_reused: int = 0
    num_saved: int = 0
    restored: int | None = None
    in_flight: int = 0
    cuts: Sequence[int] = ()
    promised: list[bytes] = field(default_factory=list)
    is_held: bool = False
    sequence: Any = None
    num_cached: int = 0
    num_preemptions: int = 0
    submitted_at: float = 0.0
    entered_at: float = 0.0
    _keys: list[bytes] = field(default_factory=list)

    @property
    def target_length(self) -> int:
        """Positions to run as rows before the next token is sampled."""
        return len(self.rows_to_run)

    @property
    def num_known(self) -> int:
        """Tokens that the host knows, of the prompt and of the output."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def num_reusable(self) -> int:
        """Known tokens whose window states could serve a request: not the last, nor past a decoder start."""
        return self.decoder_start or self.num_known - 1

    @property
    def is_exportable(self) -> bool:
        """Whether a held request has its first token and the devices all that comes before it."""
        is_computed = self.phase is Phase.DECODING and self.num_computed == self.num_known - 1
        return self.is_held and bool(self.token_ids) and is_computed and not self.in_flight

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def ids_to_run(self) -> np.ndarray:
        """Give the tokens to run as rows, before the next one is sampled or a held request is exported."""
        ids = self.known_ids()
        return ids[:-1] if self.is_held and self.token_ids else ids

    def known_ids(self) -> np.ndarray:
        """Give all tokens that the host knows: int32 [num_known]."""
        return np.concatenate([self.prompt, np.asarray(self.token_ids, np.int32)])

    def keys(self, num_tokens: int) -> list[bytes]:
        """Give the content keys of the complete pages among the first tokens."""
        num_pages = num_tokens // PAGE_TOKENS
        if len(self._keys) < num_pages:
            self._keys = page_keys(self.known_ids(), self._keys)
        return self._keys[:num_pages]


def num_pages(num_tokens: int) -> int:
    """Count the pages that hold some tokens."""
    return -(-num_tokens // PAGE_TOKENS)
