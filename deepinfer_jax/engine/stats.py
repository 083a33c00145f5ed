"""What an engine counts while it runs.

Separate because benchmarks, notebooks and the command line all read it, and only `engine.py` writes it.
Read next: `engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .prefix import PrefixCounters


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since an engine was made, and how full it is now.

    Attributes:
        steps: steps given to the devices.
        prompt_tokens: tokens of the prompts of all requests that got a slot.
        generated_tokens: tokens that the host has read.
        encoder_rows: rows that went through the encoder half.
        decoder_rows: rows that went through the decoder half.
        preemptions: times that a request lost its slot.
        host_seconds: spent deciding what to run and noting what came.
        dispatch_seconds: spent giving steps to the devices, beside the rest if steps overlap.
        wait_seconds: spent waiting for the devices.
        busy_seconds: spent in steps in all.
        prefix: what the prefix cache counted.
        slots_running: slots in use.
        slots: of them all.
        pages_used: pages in use or kept for reuse.
        pages: of them all.
        waiting: requests without a slot.
        draft: what came of drafts, None where none are made.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    encoder_rows: int = 0
    decoder_rows: int = 0
    preemptions: int = 0
    host_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    prefix: PrefixCounters = field(default_factory=PrefixCounters)
    slots_running: int = 0
    slots: int = 0
    pages_used: int = 0
    pages: int = 0
    waiting: int = 0
    draft: Any = None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens for each second spent in steps; 0 before the first."""
        return self.generated_tokens / self.busy_seconds if self.busy_seconds else 0.0
