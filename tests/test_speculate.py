"""Steps with drafts give the tokens of steps without, whatever is drafted, verified or left out.

Separate from `test_step.py` because every test here is one comparison: the same requests, token by token.
Read next: `spec_decode/test_golden_drafts.py`, `engine/test_drafted_tokens.py` (the host's side).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.plans import DRAFT_MODES, Admission, PromptSpan, prefill_plans
from deepinfer_jax.sampling.state import STOPPED
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.slot_parameters import slot_parameters
from deepinfer_jax.spec_decode.budgets import NO_DRAFT, StepCosts
from deepinfer_jax.spec_decode.calibration import REGIMES, Calibration, regime_of
from deepinfer_jax.spec_decode.draft import Drafts
from deepinfer_jax.speculate import (
    PLAN_WORDS,
    PROBE_STEPS,
    Speculation,
    SpeculationPlan,
    _survivals_of,
    speculate_step,
)
from deepinfer_jax.step import admit_step, decode_step, initial_state, prefill_step
from deepinfer_jax.step_state import EngineState, StepOutput
from deepinfer_jax.testing.presets import SMALLEST_DRAFTED, random_weights

CONFIG, SLOTS = SMALLEST_DRAFTED, 8
SIZE = CONFIG.draft.block_size
SIZES = CacheConfig(SLOTS, 2, 2 * SLOTS, 3 * SIZE, num_draft_layers=CONFIG.draft.num_stages)
BUDGETS = (8, 12, 16, 24, 32, 40)
"""Of 8 slots: nearly no draft up to nearly all of them."""

LIKELY = {7: 9.0, 30: 8.5, 55: 8.0}
"""A bias that makes target and draft choose among few tokens, so that many drafts are accepted."""

PROMPTS = [np.random.default_rng(n).integers(3, 120, n).astype(np.int32) for n in (1, 3, 7, 8, 9, 17, 30, 2)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, logit_bias=LIKELY, ignore_eos=True),
    SamplingParams(max_tokens=37, temperature=1.0, seed=2**63 + 5, logit_bias=LIKELY, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.7, seed=3, top_k=5, top_p=0.9, logit_bias=LIKELY),
    SamplingParams(max_tokens=26, temperature=1.2, seed=4, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(
        max_tokens=25, temperature=0.9, seed=5, min_tokens=9, stop_token_ids=(30, 55), logit_bias=LIKELY
    ),
    SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=0.6, logit_bias=LIKELY),
    SamplingParams(
        max_tokens=33, temperature=1.0, min_p=0.05, seed=9, bad_token_ids=(7,), logit_bias={8: 9.0}
    ),
    SamplingParams(max_tokens=2, temperature=1.0, seed=1, logit_bias=LIKELY),
]
COSTS = StepCosts(
    np.linspace(0.1, 0.4, SLOTS + 1).astype(np.float32),
    np.asarray([1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0], np.float32),
    np.ones(SLOTS + 1, np.float32),
)
FEW_COSTS = StepCosts(COSTS.draft_ms, COSTS.verify_ms[:3], COSTS.plain_ms)
ROW_MS = np.linspace(1, 2, SLOTS * (SIZE + 1) + 1).astype(np.float32)
NUM_LOGPROBS = 3


class Run(NamedTuple):
    """Tokens of every slot, log-probabilities of each and of the best ones, and the state at the end."""

    tokens: list[list[int]]
    logprobs: list[list[tuple[float, ...]]]
    state: EngineState
    outputs: list[StepOutput]


@cache
def weights() -> Weights:
    return random_weights(CONFIG, jax.random.key(4))


def started(numerics: Numerics, params: list[SamplingParams]) -> tuple[EngineState, Run]:
    """Admit all requests and run their prompts."""
    static: dict[str, Any] = {"config": CONFIG, "numerics": numerics}
    zeros, is_off = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, bool)
    state = initial_state(np.zeros(CONFIG.vocab_size, bool), sizes=SIZES, **static)
    admission = Admission(
        is_admitted=~is_off,
        page_table=np.arange(2 * SLOTS, dtype=np.int32).reshape(SLOTS, 2),
        decoder_starts=zeros,
        lengths=zeros,
        tokens=zeros,
        is_running=is_off,
        prompt_lengths=np.asarray([len(prompt) for prompt in PROMPTS], np.int32),
        num_generated=zeros,
        parameters=slot_parameters(params, CONFIG.eos_token_id),
    )
    state = admit_step(state, admission)
    run = Run([[] for _ in PROMPTS], [[] for _ in PROMPTS], state, [])
    spans = [PromptSpan(slot, prompt, 0, len(prompt)) for slot, prompt in enumerate(PROMPTS)]
    for plan in prefill_plans(spans, SLOTS):
        state, output = prefill_step(weights(), state, plan, num_logprobs=NUM_LOGPROBS, **static)
        read(run, output)
    return state, run


def read(run: Run, output: StepOutput) -> None:
    output = jax.tree.map(np.asarray, output)
    run.outputs.append(output)
    for slot, count in enumerate(output.num_tokens):
        run.tokens[slot] += output.tokens[slot, :count].tolist()
        values = zip(output.logprobs[slot, :count], output.top_logprobs[slot, :count], strict=True)
        run.logprobs[slot] += [(float(own), *map(float, best)) for own, best in values]


@cache
def plain(numerics: Numerics = FLOAT32) -> Run:
    """Decode token by token."""
    state, run = started(numerics, PARAMS)
    while np.asarray(state.is_running).any():
        options: dict[str, Any] = {"config": CONFIG, "numerics": numerics, "num_logprobs": NUM_LOGPROBS}
        state, output = decode_step(weights(), state, np.ones(SLOTS, bool), **options)
        read(run, output)
    return run._replace(state=state)


def speculated(
    schedule: str = "dynamic",
    verification: str = "coupled",
    choices: Callable[[int], int] = lambda step: NOTHING,
    numerics: Numerics = FLOAT32,
    max_drafts: int = SIZE,
    costs: StepCosts = COSTS,
    budgets: tuple[int, ...] = BUDGETS,
    activity: Callable[[int], np.ndarray] = lambda step: np.ones(SLOTS, bool),
    params: list[SamplingParams] = PARAMS,
) -> Run:
    """Decode with drafts."""
    state, run = started(numerics, params)
    speculation = Speculation(verification, budgets)
    step = 0
    while np.asarray(state.is_running).any():
        plan = SpeculationPlan(
            is_active=activity(step),
            schedule=np.int32(DRAFT_MODES.index(schedule)),
            max_drafts=np.int32(max_drafts),
            choice=np.int32(choices(step)),
            threshold=np.float32(0.5),
            temperatures=np.ones((3, SIZE), np.float32),
            shifts=np.zeros((3, SIZE), np.float32),
            bases=np.zeros((3, SIZE), np.float32),
            costs=costs,
            row_ms=ROW_MS,
        )
        options: dict[str, Any] = {"config": CONFIG, "numerics": numerics, "num_logprobs": NUM_LOGPROBS}
        state, output = speculate_step(weights(), state, plan, speculation=speculation, **options)
        read(run, output)
        step += 1
        assert step < 400
    return run._replace(state=state)


def visible(state: EngineState) -> dict[str, np.ndarray]:
    """Give all that later steps can read of every slot, by position, and zeros for the rest."""
    state = jax.tree.map(np.asarray, state)
    lengths, cache = state.lengths, state.cache
    found = {}

    def ring(name: str, array: np.ndarray, axis: int, count: int) -> None:
        entries = array.shape[axis + 1]
        rows = []
        for slot, length in enumerate(lengths):
            positions = np.arange(max(0, length - count), length)
            own = np.take(np.take(array, slot, axis), positions % entries, axis)
            padding = [(0, 0)] * own.ndim
            padding[axis] = (0, count - len(positions))
            rows.append(np.pad(own, padding))
        found[name] = np.stack(rows)

    ring("window", cache.window, 1, CONFIG.sliding_window)
    ring("pending_kv", cache.pending_kv, 1, 1)
    ring("pending_score", cache.pending_score, 1, 1)
    ring("engram_ids", cache.engram_ids, 0, CONFIG.engram_max_ngram_size - 1)
    for ratio, pages in cache.compressed.items():
        for name, array in (("kv", pages.kv), ("index_keys", pages.index_keys)):
            own = array[:, cache.page_table].reshape(array.shape[0], SLOTS, -1, array.shape[-1])
            is_there = np.arange(own.shape[2])[None, :] < lengths[:, None] // ratio
            found[f"{name}_{ratio}"] = np.where(is_there[None, :, :, None], own, 0)
    found |= {f"sampler.{name}": array for name, array in vars(state.sampler).items()}
    return found | {name: getattr(state, name) for name in ("lengths", "tokens", "is_running")}


def assert_equal(run: Run, numerics: Numerics = FLOAT32) -> None:
    """Compare tokens, log-probabilities and the whole state, bit for bit."""
    expected = plain(numerics)
    assert run.tokens == expected.tokens
    assert run.logprobs == expected.logprobs
    found, wanted = visible(run.state), visible(expected.state)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def accepted(run: Run) -> int:
    return sum(int(one.drafts.num_accepted.sum()) for one in run.outputs if one.drafts is not None)


def test_the_requests_reach_what_they_are_for() -> None:
    """Else the comparisons below would show less than they say."""
    run = plain()
    lengths = [len(tokens) for tokens in run.tokens]
    assert lengths[1] == 37 and lengths[7] == 2
    assert 9 < lengths[4] < 25 and run.tokens[4][-1] in (30, 55)


@pytest.mark.parametrize("choice", [*range(len(BUDGETS) + 2), NOTHING])
def test_every_budget_gives_the_tokens_and_the_state_of_plain_decoding(choice: int) -> None:
    run = speculated(choices=lambda step: choice)
    assert_equal(run)
    assert choice == NO_DRAFT or accepted(run) > 20


@pytest.mark.parametrize("schedule", DRAFT_MODES[1:])
@pytest.mark.parametrize("max_drafts", [1, 3, SIZE, 99])
def test_every_schedule_and_limit_gives_the_tokens_of_plain_decoding(schedule: str, max_drafts: int) -> None:
    run = speculated(schedule, max_drafts=max_drafts)
    assert_equal(run)
    verified = max(int(one.drafts.num_verified.max()) for one in run.outputs if one.drafts is not None)
    assert verified == min(max_drafts, SIZE) or schedule == "threshold"


def test_budgets_that_change_in_every_step_and_slots_that_pause_change_nothing() -> None:
    random = np.random.default_rng(3)
    pauses = random.random((400, SLOTS)) < 0.7
    choices = random.integers(0, len(BUDGETS) + 2, 400)
    assert_equal(speculated(choices=lambda step: int(choices[step]), activity=lambda step: pauses[step]))


def test_statistics_count_what_the_output_holds() -> None:
    """BC36: all tokens of a step but its last are accepted drafts, and that too if it ends the output."""
    run = speculated("fixed")
    outputs = [one for one in run.outputs if one.drafts is not None]
    for one in outputs:
        is_there, is_over = one.num_tokens > 0, one.finish == STOPPED
        own = one.num_tokens - one.drafts.num_accepted
        assert ((own == is_there) | (is_over & (own == 0))).all()
        assert (one.drafts.num_rows == np.where(is_there, 1 + one.drafts.num_verified, 0)).all()
        assert (one.drafts.num_accepted <= one.drafts.num_verified).all()


def test_a_costly_draft_is_left_out_and_tried_again_now_and_then() -> None:
    costly = StepCosts(np.full(SLOTS + 1, 100.0, np.float32), COSTS.verify_ms, COSTS.plain_ms)
    params = [replace(one, max_tokens=2 * PROBE_STEPS, stop_token_ids=()) for one in PARAMS]
    run = speculated(costs=costly, params=params)
    choices = [int(one.drafts.choice[0]) for one in run.outputs if one.drafts is not None]
    drafting = [step for step, choice in enumerate(choices) if choice != NO_DRAFT]
    assert drafting == [PROBE_STEPS]
    no_time, verify_ms = np.zeros(SLOTS + 1, np.float32), np.ones(len(BUDGETS) + 1, np.float32)
    free = StepCosts(no_time, verify_ms, COSTS.plain_ms)
    choices = {int(one.drafts.choice[0]) for one in speculated(costs=free).outputs if one.drafts is not None}
    assert NO_DRAFT not in choices and max(choices) >= len(BUDGETS)


def calibrated_on_device(logits: np.ndarray, calibration: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """Give confidences and survivals of the requests in `PARAMS`."""

    @jax.jit
    def run(logits, state, temperatures, shifts, bases):
        plan = PLAN_WORDS._replace(temperatures=temperatures, shifts=shifts, bases=bases)
        return _survivals_of(Drafts(jnp.zeros(logits.shape, jnp.int32), logits, None), state, plan)

    tables = calibration.arrays()
    confidences, survivals = run(logits, started(FLOAT32, PARAMS)[0], *tables)
    assert confidences.dtype == survivals.dtype == np.float32
    return np.asarray(confidences), np.asarray(survivals)


def calibration_of(bases: float) -> Calibration:
    random = np.random.default_rng(2)
    temperatures, shifts = random.uniform(0.5, 2, (3, SIZE)), random.normal(0, 1, (3, SIZE))
    by_regime = (dict(zip(REGIMES, map(tuple, one.tolist()), strict=True)) for one in (temperatures, shifts))
    return Calibration(next(by_regime), {}, next(by_regime), {name: (bases,) * SIZE for name in REGIMES})


def logits_up_to(size: float) -> np.ndarray:
    return np.random.default_rng(1).uniform(-size, size, (SLOTS, SIZE)).astype(np.float32)


@pytest.mark.parametrize("size", [3.0, 100.0, 1e4, 1e30])
def test_without_a_base_confidences_are_those_of_temperature_and_shift_to_the_last_bit(size: float) -> None:
    logits, calibration = logits_up_to(size), calibration_of(bases=0.0)
    logits[0, :2] = 0.0, -0.0
    found, _ = calibrated_on_device(logits, calibration)
    rows = [regime_of(one) for one in PARAMS]
    temperatures, shifts = (table[rows] for table in calibration.arrays()[:2])
    scaled = jax.jit(lambda *args: jax.nn.sigmoid((args[0] + args[1]) / args[2]))
    np.testing.assert_array_equal(found, scaled(logits, shifts, temperatures))


@pytest.mark.parametrize("bases", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [3.0, 100.0, 1e4])
def test_devices_calibrate_as_the_host_does(bases: float, size: float) -> None:
    logits, calibration = logits_up_to(size), calibration_of(bases)
    _, found = calibrated_on_device(logits, calibration)
    regimes = [regime_of(one) for one in PARAMS]
    assert set(regimes) == {0, 1, 2}
    np.testing.assert_allclose(found, calibration.survivals(logits, regimes), rtol=1e-5, atol=1e-7)


def test_a_confidence_that_is_no_number_stays_so() -> None:
    logits = logits_up_to(3.0)
    logits[2, 1] = np.nan
    found, _ = calibrated_on_device(logits, calibration_of(bases=1.0))
    assert np.argwhere(np.isnan(found)).tolist() == [[2, 1]]


def test_devices_choose_alike_in_every_run() -> None:
    """Seeded sampling repeats with dynamic verification on."""
    first, second = speculated(), speculated()
    assert_equal(first)
    for one, other in zip(first.outputs, second.outputs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    "verification", [pytest.param("rejection"), pytest.param("block", marks=pytest.mark.slow)]
)
def test_other_verification_is_exact_where_nothing_is_drawn(verification: str) -> None:
    params = [replace(one, temperature=0.0) for one in PARAMS]
    expected = speculated(verification="coupled", params=params, choices=lambda step: NO_DRAFT)
    run = speculated(verification=verification, params=params)
    assert run.tokens == expected.tokens
    assert accepted(run) > 20
    np.testing.assert_allclose(
        np.concatenate([np.ravel(one) for one in run.logprobs]),
        np.concatenate([np.ravel(one) for one in expected.logprobs]),
        rtol=0, atol=1e-5,
    )  # fmt: skip


@pytest.mark.slow
def test_branches_of_a_step_without_tiles_agree() -> None:
    """Without batch invariance budgets are branches, and the uniform block one; sums may round otherwise."""
    numerics = replace(FLOAT32, batch_invariant=False)
    for choice in (NOTHING, NO_DRAFT, 2, 3):
        choose = lambda step, choice=choice: choice  # noqa: E731
        run = speculated(choices=choose, numerics=numerics, costs=FEW_COSTS, budgets=(8, 24))
        assert run.tokens == plain(numerics).tokens


@pytest.mark.slow
@pytest.mark.parametrize("choice", [NOTHING, NO_DRAFT, 1])
def test_a_step_without_budgets_verifies_all_drafts_or_none(choice: int) -> None:
    numerics = replace(FLOAT32, batch_invariant=False)
    costs = StepCosts(COSTS.draft_ms, COSTS.verify_ms[:1], COSTS.plain_ms)
    run = speculated("fixed", choices=lambda step: choice, numerics=numerics, costs=costs, budgets=())
    assert run.tokens == plain(numerics).tokens
    verified = sum(int(one.drafts.num_verified.sum()) for one in run.outputs if one.drafts is not None)
    assert (verified == 0) == (choice == NO_DRAFT)


@pytest.mark.slow
def test_seeded_tokens_are_those_of_plain_decoding_in_the_released_numerics() -> None:
    for choice in (NOTHING, 2):
        assert_equal(speculated(choices=lambda step, choice=choice: choice, numerics=OFFICIAL), OFFICIAL)
