"""An engine with drafts gives every request the tokens of an engine without, seeded sampling included.

Separate from `test_same_tokens.py` because the two engines compared here run different programs.
Read next: `../test_speculate.py` (the step alone, bit by bit), `test_drafted_tokens.py` (the host alone).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, SamplingParams
from deepinfer_jax.config import NOTHING
from deepinfer_jax.engine.drafting import Drafting, row_tile
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.request import Request
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.plans import BARE_STEP, DRAFT_MODES, PLAIN_STEP, PROBE
from deepinfer_jax.spec_decode.budgets import NO_DRAFT, StepCosts, budget_numerators, budget_thetas
from deepinfer_jax.spec_decode.calibrate import survivals_of
from deepinfer_jax.spec_decode.costs import CostTable, MeasuredEngine
from deepinfer_jax.spec_decode.guard import Guard
from deepinfer_jax.spec_decode.schedule import cap_survivals, survivals
from deepinfer_jax.speculate import speculate_step
from deepinfer_jax.step import ONE_DEVICE
from deepinfer_jax.testing.presets import SMALLEST_DRAFTED, random_weights

CONFIG = SMALLEST_DRAFTED
SIZES: dict[str, Any] = {"num_slots": 8, "max_context": 512}
PREFIX = np.random.default_rng(2).integers(3, 120, 140).tolist()


def costs(verify_ms: dict[int, float], draft_ms: dict[int, float]) -> CostTable:
    engine = MeasuredEngine("cpu", jax.__version__, "test", "float32", 8, 4, CONFIG.draft.block_size, 64)
    return CostTable(engine, "2026-11-30", verify_ms, draft_ms, uniform_ms=max(verify_ms.values()))


TOLERANT = Guard(max_error=1e9)
"""The step times here are made up; only what they are to each other counts."""

CHEAP = costs({1: 1.0, 64: 1.2}, {1: 0.1, 8: 0.2})


@cache
def weights() -> Weights:
    return random_weights(CONFIG, jax.random.key(4))


def random_request(number: int) -> tuple[list[int], SamplingParams]:
    """Draw a prompt and parameters; most concentrate on few tokens, so that drafts are accepted."""
    random = np.random.default_rng(number)
    own = random.integers(3, 120, int(random.integers(1, 30))).tolist()
    start = [0, 110, 130, 140][int(random.integers(4))]
    max_tokens = int(random.integers(1, 40))
    likely = {int(token): float(random.uniform(7, 10)) for token in random.integers(3, 120, 4)}
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=float(random.choice([0.0, 0.0, 0.6, 1.0, 1.4])),
        seed=int(random.integers(2**40)),
        top_k=int(random.choice([0, 0, 8])),
        top_p=float(random.choice([1.0, 0.9])),
        min_p=float(random.choice([0.0, 0.02])),
        repetition_penalty=float(random.choice([1.0, 1.2])),
        presence_penalty=float(random.choice([0.0, 0.5])),
        frequency_penalty=float(random.choice([0.0, 0.3])),
        min_tokens=min(int(random.choice([0, 6])), max_tokens),
        stop_token_ids=tuple(list(likely)[:2]) if random.random() < 0.4 else (),
        logit_bias=likely if random.random() < 0.85 else {},
        ignore_eos=bool(random.random() < 0.5),
        logprobs=3,
    )
    return PREFIX[:start] + own, params


def run(
    numbers: list[int],
    numerics: Numerics = FLOAT32,
    table: CostTable | None = CHEAP,
    choices: np.ndarray | None = None,
    guard: Guard = TOLERANT,
    **options: Any,
) -> tuple[list[Request], Engine]:
    """Run random requests in one engine; `choices` says how many rows each step verifies."""
    engine = Engine(weights(), CONFIG, numerics, EngineConfig(**SIZES, **options), costs=table)
    if engine.drafting is not None:
        engine.drafting.guard = guard
    if choices is not None:
        assert engine.drafting is not None
        left = iter(choices.tolist())
        engine.drafting.choice = lambda slots: next(left)
    try:
        requests = [engine.submit(*random_request(number)) for number in numbers]
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    return requests, engine


def results(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [(one.token_ids, one.finish_reason, one.stop_token, one.logprobs) for one in requests]


@cache
def plain(count: int, numerics: Numerics = FLOAT32) -> list[tuple[Any, ...]]:
    return results(run(list(range(count)), numerics)[0])


@pytest.mark.parametrize("drafts", DRAFT_MODES[1:])
@pytest.mark.parametrize(
    ("count", "numerics"),
    [
        (40, FLOAT32),
        pytest.param(500, FLOAT32, marks=pytest.mark.slow),
        pytest.param(200, OFFICIAL, marks=pytest.mark.slow),
    ],
    ids=["40", "500", "200-official"],
)
def test_bc33_bc34_random_requests_get_the_tokens_of_plain_decoding(
    drafts: str, count: int, numerics: Numerics
) -> None:
    requests, engine = run(list(range(count)), numerics, drafts=drafts, max_drafts=None)
    assert results(requests) == plain(count, numerics)
    summary = engine.stats.draft
    assert summary.accepted > count and summary.tokens > summary.rounds


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 0, "max_chunk": 33},
        {"max_drafts": 2, "token_budget": 70, "prefix_cache": False},
        {"num_pages": 6},
    ],
    ids=["waiting", "two drafts", "crowded"],
)
def test_budgets_of_every_size_in_any_company_change_nothing(options: dict[str, Any]) -> None:
    """Here a step verifies anything from no draft to all, whatever pays."""
    numbers = np.random.default_rng(7).permutation(40).tolist()
    choices = np.random.default_rng(8).integers(NO_DRAFT, 3, 4000)
    requests, engine = run(numbers, choices=choices, drafts="dynamic", **options)
    expected = plain(40)
    assert results(requests) == [expected[number] for number in numbers]
    assert engine.stats.draft.accepted > 0
    assert engine.stats.preemptions > 0 or "num_pages" not in options


def test_a_choice_on_the_host_changes_no_token() -> None:
    requests, engine = run(list(range(40)), drafts="dynamic", choose_on_host=True)
    assert results(requests) == plain(40)
    assert engine.stats.draft.accepted > 0


def test_where_no_draft_pays_steps_are_plain_and_drafts_are_tried_again() -> None:
    dear = costs({1: 1.0, 64: 1.2}, {1: 50.0, 8: 60.0})
    requests, engine = run(list(range(40)), table=dear, drafts="dynamic")
    assert results(requests) == plain(40)
    summary = engine.stats.draft
    assert summary.rounds and summary.choices["no draft"] > 0.8 * summary.steps
    assert engine.stats.decoder_rows > 0


@pytest.mark.slow
def test_steps_that_leave_drafts_nothing_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bare and plain steps between ones that draft, in any order: worse drafts at most."""
    random, told = np.random.default_rng(3), []

    def choice(self: Drafting, slots: list[int]) -> int:
        told.append(int(random.choice([NOTHING, PROBE, PLAIN_STEP, BARE_STEP, 1])))
        return told[-1]

    monkeypatch.setattr(Drafting, "choice", choice)
    requests, engine = run(list(range(40)), drafts="dynamic")
    assert results(requests) == plain(40)
    assert set(told) == {NOTHING, PROBE, PLAIN_STEP, BARE_STEP, 1}
    assert engine.stats.draft.accepted > 0


def test_the_host_weighs_as_the_devices_do() -> None:
    options = EngineConfig(**SIZES, drafts="dynamic", choose_on_host=True, max_drafts=4)
    control = Drafting(CONFIG, options, options.cache_sizes(CONFIG), FLOAT32, None, CHEAP)
    control.speculation = replace(control.speculation, budgets=(6, 8, 20))
    control._costs = step_costs = StepCosts(*CHEAP.arrays((6, 8, 20), 8))
    random = np.random.default_rng(3)
    logits, slots = random.normal(size=(8, CONFIG.draft.block_size)).astype(np.float32), [0, 2, 3, 4, 5, 6, 7]
    control._past = dict(enumerate(survivals_of(logits, np.ones(CONFIG.draft.block_size))))
    is_active = np.isin(np.arange(8), slots)
    capped = cap_survivals(survivals(jax.nn.sigmoid(logits)), np.full(8, 4, np.int32), is_active)
    numerators = budget_numerators(capped, jnp.asarray(is_active), (6, 8, 20))
    expected = budget_thetas(numerators, jnp.int32(7), StepCosts(*map(jnp.asarray, step_costs)))
    np.testing.assert_allclose(control.thetas(slots), np.asarray(expected), rtol=1e-5)
    assert np.isneginf(np.asarray(expected)[1])


@pytest.mark.parametrize("mode", DRAFT_MODES[1:])
def test_budgets_that_nothing_chooses_from_are_not_compiled(mode: str) -> None:
    options = EngineConfig(**SIZES, drafts=mode)
    sizes, branches = options.cache_sizes(CONFIG), replace(FLOAT32, batch_invariant=False)
    tiles = Drafting(CONFIG, options, sizes, FLOAT32, None, CHEAP)
    assert tiles.speculation.budgets == (64,)
    budgets = Drafting(CONFIG, options, sizes, branches, None, CHEAP).speculation.budgets
    assert bool(budgets) == (mode == "dynamic")


def test_without_measured_times_only_the_full_block_is_compiled() -> None:
    options, branches = EngineConfig(**SIZES, drafts="dynamic"), replace(FLOAT32, batch_invariant=False)
    with pytest.warns(RuntimeWarning, match="all drafts are verified"):
        control = Drafting(CONFIG, options, options.cache_sizes(CONFIG), branches)
    assert control.speculation.budgets == ()
    told = control.plan(np.ones(8, bool), NOTHING)
    assert (int(told.choice), told.costs.verify_ms.shape) == (control.speculation.uniform, (1,))


def test_more_drafts_than_a_block_has_are_a_block() -> None:
    requests, engine = run(list(range(12)), drafts="fixed", max_drafts=99)
    assert results(requests) == plain(40)[:12]
    assert engine.stats.draft.mean_verified <= CONFIG.draft.block_size


def test_bc39_without_measured_times_nothing_is_trimmed_and_that_is_said() -> None:
    with pytest.warns(
        RuntimeWarning, match="no measured step times for this engine; all drafts are verified"
    ):
        requests, engine = run(list(range(12)), table=None, drafts="dynamic")
    assert results(requests) == plain(40)[:12]
    assert engine.drafting is not None and engine.drafting.notice is not None
    assert set(engine.stats.draft.choices) == {"full block"}


def test_steps_that_take_much_longer_than_predicted_end_trimming() -> None:
    fast = costs({1: 1e-4, 64: 1.2e-4}, {1: 1e-5, 8: 2e-5})
    with pytest.warns(RuntimeWarning, match="the full block is verified from now on"):
        requests, _ = run(list(range(40)), table=fast, guard=Guard(), drafts="dynamic")
    assert results(requests) == plain(40)


def test_programs_are_compiled_once() -> None:
    run(list(range(8)), drafts="dynamic")
    before = speculate_step._cache_size()
    for drafts in DRAFT_MODES[1:]:
        run(list(range(8)), drafts=drafts, max_drafts=3, draft_threshold=0.3)
    assert speculate_step._cache_size() == before


def test_tiles_are_skipped_on_one_device_only() -> None:
    assert row_tile(FLOAT32, ONE_DEVICE) == 64
    assert row_tile(replace(FLOAT32, batch_invariant=False), ONE_DEVICE) is None
