"""The arithmetic of the load test: who arrives when, what counts as idle, what a reader waits for.

Separate because benchmarks are scripts, outside of the package; nothing here runs a model.
Read next: `benchmarks/load.py`.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SOURCE = list(range(1000))


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """Import the script, which finds its neighbour as it does when it is run."""
    specification = importlib.util.spec_from_file_location("load_benchmark", BENCHMARKS / "load.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        # A dataclass looks its own module up.
        patch.setitem(sys.modules, specification.name, module)
        specification.loader.exec_module(module)
    return module


def test_no_time_is_idle_while_a_step_is_in_flight(benchmark: ModuleType) -> None:
    assert benchmark.idle_share([0.0, 0.5, 1.5], [1.0, 2.0, 3.0]) == 0.0


def test_idle_time_is_the_gaps_between_done_and_dispatched(benchmark: ModuleType) -> None:
    # Gaps of 0.5 after the first step and of 1.5 after the second, in 5 seconds.
    assert benchmark.idle_share([0.0, 1.5, 4.0], [1.0, 2.5, 5.0]) == pytest.approx(2.0 / 5.0)


def test_a_step_that_was_seen_done_out_of_order_hides_no_work(benchmark: ModuleType) -> None:
    assert benchmark.idle_share([0.0, 1.0, 4.0], [3.0, 2.0, 5.0]) == pytest.approx(1.0 / 5.0)


def test_time_without_any_request_is_nobodys_fault(benchmark: ModuleType) -> None:
    dispatched, ready = [0.0, 11.0, 12.5], [1.0, 12.0, 13.0]
    assert benchmark.idle_share(dispatched, ready, 10.0) == pytest.approx(0.5 / 3.0)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_steps_have_nothing_between_them(benchmark: ModuleType, count: int) -> None:
    assert benchmark.idle_share([0.0] * count, [0.0] * count) == 0.0


def test_a_reader_waits_from_arrival_to_token_and_from_token_to_token(benchmark: ModuleType) -> None:
    seen = [benchmark.Seen(1.0, [1.5, 1.75, 2.25]), benchmark.Seen(2.0, [3.5])]
    found = benchmark.latencies(seen)
    assert found["time to first token, median"] == pytest.approx(1000.0)
    assert found["time between tokens, median"] == pytest.approx(375.0)
    assert found["time to first token, p95"] == pytest.approx(500 + 0.95 * 1000)


def test_requests_of_one_token_have_no_time_between_tokens(benchmark: ModuleType) -> None:
    assert benchmark.latencies([benchmark.Seen(0.0, [0.5])])["time between tokens, p95"] == 0.0


def test_requests_are_slices_of_the_source_within_the_limits(benchmark: ModuleType) -> None:
    planned = benchmark.plan_requests(SOURCE, 300, 10.0, seed=1)
    lengths = [len(one.token_ids) for one in planned]
    outputs = [one.params.max_tokens for one in planned]
    for found, limits in ((lengths, benchmark.PROMPT_TOKENS), (outputs, benchmark.OUTPUT_TOKENS)):
        assert limits[0] <= min(found) < max(found) <= limits[1]
        assert max(found) - min(found) > 0.8 * (limits[1] - limits[0])
    for one in planned:
        assert one.token_ids == SOURCE[one.token_ids[0] : one.token_ids[0] + len(one.token_ids)]
        assert one.params.ignore_eos


def test_requests_arrive_at_the_rate_from_the_start_on(benchmark: ModuleType) -> None:
    arrivals = [one.arrival for one in benchmark.plan_requests(SOURCE, 2000, 10.0, seed=2)]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    gaps = np.diff(arrivals)
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
    # Of an exponential distribution the deviation is the mean.
    assert np.std(gaps) == pytest.approx(0.1, rel=0.15)


def test_an_infinite_rate_is_all_at_once(benchmark: ModuleType) -> None:
    planned = benchmark.plan_requests(SOURCE, 20, math.inf, seed=3)
    assert {one.arrival for one in planned} == {0.0}


def test_a_seed_gives_the_same_requests_and_the_rate_changes_arrivals_only(benchmark: ModuleType) -> None:
    first, again, faster = (
        benchmark.plan_requests(SOURCE, 20, rate, seed=4) for rate in (10.0, 10.0, math.inf)
    )
    assert first == again != benchmark.plan_requests(SOURCE, 20, 10.0, seed=5)
    assert [(one.token_ids, one.params) for one in first] == [(one.token_ids, one.params) for one in faster]


def test_counters_are_subtracted_in_groups_too(benchmark: ModuleType) -> None:
    before = {"steps": 3, "prefix": {"hits": 1, "misses": {"new": 2}}}
    after = {"steps": 10, "prefix": {"hits": 4, "misses": {"new": 2, "short": 5}}}
    expected = {"steps": 7, "prefix": {"hits": 3, "misses": {"new": 0, "short": 5}}}
    assert benchmark.differences(before, after) == expected


def test_the_ratio_of_prefill_is_the_median_of_its_pairs(benchmark: ModuleType) -> None:
    seconds = {"exact": [1.0, 2.0, 4.0], "bounded": [0.5, 1.2, 1.6]}
    rows = {
        mode: {"encoder_rows": 8191, "decoder_rows": count}
        for mode, count in zip(seconds, (8191, 128), strict=True)
    }
    *modes, ratio = benchmark.prefill_results(seconds, rows, 8191)
    assert ratio["value"] == 0.5 and ratio["ratios"] == [0.5, 0.6, 0.4]
    assert [one["value"] for one in modes] == [2000.0, 1200.0]
    assert [one["decoder_rows"] for one in modes] == [8191, 128]


def test_numbers_have_their_units(benchmark: ModuleType) -> None:
    numbers = {"tokens/s": 1.23456, "device idle between steps": 4.0, "preemptions": 2}
    found = benchmark.load_results(numbers, "load")
    assert [(one["name"], one["value"], one["unit"]) for one in found] == [
        ("load: tokens/s", 1.235, "tokens/s"),
        ("load: device idle between steps", 4.0, "%"),
        ("load: preemptions", 2, ""),
    ]
