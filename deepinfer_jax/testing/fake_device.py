"""Devices that compute nothing but notice everything: for tests of the scheduler without a model.

Separate because it stands in for `engine.runner.Runner` and speaks plans alone. Pages hold the token ids
of their positions and rings those of the latest ones, as a model's hold what it made of them. A token is a
hash of all ids that are read back through page table and ring: one wrong page, one missing copy or one row
at a wrong position gives another token, or fails at once. With drafts a step gives as many tokens as chance
has it, and writes rows that it rejects after them.
Read next: `../plans.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..config import NOTHING, PAGE_TOKENS, CacheConfig, DraftConfig, ModelConfig
from ..plans import Admission, PrefillPlan, StepPlan
from ..sampling.state import LENGTH, RUNNING, STOPPED

NEVER = -7
"""What a page or ring holds where nothing was written."""

REJECTED = -8
"""What a row of a rejected draft writes."""


def plain_token(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    """Give the token after a sequence, by its content and the request's seed alone."""
    content = seed.to_bytes(8) + np.asarray(token_ids, "<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest()) % vocab_size


def with_drafts(config: ModelConfig, block_size: int = 5) -> ModelConfig:
    """Add a draft stage to an architecture without any; its other sizes are of no one here."""
    last = config.num_hidden_layers - 1
    draft = DraftConfig(
        num_stages=1,
        block_size=block_size,
        target_layer_ids=(last,),
        markov_rank=1,
        n_routed_experts=1,
        num_experts_per_tok=1,
    )
    return replace(config, compress_ratios=(*config.compress_ratios, 0), draft=draft)


def chance(count: int, *parts: Any) -> int:
    """Give a number below `count`, the same for the same parts."""
    content = repr(parts).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest()) % count


class FakeDrafts(NamedTuple):
    """As `step.DraftOutput`; confidences are of no one."""

    num_verified: np.ndarray
    num_accepted: np.ndarray
    num_rows: np.ndarray
    choice: np.ndarray
    logits: np.ndarray


class FakeOutput(NamedTuple):
    """The fields of a `StepOutput` that carry tokens; log-probabilities are of no one."""

    tokens: np.ndarray
    num_tokens: np.ndarray
    finish: np.ndarray
    is_invalid: np.ndarray
    drafts: FakeDrafts | None = None


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
        num_drafts: that a step verifies for a slot at most, 0 for plain decoding.
        oracle: whether all drafts are accepted, rather than as many as chance has it.
    """

    def __init__(
        self,
        config: ModelConfig,
        sizes: CacheConfig,
        num_snapshots: int,
        num_drafts: int = 0,
        oracle: bool = False,
    ) -> None:
        self.config, self.sizes, self.num_snapshots = config, sizes, num_snapshots
        self.num_drafts, self.oracle = num_drafts, oracle
        self.ring = config.sliding_window + sizes.window_slack
        self.reset()

    def reset(self) -> None:
        """Empty everything."""
        slots, ring = self.sizes.num_slots, self.ring
        self.pages = np.full((self.sizes.num_pages, PAGE_TOKENS), NEVER)
        self.page_table = np.full((slots, self.sizes.pages_per_slot), NOTHING)
        # Two halves of the model: in bounded prefill the second one sees only the end of a prompt.
        self.rings = np.full((slots, 2, ring), NEVER)
        self.snapshots = np.full((max(self.num_snapshots, 1), 2, ring), NEVER)
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
        """Copy a slot's rings, which must hold the window before the last boundary that it passed."""
        boundary = int(self.lengths[slot]) // PAGE_TOKENS * PAGE_TOKENS
        assert 0 < boundary and self.lengths[slot] - boundary <= self.sizes.window_slack
        admission, place = self.admission[slot]
        start = int(admission.decoder_starts[place])
        assert start == 0 or boundary <= start, "the second half has no window there"
        halves = 2 if start == 0 else 1
        self._check_windows(slot, boundary, (0,) * halves)
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
        """Run one row that stays."""
        assert position == self.lengths[slot], "rows of a slot come in order"
        self._write(slot, position, token, halves)
        self.lengths[slot] += 1

    def _write(self, slot: int, position: int, token: int, halves: int) -> None:
        page = self.page_table[slot, position // PAGE_TOKENS]
        assert page >= 0, "every row has a page"
        self.pages[page, position % PAGE_TOKENS] = token
        self.rings[slot, :halves, position % self.ring] = token

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
        output = self._empty_output(1 + self.num_drafts)
        drafts = self._empty_drafts()
        for slot in np.flatnonzero(is_active & self.is_running).tolist():
            admission, place = self.admission[slot]
            parameters: Any = admission.parameters
            first = int(self.lengths[slot])
            left = int(parameters.max_tokens[place] - self.num_generated[slot])
            verified, accepted = self._lengths(first, min(self.num_drafts, left - 1), self.tokens[slot])
            for _ in range(1 + accepted):
                self._put(slot, int(self.lengths[slot]), int(self.tokens[slot]), halves=2)
                self._sample(slot, output)
                if output.finish[slot] != RUNNING:
                    break
            # A real step writes all rows before it knows which stay.
            for position in range(int(self.lengths[slot]), first + 1 + verified):
                self._write(slot, position, REJECTED, halves=2)
            drafts.num_verified[slot] = verified
            drafts.num_accepted[slot] = output.num_tokens[slot] - 1
            drafts.num_rows[slot] = 1 + verified
        return output._replace(drafts=drafts) if self.num_drafts else output

    def _lengths(self, first: int, most: int, token: int) -> tuple[int, int]:
        """Give how many drafts a slot verifies, often as many as it may, and how many of them it accepts."""
        if self.oracle:
            return most, most
        verified = min(most, chance(2 * most + 1, "verified", first, int(token)))
        return verified, chance(verified + 1, "accepted", first, int(token))

    def _prefill(self, plan: PrefillPlan) -> FakeOutput:
        self._rows(plan, halves=2)
        output = self._empty_output(1)
        for slot in np.flatnonzero(plan.last_rows >= 0).tolist():
            self._sample(slot, output)
        return output

    def _empty_output(self, most: int) -> FakeOutput:
        """Make the output of a step that gives no token yet."""
        slots = self.sizes.num_slots
        return FakeOutput(
            tokens=np.full((slots, most), NEVER),
            num_tokens=np.zeros(slots, int),
            finish=np.full(slots, RUNNING),
            is_invalid=np.zeros(slots, bool),
        )

    def _empty_drafts(self) -> FakeDrafts:
        """Make what a step says of its drafts while there are none."""
        slots = self.sizes.num_slots
        return FakeDrafts(
            num_verified=np.zeros(slots, int),
            num_accepted=np.zeros(slots, int),
            num_rows=np.zeros(slots, int),
            choice=np.full(slots, NOTHING),
            logits=np.zeros((slots, self.config.draft.block_size), np.float32),
        )

    def _sample(self, slot: int, output: FakeOutput) -> None:
        """Give a slot its next token."""
        token = self._token(slot)
        admission, place = self.admission[slot]
        parameters: Any = admission.parameters
        self.tokens[slot] = output.tokens[slot, output.num_tokens[slot]] = token
        output.num_tokens[slot] += 1
        self.noted[slot][token] += 1
        self.num_generated[slot] += 1
        if token in parameters.stop_ids[place]:
            output.finish[slot] = STOPPED
        elif self.num_generated[slot] >= parameters.max_tokens[place]:
            output.finish[slot] = LENGTH
        self.is_running[slot] = output.finish[slot] == RUNNING

    def _ids(self, slot: int, length: int) -> np.ndarray:
        """Read the first tokens of a sequence back from its pages."""
        positions = np.arange(length)
        return self.pages[self.page_table[slot, positions // PAGE_TOKENS], positions % PAGE_TOKENS]

    def _check_windows(self, slot: int, length: int, starts: Sequence[int]) -> None:
        """Compare the rings of as many halves as there are first positions with the end of a sequence."""
        token_ids = self._ids(slot, length)
        for half, first in enumerate(starts):
            latest = np.arange(max(first, length - self.config.sliding_window), length)
            expected = token_ids[latest]
            assert self.rings[slot, half, latest % self.ring].tolist() == expected.tolist(), "the window"

    def _token(self, slot: int) -> int:
        """Read a whole sequence back, check that rings and counts agree with it, and hash it."""
        length = int(self.lengths[slot])
        admission, place = self.admission[slot]
        self._check_windows(slot, length, (0, int(admission.decoder_starts[place])))
        token_ids = self._ids(slot, length)
        parameters: Any = admission.parameters
        if parameters.presence_penalty[place]:
            assert self.noted[slot] == Counter(token_ids.tolist()), "what penalties count"
        assert self.num_generated[slot] == length - admission.prompt_lengths[place], (
            "the length of the output"
        )
        high, low = parameters.seeds[place].tolist()
        return plain_token(token_ids.tolist(), high << 32 | low, self.config.vocab_size)
