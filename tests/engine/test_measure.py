"""Measured step times: what is timed, what the table holds, when it is found and when it is refused.

Separate because nothing here generates; times are never compared with a clock.
Read next: `test_start.py` (who looks for a table), `../spec_decode/test_costs.py` (the table alone).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, Model, RequestError, SamplingParams, measure_costs
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.measure import STEPS_TOGETHER, find_costs, identify, rising
from deepinfer_jax.engine.runner import Outputs, Runner
from deepinfer_jax.engine.target import make_target, put_on
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL
from deepinfer_jax.plans import PLAIN_STEP, StepPlan
from deepinfer_jax.sharding.layout import SINGLE
from deepinfer_jax.spec_decode.costs import CostTable, default_path
from deepinfer_jax.speculate import speculate_step
from deepinfer_jax.testing.presets import SMALLEST, SMALLEST_DRAFTED, random_weights

OPTIONS = EngineConfig(num_slots=8, max_context=512)
BLOCK = SMALLEST_DRAFTED.draft.block_size


@pytest.fixture(autouse=True)
def kept_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tables in a folder of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@cache
def model() -> Model:
    return Model(SMALLEST_DRAFTED, random_weights(SMALLEST_DRAFTED, jax.random.key(4)), FLOAT32, None)


def table_of(options: EngineConfig = OPTIONS, date: str | None = None, **changes: Any) -> CostTable:
    """Write a table by hand, as if it had been measured today."""
    measured = cached_table()
    engine = replace(identify(model(), options), **changes)
    return replace(measured, engine=engine, date=date or measured.date)


@cache
def cached_table() -> CostTable:
    return measure_costs(model(), OPTIONS, steps=2)


def test_a_table_has_the_budgets_of_the_engine_and_times_that_rise() -> None:
    table = cached_table()
    assert table.engine == identify(model(), OPTIONS)
    assert list(table.verify_ms) == [64] and list(table.draft_ms) == [1, 8]
    assert list(table.plain_ms) == [1, 8]
    draft_ms, verify_ms, plain_ms = table.arrays((64,), 8)
    assert (np.diff(draft_ms) >= 0).all() and (verify_ms > 0).all()
    assert (np.diff(plain_ms) >= 0).all() and (plain_ms > 0).all()
    assert (np.diff(table.row_ms(48)) >= 0).all()


def test_every_step_verifies_what_it_is_timed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and rows of each step are those of its case, a few in a row from the same lengths."""
    seen: list[tuple[int, int, int]] = []
    read, run, lengths = Runner.read, Runner.run, []

    def noted(self: Runner, outputs: Outputs) -> Outputs:
        found = read(self, outputs)
        assert found.decode is not None
        drafts, num_active = found.decode.drafts, int((found.decode.num_tokens > 0).sum())
        if drafts is None:
            seen.append((PLAIN_STEP, num_active, num_active))
        else:
            seen.append((int(drafts.choice[0]), int((drafts.num_rows > 0).sum()), int(drafts.num_rows.sum())))
        return found

    def spied(self: Runner, plan: StepPlan) -> Outputs:
        if plan.is_decoding is not None:
            lengths.append(np.asarray(self.state.lengths).tolist())
        return run(self, plan)

    monkeypatch.setattr(Runner, "read", noted)
    monkeypatch.setattr(Runner, "run", spied)
    told: list[tuple[int, int]] = []
    before = measure_costs(model(), OPTIONS, 1, lambda *steps: told.append(steps), context=200)
    full = 8 * (BLOCK + 1)
    # Plain, no draft and the smallest budget, with one slot and with all; the uniform block with all.
    expected = [(PLAIN_STEP, 1, 1), (PLAIN_STEP, 8, 8), (0, 1, 1), (0, 8, 8)]
    expected += [(1, 1, BLOCK + 1), (1, 8, full), (2, 8, full)]
    together = 1 + STEPS_TOGETHER
    assert seen == [case for case in expected for _ in range(together)] * 2
    assert lengths[::together] == [[200] * 8] * 14
    assert told == [(number + 1, 14) for number in range(14)]
    assert before.engine == cached_table().engine


def test_measuring_compiles_the_program_that_requests_need() -> None:
    table = cached_table()
    before = speculate_step._cache_size()
    measure_costs(model(), replace(OPTIONS, drafts="threshold", max_drafts=2, overlap=0), steps=1)
    options = replace(OPTIONS, drafts="dynamic")
    engine = Engine(model().weights, SMALLEST_DRAFTED, FLOAT32, options, costs=table)
    request = engine.submit([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.has_work:
        engine.step()
    engine.close()
    assert len(request.token_ids) == 9
    assert speculate_step._cache_size() == before


@pytest.mark.slow
def test_fewer_pages_than_slots_can_fill_are_shared() -> None:
    table = measure_costs(model(), replace(OPTIONS, num_pages=3), steps=1)
    assert table.engine == cached_table().engine


@pytest.mark.slow
def test_without_tiles_every_budget_is_timed() -> None:
    other = replace(model(), numerics=replace(FLOAT32, batch_invariant=False))
    table = measure_costs(other, OPTIONS, steps=1)
    assert table.engine.row_tile is None
    assert list(table.verify_ms) == [1, 8, 12, 16, 24, 32, 48]
    assert (np.diff(list(table.verify_ms.values())) >= 0).all()


@pytest.mark.slow
def test_devices_with_slots_of_their_own_are_timed_together() -> None:
    target = make_target(SMALLEST_DRAFTED, "2", "data")
    weights = put_on(model().weights, SMALLEST_DRAFTED, target)
    table = measure_costs(replace(model(), weights=weights, target=target), EngineConfig(num_slots=1), 1)
    assert (table.engine.device, table.engine.layout) == ("cpu x 2", "data on data=2")
    assert (table.engine.num_slots, table.engine.row_tile) == (1, None)
    assert list(table.verify_ms) == [1, 2, 3, 4, 6] and list(table.draft_ms) == [1]


def test_a_table_that_is_kept_is_found_by_the_next_engine() -> None:
    assert find_costs(model(), OPTIONS) == (
        None,
        "no step times were measured for this engine; measure them once",
    )
    table = measure_costs(model(), OPTIONS, steps=1, keep=True)
    for drafts in ("off", "dynamic", "early_stop"):
        assert find_costs(model(), replace(OPTIONS, drafts=drafts)) == (table, None)


def test_a_table_of_other_sizes_or_arithmetic_is_not_found() -> None:
    table = table_of()
    table.save(default_path(table.engine))
    others = [
        (model(), replace(OPTIONS, num_slots=16)),
        (model(), replace(OPTIONS, max_context=1024)),
        (model(), replace(OPTIONS, verification="rejection")),
        (replace(model(), name="another"), OPTIONS),
        (replace(model(), numerics=OFFICIAL), OPTIONS),
        (replace(model(), numerics=replace(FLOAT32, cache_format="fp8")), OPTIONS),
        (replace(model(), numerics=replace(FLOAT32, batch_invariant=False)), OPTIONS),
        (replace(model(), numerics=replace(FLOAT32, implementation="reference")), OPTIONS),
    ]
    for other, options in others:
        assert find_costs(other, options)[0] is None
    # As many pages: the same engine.
    assert find_costs(model(), replace(OPTIONS, max_context=400))[0] == table


def test_a_mesh_is_part_of_what_was_measured() -> None:
    on_mesh = partial(identify, options=OPTIONS)
    engines = set()
    for shape, names in (((8,), ("data",)), ((2, 4), ("data", "model")), ((4, 2), ("data", "model"))):
        mesh = jax.make_mesh(shape, names)
        layout = replace(SINGLE, name="data")
        target = model().target._replace(mesh=mesh, layout=layout)
        engines.add(on_mesh(replace(model(), target=target)))
    assert len(engines) == 3
    assert {one.device for one in engines} == {"cpu x 8"}
    assert "data on data=2,model=4" in {one.layout for one in engines}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"jax_version": "0.0.1"}, "jax_version '0.0.1' instead of '"),
        ({"date": "2020-02-02"}, "date 2020-02-02"),
    ],
    ids=["another JAX", "long ago"],
)
def test_a_stale_table_is_refused_with_the_reason(changes: dict[str, str], reason: str) -> None:
    table = table_of(**changes)
    table.save(default_path(table.engine))
    found, why = find_costs(model(), OPTIONS)
    assert found is None and why is not None
    assert why.startswith("the cost table was measured with ") and reason in why
    assert why.endswith("; measure the step times again")


def test_a_damaged_table_is_refused_with_the_reason() -> None:
    path = default_path(identify(model(), OPTIONS))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found, why = find_costs(model(), OPTIONS)
    assert found is None and why is not None and "expected a cost table; measure" in why
    # Nor does it hide what is missing from another engine.
    assert find_costs(model(), replace(OPTIONS, num_slots=16))[1] == (
        "no step times were measured for this engine; measure them once"
    )


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"steps": 0}, "costs: got 0 steps on mesh None, expected 1 or more"),
        ({"context": 0}, "context: got 0, expected 1..494"),
        ({"context": 495}, "context: got 495, expected 1..494"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, int], parts: str) -> None:
    with pytest.raises(RequestError, match=parts):
        measure_costs(model(), OPTIONS, **options)


def test_a_model_without_draft_stages_has_nothing_to_measure() -> None:
    plain = replace(model(), config=SMALLEST)
    with pytest.raises(RequestError, match="costs: got a model without draft stages"):
        measure_costs(plain, OPTIONS)
    with pytest.raises(RequestError, match="drafts: got 'dynamic', expected 'off'"):
        identify(plain, OPTIONS)


def test_times_that_fall_are_averaged_and_nothing_else_changes() -> None:
    assert rising({8: 2.0, 1: 1.0, 16: 3.0}) == {1: 1.0, 8: 2.0, 16: 3.0}
    assert rising({1: 8.0, 8: 5.0, 16: 5.0, 24: 9.0}) == {1: 6.0, 8: 6.0, 16: 6.0, 24: 9.0}
    assert rising({1: 1.0, 8: 4.0, 16: 2.0, 24: 0.5}) == pytest.approx(
        {1: 1.0, 8: 6.5 / 3, 16: 6.5 / 3, 24: 6.5 / 3}
    )
