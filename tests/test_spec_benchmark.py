"""The arithmetic of the benchmark of drafts: forced acceptance, cost table, intervals, tables of results.

Separate because benchmarks are scripts, outside of the package; one test runs a step of a tiny model.
Read next: `benchmarks/spec.py`, `benchmarks/spec_bench.py`, `benchmarks/spec_models.py`.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.checkpoint.names import tensor_table
from deepinfer_jax.plans import PLAIN_STEP
from deepinfer_jax.spec_decode.costs import MeasuredEngine
from deepinfer_jax.spec_decode.draft import Anchors

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("generate", "step", "spec", "spec_bench", "spec_models", "spec_report")
ENGINE = MeasuredEngine("cpu", "0", "test", "float32", 64, 2, 5, 64)


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """Import the scripts as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        modules = {name: importlib.import_module(name) for name in NAMES}
        yield SimpleNamespace(**modules)
    for name in NAMES:
        sys.modules.pop(name, None)


def test_chances_add_up_to_the_public_curve(benchmark: Any) -> None:
    curve = benchmark.spec_models.PUBLIC_CURVE
    chances = benchmark.spec_models.conditional_chances(curve)
    assert 1 + np.cumsum(np.cumprod(chances)) == pytest.approx(curve)
    assert chances[0] == pytest.approx(0.88) and chances[1] == pytest.approx(0.74 / 0.88)


@pytest.mark.parametrize("num_verified", [0, 1, 3, 5])
def test_forced_lengths_have_the_mean_of_the_curve(benchmark: Any, num_verified: int) -> None:
    count, curve = 20_000, benchmark.spec_models.PUBLIC_CURVE
    anchors = Anchors(jnp.zeros(count, jnp.int32), jnp.arange(count, dtype=jnp.int32), jnp.ones(count, bool))
    seeds = jnp.ones((count, 2), jnp.uint32)
    chances = benchmark.spec_models.conditional_chances(curve)
    lengths = jnp.full(count, num_verified, jnp.int32)
    found = np.asarray(benchmark.spec_models.drawn_lengths(anchors, seeds, lengths, chances))
    assert found.max() == num_verified
    # Neighbouring positions share draws, so their rounds are not independent: 5 deviations of a fifth.
    limit = 5 * 2.0 / np.sqrt(count / 5)
    assert 1 + found.mean() == pytest.approx((1.0, *curve)[num_verified], abs=limit)


def test_the_cut_model_has_three_stages_of_released_sizes(benchmark: Any) -> None:
    config = benchmark.spec_models.released_draft_cut()
    assert (config.draft.num_stages, config.draft.block_size, config.draft.markov_rank) == (3, 5, 256)
    assert not set(config.draft.target_layer_ids) & set(config.engram_layer_ids)
    names = tensor_table(config)
    assert "mtp.2.ffn.experts.127.w1.weight" in names and "mtp.0.main_proj.weight" in names


def test_a_cost_table_takes_drafting_out_of_the_steps_that_drafted(benchmark: Any) -> None:
    step_ms = {PLAIN_STEP: 9.0, 0: 10.0, 1: 13.0, 3: 17.0, 4: 18.0}
    table = benchmark.spec_bench.cost_table(step_ms, (64, 128, 192), 16, ENGINE)
    assert (dict(table.draft_ms), dict(table.verify_ms)) == ({16: 3.0}, {64: 10.0, 192: 14.0})
    assert table.uniform_ms == 15.0 and dict(table.plain_ms) == {16: 9.0}


def test_noise_makes_no_number_of_rows_faster_than_the_fewest(benchmark: Any) -> None:
    step_ms = {PLAIN_STEP: 9.0, 0: 10.0, 1: 30.0, 2: 12.0, 3: 9.0}
    table = benchmark.spec_bench.cost_table(step_ms, (64, 128), 16, ENGINE)
    assert dict(table.verify_ms) == {64: 10.0, 128: 10.0} and table.uniform_ms == 10.0


def test_dynamic_is_compared_with_the_better_arm_round_by_round(benchmark: Any) -> None:
    rates = {"none": [100.0, 50.0, 102.0], "fixed": [90.0, 45.0, 80.0], "dynamic": [110.0, 55.0, 102.0]}
    found = benchmark.spec.against_best(rates)
    assert found["best"] == "none" and found["value"] == 1.1 and found["ratios"] == [1.1, 1.1, 1.0]
    assert found["interval"] == [1.0, 1.1]


def test_the_interval_of_a_median_narrows_with_rounds_and_holds_it(benchmark: Any) -> None:
    random = np.random.default_rng(0)
    few, many = (benchmark.spec.median_interval(random.normal(1, 0.05, count)) for count in (10, 400))
    assert few[0] < 1 < few[1] and many[0] < 1 < many[1]
    assert many[1] - many[0] < 0.3 * (few[1] - few[0])


def test_tokens_differ_where_both_arms_have_some(benchmark: Any) -> None:
    first, second = [[1, 2, 3], [4]], [[1, 9], [5, 6, 7]]
    assert benchmark.spec.count_differences(first, second) == 2
    assert benchmark.spec.count_differences(first, [[1, 2, 3, 8], []]) == 0


def test_a_step_that_gives_nothing_ends_the_segment(benchmark: Any) -> None:
    output = SimpleNamespace(tokens=jnp.zeros((), jnp.int32), num_tokens=np.zeros(3, np.int32))
    with pytest.raises(RuntimeError, match="got a step without tokens"):
        benchmark.spec_bench.run_segment(lambda state: (state, output), jnp.zeros((), jnp.int32), 7)


def test_a_segment_counts_all_of_its_tokens_and_runs_one_step_ahead(benchmark: Any) -> None:
    def step(state: jax.Array) -> tuple[jax.Array, Any]:
        return state + 1, SimpleNamespace(tokens=state, num_tokens=np.asarray([2, 1, 0]))

    segment = benchmark.spec_bench.run_segment(step, jnp.zeros((), jnp.int32), 7)
    assert int(segment.state) == len(segment.outputs) == 4 and segment.num_tokens == 12


@pytest.mark.parametrize("words", [["--dispatch"], ["--dispatch", "--model", "cut"]])
def test_dispatch_is_refused_without_a_gpu(benchmark: Any, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="got a cpu device, expected a GPU"):
        benchmark.step.main(["--spec", *words])


def line(arm: str, value: float, date: str = "2026-11-30T10:00:00", **more: Any) -> dict[str, Any]:
    common = {"device": "Test 9", "model": "cut", "acceptance": "synthetic", "concurrency": 16, "arm": arm}
    drafted = {"tau": 4.07, "rows": 5.1, "choices": {"64 rows": 0.75, "no draft": 0.25}}
    about = {"date": date, "jax": "0.11.2", "commit": "0123456789ab", "command": "python step.py --spec"}
    return {**common, **drafted, **about, "value": value, **more}


def test_the_report_keeps_the_latest_run_and_says_synthetic_in_every_row(
    benchmark: Any, tmp_path: Path
) -> None:
    ratio = {"interval": [0.99, 1.05], "best": "fixed"}
    lines = [
        line("none", 999.0),
        line("none", 100.0),
        line("fixed", 200.0),
        line("dynamic", 204.0),
        line("ratio", 1.02, **ratio),
        line("none", 5.0, concurrency=64),
    ]
    (tmp_path / "test_9.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    text = benchmark.spec_report.report(tmp_path, tmp_path)
    rows = [row for row in text.splitlines() if row.startswith("| 16") or row.startswith("| 64")]
    assert len(rows) == 1 and "999" not in text
    assert "| 16 | synthetic | 100.0 | 200.0 | 204.0 | 1.020 (0.990 to 1.050)" in rows[0]
    assert "64 rows 75 %, no draft 25 %" in rows[0]
    (plot,) = tmp_path.glob("*.svg")
    assert plot.name == "draft_speed_cut_synthetic_test_9.svg" and plot.name in text
    first = plot.read_bytes()
    benchmark.spec_report.report(tmp_path, tmp_path)
    assert plot.read_bytes() == first


@pytest.mark.slow
def test_all_arms_run_and_give_the_same_tokens(benchmark: Any, tmp_path: Path) -> None:
    short = ["--pairs", "2", "--tokens", "8", "--cost-repeats", "1", "--results", str(tmp_path)]
    benchmark.step.main(["--spec", "--model", "smallest", "--concurrency", "4", *short])
    benchmark.step.main(["--spec", "--model", "smallest", "--synthetic", "--concurrency", "4", *short])
    (path,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    differing = [one["tokens_differing"] for one in lines if "tokens_differing" in one]
    assert differing == [0]
    (costs,) = [one for one in lines if one["arm"] == "costs" and one["acceptance"] == "real"]
    assert costs["value"] >= 0 and set(costs["verify_ms"]) == {"64"}
    taus = {(one["acceptance"], one["arm"]): one["tau"] for one in lines if "tau" in one}
    assert len(taus) == 4 and 3 < taus["synthetic", "fixed"] < 5


def test_nothing_begins_once_the_time_is_over(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--spec", "--model", "smallest", "--concurrency", "4", "--stop-after", "0"]
    benchmark.step.main([*words, "--results", str(tmp_path)])
    assert "4: not measured, 0 s are over" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_steps_are_told_what_to_verify_and_their_dispatch_is_timed(benchmark: Any) -> None:
    """The CPU has no command buffers, but goes the same way."""
    model = benchmark.spec_models.make_model("smallest", is_forced=False)
    bench = benchmark.spec_bench.Bench(model, 4, 8)
    bench.measure_costs(repeats=1)
    for choice, num_rows in ((0, 1), (1, 6)):
        _, output = bench.step("dynamic", choice)(benchmark.spec_bench.copied(bench.states["fixed"]))
        assert np.asarray(output.drafts.num_rows)[:4].tolist() == [num_rows] * 4
    lines = bench.measure_dispatch(steps=2)
    assert [one["name"].split(", ", 1)[1] for one in lines] == [
        f"{name}, {label}"
        for name in ("none", "fixed")
        for label in ("no options", "no clock", "as an engine")
    ]
    assert all(0 < one["value"] <= one["step_ms"] for one in lines)
