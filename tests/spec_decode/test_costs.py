"""Times are read off a table as the schedule pays them, and a table that is not its engine's is refused.

Separate as it needs no device: the measurements are made up.
Read next: `deepinfer_jax/spec_decode/costs.py`, `guard.py`.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.spec_decode.costs import (
    CostTable,
    CostTableError,
    MeasuredEngine,
    budgets_for,
    default_path,
)
from deepinfer_jax.spec_decode.guard import MIN_STEPS, Guard
from deepinfer_jax.testing.tolerances import assert_close

DAY = datetime.date(2026, 11, 30)
ENGINE = MeasuredEngine(
    device="NVIDIA H200",
    jax_version="0.11.2",
    model="nano",
    numerics="official",
    num_slots=64,
    pages_per_slot=16,
    block_size=5,
    row_tile=64,
)
TILED = CostTable(
    ENGINE,
    DAY.isoformat(),
    verify_ms={64: 10.0, 192: 14.0, 128: 11.0, 256: 13.5},
    draft_ms={1: 1.0, 33: 3.0},
    uniform_ms=20.0,
)
COMPILED = replace(TILED, engine=replace(ENGINE, num_slots=4, row_tile=None), verify_ms={4: 2.0, 8: 4.0})


def test_tiles_make_a_staircase() -> None:
    times = TILED.row_ms(384)
    assert times.dtype == np.float32 and times.shape == (385,)
    assert times[[0, 1, 64]].tolist() == [10.0] * 3
    assert times[[65, 128, 129, 192]].tolist() == [11.0, 11.0, 14.0, 14.0]
    # 256 rows were measured faster than 192, and beyond it goes on with the last slope, here none.
    assert times[[193, 256, 384]].tolist() == [14.0] * 3
    assert set(np.flatnonzero(np.diff(times)) % 64) == {0}


def test_times_never_fall() -> None:
    random = np.random.default_rng(0)
    points = dict(zip(range(64, 64 * 25, 64), random.uniform(1, 9, 24).tolist(), strict=True))
    table = replace(TILED, verify_ms=points)
    assert (np.diff(table.row_ms(64 * 30)) >= 0).all()
    assert (table.row_ms(64 * 24)[list(points)] >= np.asarray(list(points.values()), np.float32)).all()


def test_candidates_get_their_times() -> None:
    draft, verify, plain = TILED.arrays((64, 100, 320), num_slots=64)
    assert {array.dtype.type for array in (draft, verify, plain)} == {np.float32}
    assert verify.tolist() == [10.0, 11.0, 14.0, 20.0]
    # Linear between 1 and 33 slots and with that slope beyond; nobody running counts as one.
    assert draft.shape == (65,)
    assert draft[[0, 1, 17, 33, 64]].tolist() == [1.0, 1.0, 2.0, 3.0, 3.0 + 31 / 16]
    # Plain steps that were not timed take what verifying as many rows does.
    assert plain.tolist() == [10.0] * 65
    measured = replace(TILED, plain_ms={1: 2.0, 3: 4.0}).arrays((64,), num_slots=4)[2]
    assert measured.tolist() == [2.0, 2.0, 3.0, 4.0, 5.0]


def test_compiled_budgets_pay_for_their_padding() -> None:
    assert COMPILED.row_ms(10).tolist() == [2.0] * 5 + [4.0] * 4 + [4.5, 5.0]
    # A budget between two measured ones is a program of its own.
    assert COMPILED.arrays((4, 6, 8), num_slots=4)[1].tolist() == [2.0, 3.0, 4.0, 20.0]


def test_single_point_is_a_flat_table() -> None:
    table = replace(TILED, verify_ms={64: 7.0}, draft_ms={8: 0.0})
    assert set(table.row_ms(1000).tolist()) == {7.0}
    assert not table.arrays((64,), num_slots=64)[0].any()


@pytest.mark.parametrize(
    ("num_slots", "block_size", "row_tile", "expected"),
    [
        (1, 5, 64, (64,)),
        (10, 5, 64, (64,)),
        (11, 5, 64, (64, 128)),
        (32, 5, 64, (64, 128, 192)),
        (1, 5, None, (1, 2, 3, 4, 6)),
        (8, 5, None, (8, 12, 16, 24, 32, 48)),
        (3, 3, None, (3, 5, 6, 9, 12)),
        (4, 1, None, (4, 6, 8)),
    ],
)
def test_budgets(num_slots: int, block_size: int, row_tile: int | None, expected: tuple[int, ...]) -> None:
    assert budgets_for(num_slots, block_size, row_tile) == expected


@pytest.mark.parametrize("row_tile", [None, 8, 64])
def test_budgets_end_with_the_full_block(row_tile: int | None) -> None:
    for num_slots in (1, 3, 16, 60, 256):
        for block_size in (1, 3, 5):
            budgets, full = budgets_for(num_slots, block_size, row_tile), num_slots * (block_size + 1)
            assert list(budgets) == sorted(set(budgets))
            assert full <= budgets[-1] < full + (row_tile or 1)
            # Every slot's anchor has a row in each compiled budget.
            assert row_tile is not None or budgets[0] == num_slots


def test_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    TILED.save(path)
    assert CostTable.load(path) == TILED
    assert [file.name for file in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "a note"}, "format"),
        ({"version": 1}, "format"),
        ({"verify_ms": {}}, "verify_ms: got {}"),
        ({"verify_ms": {"64": -1.0}}, "verify_ms"),
        ({"verify_ms": {"64": 0.0}}, "positive for a step"),
        ({"verify_ms": {"many": 1.0}}, "many"),
        ({"draft_ms": {"0": 1.0}}, "draft_ms"),
        ({"draft_ms": [1.0]}, "items"),
        ({"uniform_ms": None}, "uniform_ms"),
        ({"plain_ms": {"1": 0.0}}, "positive for a step"),
        ({"date": "yesterday"}, "date"),
        ({"engine": {"device": "cpu"}}, "missing"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "table.json"
    TILED.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CostTableError, match=message):
        CostTable.load(path)


@pytest.mark.parametrize("text", ["no json", "[]", "{}"])
def test_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match="expected a cost table"):
        CostTable.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA B200"},
        {"jax_version": "0.12.0"},
        {"model": "other"},
        {"numerics": "float32"},
        {"num_slots": 32},
        {"pages_per_slot": 8},
        {"block_size": 3},
        {"row_tile": None},
        {"layout": "data+expert"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_table_of_another_engine_is_stale(change) -> None:
    reason = TILED.check(replace(ENGINE, **change), DAY)
    name, value = next(iter(change.items()))
    assert reason is not None
    assert f"{name} {getattr(ENGINE, name)!r} instead of {value!r}" in reason
    assert "measure the step times again" in reason


@pytest.mark.parametrize(("days", "is_stale"), [(-2, True), (-1, False), (0, False), (30, False), (31, True)])
def test_age_makes_a_table_stale(days: int, is_stale: bool) -> None:
    reason = TILED.check(ENGINE, DAY + datetime.timedelta(days))
    assert (reason is not None) == is_stale
    if reason is not None:
        assert f"{days} days ago" in reason


def test_path_follows_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path(ENGINE)
    assert path.parent == tmp_path / "deepinfer_jax" / "costs"
    assert path.name.startswith("nvidia-h200-nano-64-slots-")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert default_path(ENGINE) == tmp_path / "home" / ".cache" / "deepinfer_jax" / "costs" / path.name
    others = [
        replace(ENGINE, **change)
        for change in ({"row_tile": None}, {"numerics": "float32"}, {"model": "a/b"})
    ]
    assert len({default_path(engine).name for engine in [ENGINE, *others]}) == 4
    assert "/" not in others[-1].key()


@pytest.mark.parametrize("factor", [1.4, 0.6])
def test_guard_trips_on_a_wrong_table(factor: float) -> None:
    guard = Guard()
    tripped = [guard.observe("128 rows", 10.0, 10.0 * factor) for _ in range(MIN_STEPS + 5)]
    assert tripped == [False] * (MIN_STEPS - 1) + [True] + [False] * 5
    assert guard.is_tripped
    assert f"'128 rows' took {factor:.2f} times" in guard.reason
    guard.reset()
    assert not guard.is_tripped and guard.reason == ""


def test_guard_bears_noise_and_pauses() -> None:
    guard, random = Guard(), np.random.default_rng(0)
    for step in range(500):
        # A compilation first, and a pause of the host now and then.
        factor = 1000.0 if step % 50 == 0 else random.uniform(0.8, 1.25)
        guard.observe(1, 10.0, 10.0 * factor)
    assert not guard.is_tripped, guard.reason


def test_guard_judges_kinds_apart() -> None:
    guard = Guard()
    for _ in range(MIN_STEPS - 1):
        guard.observe(0, 10.0, 20.0)
        guard.observe(1, 10.0, 10.0)
    assert not guard.is_tripped
    assert not guard.observe(1, 10.0, 10.0)
    assert guard.observe(0, 10.0, 20.0)
    assert "kind 0" in guard.reason


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_guard_refuses_what_is_no_time(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="guard: got"):
        Guard().observe(0, *times)


def test_compiled_last_size_extrapolates() -> None:
    assert_close(COMPILED.row_ms(16)[[12, 16]], [6.0, 8.0], "formula_float64")
