"""What an engine asks of its devices: slots, pages as tokens come, rows of each half, and nothing twice.

Separate because the steps are replaced by ones that only count, so that thousands of them take a second.
Read next: `test_scheduler.py`, whose devices know when they are asked for something wrong.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, SamplingParams
from deepinfer_jax.arrays import Array
from deepinfer_jax.engine import runner
from deepinfer_jax.engine.generate import Generation, generate_ids
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.plans import Admission, PrefillPlan
from deepinfer_jax.sampling.state import LENGTH, RUNNING
from deepinfer_jax.step import StepOutput
from deepinfer_jax.testing.presets import SMALLEST

STEPS = ("initial_state", "admit_step", "page_step", "encode_step", "prefill_step", "decode_step")


class CountingSteps:
    """Steps that only count: each slot's token is the integer after its latest one. Records what came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.admissions: list[Admission] = []
        self.tables: list[np.ndarray] = []
        self.encoded: list[PrefillPlan] = []
        self.prefilled: list[PrefillPlan] = []
        self.num_decoded: list[int] = []
        for name in STEPS:
            monkeypatch.setattr(runner, name, getattr(self, name))
        # These are no programs that another test would find compiled.
        monkeypatch.setattr(runner, "_compiled", set())

    def initial_state(self, is_forbidden: np.ndarray, *, sizes: Any, **_: Any) -> Array:
        self.sizes.append(sizes.num_slots)
        self.left = np.zeros(sizes.num_slots, np.int32)
        return jnp.zeros(sizes.num_slots, jnp.int32)

    def admit_step(self, state: Array, admission: Admission, **_: Any) -> Array:
        self.admissions.append(admission)
        self.left = np.where(admission.is_admitted, admission.parameters.max_tokens, self.left)
        return self.page_step(state, admission.page_table)

    def page_step(self, state: Array, page_table: np.ndarray, **_: Any) -> Array:
        self.tables.append(page_table)
        return state

    def encode_step(self, _weights: Any, state: Array, plan: PrefillPlan, **_: Any) -> Array:
        self.encoded.append(plan)
        return state

    def prefill_step(
        self, _weights: Any, state: Array, plan: PrefillPlan, **_: Any
    ) -> tuple[Array, StepOutput]:
        self.prefilled.append(plan)
        is_last = plan.last_rows >= 0
        return self.sample(np.where(is_last, plan.token_ids[plan.last_rows], state), is_last)

    def decode_step(
        self, _weights: Any, state: Array, is_active: np.ndarray, **_: Any
    ) -> tuple[Array, StepOutput]:
        is_sampled = is_active & (self.left > 0)
        self.num_decoded.append(int(is_sampled.sum()))
        return self.sample(np.asarray(state), is_sampled)

    def sample(self, state: np.ndarray, is_sampled: np.ndarray) -> tuple[Array, StepOutput]:
        tokens = jnp.asarray(state + is_sampled, jnp.int32)
        self.left = self.left - is_sampled
        nothing = jnp.zeros((len(state), 1, 0), jnp.float32)
        output = StepOutput(
            tokens=tokens[:, None],
            num_tokens=jnp.asarray(is_sampled, jnp.int32),
            finish=jnp.asarray(np.where(self.left <= 0, LENGTH, RUNNING)),
            is_invalid=jnp.zeros(len(state), bool),
            logprobs=jnp.zeros((len(state), 1), jnp.float32),
            top_ids=nothing,
            top_logprobs=nothing,
        )
        return jnp.array(tokens), output


def run(
    prompts: list[list[int]], params: SamplingParams | list[SamplingParams], **options: Any
) -> tuple[list[Generation], list[int]]:
    """Run prompts without a model; give what came, and whose each token was, as they came."""
    numbers: list[int] = []
    # There is nothing to keep for reuse.
    config = EngineConfig(**options, prefix_cache=False)
    weights: Any = SimpleNamespace(draft=None)
    found = generate_ids(
        *(weights, SMALLEST, FLOAT32, prompts, params, lambda number, _: numbers.append(number)),
        options=config,
    )
    return found, numbers


@pytest.mark.parametrize("overlap", [0, 1])
def test_more_than_64_prompts_run_in_64_slots(monkeypatch: pytest.MonkeyPatch, overlap: int) -> None:
    steps = CountingSteps(monkeypatch)
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (100, *[3] * 130)]
    found, numbers = run([[number % 20] for number in range(131)], each, overlap=overlap)
    assert [one.token_ids for one in found] == [
        [number % 20 + 1 + step for step in range(one.max_tokens)] for number, one in enumerate(each)
    ]
    assert steps.sizes == [64]
    assert sum(int(admission.is_admitted.sum()) for admission in steps.admissions) == 131
    assert int(steps.admissions[0].is_admitted.sum()) == 64
    # Slots that are free are taken at once, whatever still runs in the others.
    assert numbers.count(130) == 3
    last = len(numbers) - 1 - numbers[::-1].index(130)
    assert numbers[last:].count(0) > 50
    # No row is computed for nothing but where a step is asked for before the one before it is read.
    assert sum(steps.num_decoded) == sum(one.max_tokens - 1 for one in each)


def test_the_smallest_sizes_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = CountingSteps(monkeypatch)
    for count in (1, 2, 8, 9, 16, 17, 64, 65):
        run([[7]] * count, SamplingParams(max_tokens=1))
    assert steps.sizes == [1, 8, 8, 16, 16, 64, 64, 64]
    for length in (1, 255, 256, 512, 513):
        run([[7] * length], SamplingParams(max_tokens=1))
    assert [table.shape[1] for table in steps.tables[-5:]] == [2, 2, 4, 8, 8]


def pages_in_use(table: np.ndarray) -> list[int]:
    return table[table >= 0].tolist()


@pytest.mark.parametrize("overlap", [0, 1])
def test_every_request_has_pages_of_its_own_as_its_tokens_come(
    monkeypatch: pytest.MonkeyPatch, overlap: int
) -> None:
    steps = CountingSteps(monkeypatch)
    lengths, max_tokens = (1, 126, 127, 128, 300, 500), 3
    prompts = [[number] * length for number, length in enumerate(lengths)]
    run(prompts, SamplingParams(max_tokens=max_tokens), overlap=overlap)
    first = steps.admissions[0].page_table
    assert first.shape == (8, 4)
    # For the prompt and the first token at once; another when a token needs it.
    assert (first >= 0).sum(axis=1).tolist() == [-(-(length + 1) // 128) for length in lengths] + [0] * 2
    most = np.max([(table >= 0).sum(axis=1) for table in steps.tables], axis=0).tolist()
    # The last token is never run.
    assert most == [-(-(length + max_tokens - 1) // 128) for length in lengths] + [0] * 2
    assert most[2] > (first[2] >= 0).sum()
    for before, after in zip(steps.tables, steps.tables[1:], strict=False):
        pages = pages_in_use(after)
        assert len(set(pages)) == len(pages) and max(pages, default=0) < 8 * 4
        # A running sequence keeps what it has.
        stays = (after[:, 0] >= 0) & (before[:, 0] >= 0)
        kept = before[stays] >= 0
        np.testing.assert_array_equal(after[stays][kept], before[stays][kept])


@pytest.mark.parametrize("prefill", ["exact", "bounded"])
def test_bounded_prefill_runs_the_decoder_on_a_window(monkeypatch: pytest.MonkeyPatch, prefill: str) -> None:
    steps, window = CountingSteps(monkeypatch), SMALLEST.sliding_window
    lengths = (1, window, window + 1, 200)
    prompts = [[7] * length for length in lengths]
    run(prompts, SamplingParams(max_tokens=2), prefill=prefill, max_chunk=50)
    starts = [max(0, length - window) if prefill == "bounded" else 0 for length in lengths]
    assert steps.admissions[0].decoder_starts.tolist() == [*starts, *[0] * 4]
    assert positions_of(steps.encoded, 4) == [list(range(start)) for start in starts]
    spans = zip(starts, lengths, strict=True)
    assert positions_of(steps.prefilled, 4) == [list(range(start, length)) for start, length in spans]
    for plan in (*steps.encoded, *steps.prefilled):
        assert max(int((plan.is_valid & (plan.slots == slot)).sum()) for slot in range(4)) <= 50


def positions_of(plans: list[PrefillPlan], num_slots: int) -> list[list[int]]:
    """Positions that ran in each slot, in order."""
    slots = range(num_slots)
    return [
        [int(at) for plan in plans for at in plan.positions[plan.is_valid & (plan.slots == slot)]]
        for slot in slots
    ]
