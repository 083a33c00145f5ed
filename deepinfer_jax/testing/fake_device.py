"""Devices that compute nothing but notice everything: for tests of the scheduler without a model.

Separate because it stands in for `engine.runner.Runner` and speaks plans alone. Pages hold the token ids
of their positions and rings those of the latest ones, as a model's hold what it made of them. A token is a
hash of all ids that are read back through page table and ring: one wrong page, one missing copy or one row
at a wrong position gives another token, or fails at once.
Read next: `../plans.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..config import NOTHING, PAGE_TOKENS, CacheConfig, ModelConfig
from ..plans import Admission, PrefillPlan, StepPlan
from ..sampling.state import LENGTH, RUNNING, STOPPED

NEVER = -7
"""What a page or ring holds where nothing was written."""


def plain_token(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    """Give the token after a sequence, by its content and the request's seed alone."""
    content = seed.to_bytes(8) + np.asarray(token_ids, "<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest()) % vocab_size


class FakeOutput(NamedTuple):
    """The fields of a `StepOutput` that carry tokens; log-probabilities are of no one."""

    tokens: np.ndarray
    is_sampled: np.ndarray
    finish: np.ndarray
    is_invalid: np.ndarray


class FakeOutputs(NamedTuple):
    """As `engine.runner.Outputs`."""

    decode: FakeOutput | None
    prefill: FakeOutput | None


class FakeRunner:
    """State of slots, pages and snapshots as token ids.

    Args:
        config: gives the window and the vocabulary.
        sizes: of the cache.
        num_snapshots: places for copies of a slot's rings.
    """

    def __init__(self, config: ModelConfig, sizes: CacheConfig, num_snapshots: int) -> None:
        self.config, self.sizes, self.num_snapshots = config, sizes, num_snapshots
        self.reset()

    def reset(self) -> None:
        """Empty everything."""
        slots, window = self.sizes.num_slots, self.config.sliding_window
        self.pages = np.full((self.sizes.num_pages, PAGE_TOKENS), NEVER)
        self.page_table = np.full((slots, self.sizes.pages_per_slot), NOTHING)
        # Two halves of the model: in bounded prefill the second one sees only the end of a prompt.
        self.rings = np.full((slots, 2, window), NEVER)
        self.snapshots = np.full((max(self.num_snapshots, 1), 2, window), NEVER)
        self.lengths = np.zeros(slots, int)
        self.tokens = np.zeros(slots, int)
        self.is_running = np.zeros(slots, bool)
        self.num_generated = np.zeros(slots, int)
        self.noted: list[Counter[int]] = [Counter() for _ in range(slots)]
        self.admission: dict[int, tuple[Admission, int]] = {}

    @property
    def state_bytes(self) -> int:
        """Nothing lies on a device."""
        return 0

    def close(self) -> None:
        """Do nothing, as there is no memory to give back."""

    def read(self, outputs: FakeOutputs) -> FakeOutputs:
        """Give what is there already."""
        return outputs

    def run(self, plan: StepPlan) -> FakeOutputs:
        """Do what a plan says, in its order.

        Args:
            plan: of the scheduler.

        Returns:
            The tokens.
        """
        for snapshot, slot in plan.saves_before:
            self._save(snapshot, slot)
        for slot, snapshot in plan.restores:
            self.rings[slot] = self.snapshots[snapshot]
        assert not plan.imports
        if plan.admission is not None:
            self._admit(plan.admission)
        elif plan.page_table is not None:
            self.page_table = plan.page_table.copy()
        for slot, token_ids in plan.notes:
            self.noted[slot].update(token_ids.tolist())
        decode = None if plan.is_decoding is None else self._decode(plan.is_decoding)
        if plan.encode is not None:
            self._rows(plan.encode, halves=1)
            assert (plan.encode.last_rows == NOTHING).all()
        prefill = None if plan.prefill is None else self._prefill(plan.prefill)
        for snapshot, slot in plan.saves_after:
            self._save(snapshot, slot)
        return FakeOutputs(decode, prefill)

    def _save(self, snapshot: int, slot: int) -> None:
        assert self.lengths[slot] % PAGE_TOKENS == 0
        self.snapshots[snapshot] = self.rings[slot]

    def _admit(self, admission: Admission) -> None:
        self.page_table = admission.page_table.copy()
        for slot in np.flatnonzero(admission.is_admitted).tolist():
            self.admission[slot] = (admission, slot)
            self.lengths[slot] = admission.lengths[slot]
            self.is_running[slot] = admission.is_running[slot]
            self.num_generated[slot] = admission.num_generated[slot]
            self.noted[slot] = Counter()

    def _put(self, slot: int, position: int, token: int, halves: int) -> None:
        """Run one row."""
        assert position == self.lengths[slot], "rows of a slot come in order"
        page = self.page_table[slot, position // PAGE_TOKENS]
        assert page >= 0, "every row has a page"
        self.pages[page, position % PAGE_TOKENS] = token
        self.rings[slot, :halves, position % self.config.sliding_window] = token
        self.lengths[slot] += 1

    def _rows(self, plan: PrefillPlan, halves: int) -> None:
        for row in np.flatnonzero(plan.is_valid):
            slot, position, token = int(plan.slots[row]), int(plan.positions[row]), int(plan.token_ids[row])
            self._put(slot, position, token, halves)
            self.noted[slot][token] += 1
            admission, _ = self.admission[slot]
            self.num_generated[slot] += position >= admission.prompt_lengths[slot]
            is_decoder_row = position >= admission.decoder_starts[slot]
            assert is_decoder_row == (halves == 2), "each half sees its rows"

    def _decode(self, is_active: np.ndarray) -> FakeOutput:
        is_sampled = is_active & self.is_running
        for slot in np.flatnonzero(is_sampled).tolist():
            self._put(slot, int(self.lengths[slot]), int(self.tokens[slot]), halves=2)
        return self._sample(is_sampled)

    def _prefill(self, plan: PrefillPlan) -> FakeOutput:
        self._rows(plan, halves=2)
        return self._sample(plan.last_rows >= 0)

    def _sample(self, is_sampled: np.ndarray) -> FakeOutput:
        finish = np.zeros(len(is_sampled), int)
        for slot in np.flatnonzero(is_sampled).tolist():
            token = self._token(slot)
            admission, place = self.admission[slot]
            parameters: Any = admission.parameters
            self.tokens[slot] = token
            self.noted[slot][token] += 1
            self.num_generated[slot] += 1
            if token in parameters.stop_ids[place]:
                finish[slot] = STOPPED
            elif self.num_generated[slot] >= parameters.max_tokens[place]:
                finish[slot] = LENGTH
            self.is_running[slot] = finish[slot] == RUNNING
        return FakeOutput(self.tokens.copy(), is_sampled.copy(), finish, np.zeros(len(finish), bool))

    def _token(self, slot: int) -> int:
        """Read a whole sequence back, check that rings and counts agree with it, and hash it."""
        length, window = int(self.lengths[slot]), self.config.sliding_window
        positions = np.arange(length)
        token_ids = self.pages[self.page_table[slot, positions // PAGE_TOKENS], positions % PAGE_TOKENS]
        admission, place = self.admission[slot]
        for half, first in enumerate((0, int(admission.decoder_starts[place]))):
            latest = positions[max(first, length - window) :]
            expected = token_ids[latest]
            assert self.rings[slot, half, latest % window].tolist() == expected.tolist(), "the window"
        parameters: Any = admission.parameters
        if parameters.presence_penalty[place]:
            assert self.noted[slot] == Counter(token_ids.tolist()), "what penalties count"
        assert self.num_generated[slot] == length - admission.prompt_lengths[place], (
            "the length of the output"
        )
        high, low = parameters.seeds[place].tolist()
        return plain_token(token_ids.tolist(), high << 32 | low, self.config.vocab_size)
