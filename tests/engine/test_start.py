"""The engine of a loaded model: its calibration, its step times, and what is said where these are missing.

Separate from `test_llm_drafts.py`, which runs a model: here the devices are fake.
Read next: `deepinfer_jax/engine/start.py`, `test_measure.py`.
"""

from __future__ import annotations

import datetime
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from deepinfer_jax import LLM, EngineConfig, Model, RequestError
from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.engine.measure import identify
from deepinfer_jax.engine.start import engine_for, measuring_command
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL
from deepinfer_jax.sharding.place import mesh_shape
from deepinfer_jax.sharding.presets import PRESETS
from deepinfer_jax.spec_decode.calibration import REGIMES, Calibration
from deepinfer_jax.spec_decode.costs import CostTable, default_path
from deepinfer_jax.step import Target
from deepinfer_jax.testing.presets import SMALLEST, SMALLEST_DRAFTED

pytestmark = pytest.mark.usefixtures("fake_devices")

SIZES = EngineConfig(num_slots=8, max_context=512)
NANO = Model(SMALLEST_DRAFTED, None, OFFICIAL, None, folder=NANO_FOLDER)  # pyright: ignore[reportArgumentType]
BUILT = replace(NANO, folder=None)

MISSING = "no step times were measured for this engine; measure them once"
COMMAND = "deepinfer_jax costs --slots 8 --max-context 512"


@pytest.fixture(autouse=True)
def kept_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tables in a folder of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def keep_table(**changes: str) -> CostTable:
    engine = replace(identify(NANO, SIZES), **changes)  # pyright: ignore[reportArgumentType]
    today = datetime.date.today().isoformat()
    table = CostTable(engine, today, {64: 1.0}, {1: 0.1, 8: 0.2}, uniform_ms=1.5)
    table.save(default_path(engine))
    return table


@pytest.mark.parametrize("drafts", ["dynamic", "early_stop"])
def test_missing_times_are_said_with_the_reason_and_the_command(drafts: str) -> None:
    expected = f"drafts='{drafts}': {MISSING} (run: {COMMAND}); until then all drafts are verified"
    with pytest.warns(RuntimeWarning) as warned:
        llm = LLM(NANO, options=replace(SIZES, drafts=drafts))
    assert [str(one.message) for one in warned] == [expected]
    # The line that made the engine is the one to look at.
    assert warned[0].filename == __file__
    drafting = llm.engine.drafting
    assert drafting is not None and drafting.notice == expected
    assert llm.options.drafts == drafts and drafting.options.drafts == "fixed"


def test_stale_times_are_said_with_the_reason() -> None:
    keep_table(jax_version="0.0.1")
    with pytest.warns(RuntimeWarning, match=rf"jax_version '0.0.1' .*\(run: {COMMAND}\)"):
        engine_for(NANO, replace(SIZES, drafts="dynamic"))


def test_times_that_hold_are_used_in_silence() -> None:
    table = keep_table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafting = engine_for(NANO, replace(SIZES, drafts="dynamic")).drafting
    assert drafting is not None
    assert (drafting.costs, drafting.notice) == (table, None)
    assert drafting.options.drafts == "dynamic"


@pytest.mark.parametrize("drafts", ["off", "fixed", "threshold"])
def test_other_schedules_look_for_no_times(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_jax.engine.start.find_costs", lambda *_: pytest.fail("looked"))
    engine = engine_for(NANO, replace(SIZES, drafts=drafts))
    assert (engine.drafting is None) == (drafts == "off")


def test_the_calibration_of_the_model_is_used() -> None:
    calibration = Calibration({name: (1.0, 1.1, 1.2, 1.3, 1.4) for name in REGIMES})
    drafting = engine_for(replace(NANO, calibration=calibration), replace(SIZES, drafts="fixed")).drafting
    assert drafting is not None and drafting.calibration == calibration


def test_a_model_without_draft_stages_is_refused_with_the_word_that_was_given() -> None:
    for drafts in ("fixed", "dynamic"):
        with pytest.raises(RequestError, match=f"drafts: got '{drafts}', expected 'off'"):
            engine_for(replace(NANO, config=SMALLEST), replace(SIZES, drafts=drafts))


def test_the_command_names_all_that_is_not_usual() -> None:
    fp8 = replace(FLOAT32, cache_format="fp8", batch_invariant=False)
    model = replace(NANO, folder=Path("my models/one"), numerics=fp8)
    options = replace(SIZES, num_slots=16, max_context=None, verification="block", drafts="dynamic")
    assert measuring_command(model, options) == (
        "run: deepinfer_jax costs --model 'my models/one' --slots 16 --max-context 1024 --numerics float32 "
        "--cache-format fp8 --no-batch-invariant --verification block"
    )


def test_the_command_names_the_mesh() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = replace(NANO, target=Target(PRESETS["data"].on(mesh_shape(mesh)), mesh))
    found = measuring_command(model, replace(SIZES, num_slots=8, drafts="dynamic"))
    assert found is not None and found.endswith(" --mesh data=2,model=4 --layout data")


@pytest.mark.parametrize(
    "model",
    [
        BUILT,
        replace(NANO, numerics=replace(OFFICIAL, name="mine")),
        replace(NANO, numerics=replace(OFFICIAL, implementation="reference")),
    ],
    ids=["no folder", "other numerics", "named kernels"],
)
def test_what_no_command_loads_is_measured_by_a_call(model: Model) -> None:
    assert measuring_command(model, replace(SIZES, drafts="dynamic")) == (
        "run: deepinfer_jax.measure_costs(model, options, keep=True)"
    )
