"""Drafts on a mesh: all ranks verify one budget, and tokens are those of one device that drafts nothing.

Separate from `test_layouts.py` because steps with drafts have a branch for each budget on a mesh.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, LayoutError, SamplingParams
from deepinfer_jax.engine import drafting
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.target import make_target, num_slot_shares, put_on
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.spec_decode.costs import CostTable, MeasuredEngine
from deepinfer_jax.spec_decode.guard import Guard
from deepinfer_jax.testing.presets import DIVISIBLE_DRAFTED, random_weights

CONFIG = DIVISIBLE_DRAFTED
LIKELY = {7: 9.0, 30: 8.5, 55: 8.0}
REQUESTS = [
    (
        np.random.default_rng(number).integers(3, 120, 3 + 5 * number).tolist(),
        SamplingParams(
            max_tokens=10 + number, temperature=float(number % 3) / 2, seed=number, logit_bias=LIKELY
        ),
    )
    for number in range(10)
]
COSTS = CostTable(
    MeasuredEngine("cpu", jax.__version__, "test", "float32", 1, 1, CONFIG.draft.block_size, None),
    "2026-11-30",
    verify_ms={1: 1.0, 48: 2.0},
    draft_ms={1: 0.1},
    uniform_ms=2.1,
)


def run(
    mesh: str | None, layout: str | None, choices: np.ndarray | None = None, **options: Any
) -> list[Request]:
    target = make_target(CONFIG, mesh, layout)
    weights = put_on(random_weights(CONFIG, jax.random.key(8)), CONFIG, target)
    slots = 1 if num_slot_shares(target) > 1 else 8
    config = EngineConfig(num_slots=slots, max_context=128, max_rows=64, **options)
    engine = Engine(weights, CONFIG, FLOAT32, config, target=target, costs=COSTS)
    if engine.drafting is not None:
        # The step times here are made up.
        engine.drafting.guard = Guard(max_error=1e9)
        if choices is not None:
            left = iter(choices.tolist())
            engine.drafting.choice = lambda slots: next(left)
    requests = [engine.submit(prompt, params) for prompt, params in REQUESTS]
    while engine.has_work:
        engine.step()
    if engine.drafting is not None:
        assert engine.stats.draft.accepted > 5
    engine.close()
    return requests


@cache
def expected() -> list[list[int]]:
    return [request.token_ids for request in run(None, None)]


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("2x4", "data+expert"),
        ("8", "data"),
        ("8", "expert"),
        ("8", "weights-only"),
        ("8", "sequence"),
        ("8", "tensor"),
    ],
)
def test_tokens_are_those_of_one_device_without_drafts(
    monkeypatch: pytest.MonkeyPatch, mesh: str, layout: str
) -> None:
    # Two budgets instead of five, as each is compiled.
    monkeypatch.setattr(drafting, "budgets_for", lambda slots, *_: (slots, 2 * slots))
    tokens = [request.token_ids for request in run(mesh, layout, drafts="dynamic")]
    assert tokens == expected()
    # No draft, either budget, the uniform block, in any order; the same programs.
    choices = np.random.default_rng(1).integers(0, 4, 400)
    assert [request.token_ids for request in run(mesh, layout, choices, drafts="dynamic")] == expected()


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fixed", "threshold"])
def test_schedules_that_choose_no_budget_have_one_program_for_all_drafts(mode: str) -> None:
    assert [request.token_ids for request in run("2x4", "data+expert", drafts=mode)] == expected()


def test_draft_stages_that_do_not_divide_are_left_out_and_drafting_is_refused_by_name() -> None:
    config = replace(CONFIG, draft=replace(CONFIG.draft, n_routed_experts=6))
    target = make_target(config, "8", "expert")
    weights = put_on(random_weights(config, jax.random.key(8)), config, target)
    assert weights.draft is None
    options = EngineConfig(num_slots=8, max_context=128, drafts="fixed")
    with pytest.raises(LayoutError, match=r"stages\.ffn\.experts.*'experts' has 6"):
        Engine(weights, config, FLOAT32, options, target=target)
