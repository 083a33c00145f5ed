"""Measure decoding with drafts against decoding without, at several numbers of sequences together.

Three arms: "none" decodes token by token in an engine's state without drafts, "fixed" verifies the whole
block of every sequence, "dynamic" as much as pays by step times measured just before. They take turns:
each round runs a segment of every arm from one and the same state, so that whatever slows the machine
slows all. A step is given to the device while the one before is read, as an engine does. With real
acceptance all arms must give the same tokens.

Prints progress, and appends one JSON line for each number to `benchmarks/results/<device>.jsonl`.

    python benchmarks/step.py --spec [--model nano|cut] [--concurrency 1 --concurrency 16] [--pairs 10]
    python benchmarks/step.py --spec --report        # the tables and plots of docs/drafts.md
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from generate import RESULTS, append_results, describe_run, print_results
from spec_bench import ARMS, Bench, copied, run_segment, say, seconds_so_far
from spec_models import (
    PUBLIC_CURVE,
    REAL,
    SYNTHETIC,
    SpecModel,
    conditional_chances,
    forced_acceptance,
    make_model,
)
from spec_report import report

from deepinfer_jax.spec_decode.calibration import SAMPLED
from deepinfer_jax.spec_decode.costs import CostTable
from deepinfer_jax.step_state import StepOutput

CONCURRENCY = (1, 4, 16, 64, 256)


def default_tokens(concurrency: int) -> int:
    """Give the tokens of a sequence in a segment: fewer where a step has many."""
    return 48 if concurrency <= 16 else 24 if concurrency <= 64 else 16


def tokens_of(outputs: Sequence[StepOutput], concurrency: int) -> list[list[int]]:
    """List the tokens of each sequence."""
    found: list[list[int]] = [[] for _ in range(concurrency)]
    for output in outputs:
        tokens, counts = np.asarray(output.tokens), np.asarray(output.num_tokens)
        for slot in range(concurrency):
            found[slot] += tokens[slot, : counts[slot]].tolist()
    return found


def count_differences(first: list[list[int]], second: list[list[int]]) -> int:
    """Count differing tokens, as far as both of a pair go."""
    return sum(a != b for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=False))


def run_rounds(bench: Bench, pairs: int, seconds: float) -> dict[str, Any]:
    """Run the arms in turn.

    Args:
        bench: programs and states, with measured costs.
        pairs: rounds.
        seconds: after which no further round starts, once there are two.

    Returns:
        Tokens per second by arm and round, and how many tokens differ between arms.
    """
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    steps = {"none": bench.step("none"), "fixed": bench.step("fixed"), "dynamic": bench.dynamic_step()}
    remembered: Any = None
    differing, began = 0, time.perf_counter()
    # One round more: the first settles the schedule and is not counted.
    for number in range(pairs + 1):
        tokens = {}
        for arm in (ARMS[(number + place) % len(ARMS)] for place in range(len(ARMS))):
            state = copied(bench.states["none" if arm == "none" else "fixed"])
            if arm == "dynamic" and remembered is not None:
                # The schedule goes on from what it saw, as in an engine that has run for a while.
                state = state.replace(drafts=remembered)
            segment = run_segment(steps[arm], state, bench.tokens * bench.concurrency)
            if arm == "dynamic":
                remembered = segment.state.drafts
            tokens[arm] = tokens_of(segment.outputs, bench.concurrency)
            if number:
                rates[arm].append(segment.num_tokens / segment.seconds)
                if arm != "none":
                    note(bench, arm, segment.outputs)
        differing += sum(count_differences(tokens["none"], tokens[arm]) for arm in ARMS[1:])
        if number > 1 and time.perf_counter() - began > seconds:
            break
    medians = ", ".join(f"{arm} {statistics.median(rates[arm]):,.1f}" for arm in ARMS)
    say(f"{bench.concurrency}: {len(rates['none'])} rounds, tokens/s: {medians}")
    return {"rates": rates, "differing": differing}


def note(bench: Bench, arm: str, outputs: Sequence[StepOutput]) -> None:
    """Count what drafts did."""
    for output in outputs:
        told = jax.tree.map(lambda array: np.asarray(array)[: bench.concurrency], output)
        bench.drafting[arm].stats.add(
            num_tokens=told.num_tokens,
            num_verified=told.drafts.num_verified,
            num_accepted=told.drafts.num_accepted,
            logits=told.drafts.logits,
            regimes=np.full(bench.concurrency, SAMPLED),
            choice=int(told.drafts.choice[0]),
        )


def median_interval(ratios: Sequence[float], draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """Give the 95 % bootstrap interval of the median of paired ratios."""
    values = np.asarray(ratios, np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


def against_best(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Compare "dynamic" with the better of the other arms, round by round."""
    best = max(ARMS[:2], key=lambda arm: statistics.median(rates[arm]))
    ratios = [own / other for own, other in zip(rates["dynamic"], rates[best], strict=True)]
    low, high = median_interval(ratios)
    return {
        "value": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "best": best,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def results_of(bench: Bench, found: dict[str, Any], costs: CostTable) -> list[dict[str, Any]]:
    """Make the results of one number of sequences."""
    model, label = bench.model, f"drafts, {bench.model.name}, {bench.model.acceptance} acceptance"
    common = {
        "model": model.name,
        "acceptance": model.acceptance,
        "concurrency": bench.concurrency,
        "rounds": len(found["rates"]["none"]),
        "tokens_each": bench.tokens,
    }
    results = []
    for arm in ARMS:
        result: dict[str, Any] = {
            "name": f"{label}, {arm}, {bench.concurrency} together",
            "value": round(statistics.median(found["rates"][arm]), 2),
            "unit": "tokens/s",
            "arm": arm,
            "rates": [round(rate, 2) for rate in found["rates"][arm]],
        }
        if arm != "none":
            summary = bench.drafting[arm].stats.summary()
            steps = sum(summary.choices.values())
            result |= {
                "tau": _number(summary.tau),
                "tokens_a_step": _number(summary.tokens_per_slot_step),
                "rows": _number(1 + summary.mean_verified),
                "choices": {name: round(count / steps, 3) for name, count in summary.choices.items()},
            }
        results.append(result | common)
    name = f"{label}, dynamic over the best other, {bench.concurrency} together"
    ratio = {"name": name, "unit": "times", "arm": "ratio", **against_best(found["rates"])}
    if model.acceptance == REAL:
        ratio["tokens_differing"] = found["differing"]
    costs_ms = {
        "name": f"{label}, measured drafting, {bench.concurrency} together",
        "value": round(next(iter(costs.draft_ms.values())), 3),
        "unit": "ms",
        "arm": "costs",
        "verify_ms": {rows: round(value, 3) for rows, value in costs.verify_ms.items()},
        "uniform_ms": round(costs.uniform_ms, 3),
        "plain_ms": {slots: round(value, 3) for slots, value in costs.plain_ms.items()},
        "compile_s": bench.compile_s,
        "tiles": [bench.model.numerics.row_tile, bench.model.numerics.sampling_tile],
    }
    return [*results, ratio | common, costs_ms | common]


def _number(value: float) -> float | None:
    """Round; None for NaN, which JSON has not."""
    return None if np.isnan(value) else round(value, 3)


def measure(model: SpecModel, concurrency: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one number of sequences."""
    bench = Bench(model, concurrency, options.tokens or default_tokens(concurrency))
    costs = bench.measure_costs(options.cost_repeats)
    say(f"{concurrency}: plain {costs.plain_ms}, drafting {costs.draft_ms}, verifying {costs.verify_ms} ms")
    found = run_rounds(bench, options.pairs, min(options.seconds, options.stop_after - seconds_so_far()))
    results = results_of(bench, found, costs)
    if options.dispatch:
        common = {"model": model.name, "concurrency": concurrency, "arm": "dispatch"}
        results += [{**one, **common} for one in bench.measure_dispatch()]
    if model.acceptance == REAL and found["differing"]:
        raise SystemExit(f"{concurrency} together: {found['differing']} tokens differ between the arms")
    return results


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser("step.py --spec", description="Measure steps with drafts.")
    models = "nano: embedded, real acceptance (default); cut: released widths, synthetic acceptance"
    parser.add_argument("--model", default="nano", choices=("nano", "cut", "smallest"), help=models)
    parser.add_argument("--synthetic", action="store_true", help="draw acceptance from the public curve")
    parser.add_argument("--concurrency", type=int, action="append", help="more than once (1 4 16 64 256)")
    parser.add_argument("--pairs", type=int, default=10, help="rounds of all three arms (default: 10)")
    parser.add_argument("--tokens", type=int, help="of a sequence in a segment (default: 48, 24 or 16)")
    parser.add_argument("--seconds", type=float, default=600, help="for the rounds of one concurrency (600)")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), help="seconds after which nothing more begins"
    )
    parser.add_argument("--cost-repeats", type=int, default=5, help="of each measured step time (default: 5)")
    parser.add_argument(
        "--dispatch", action="store_true", help="also steps without the compiler options of an engine (GPU)"
    )
    parser.add_argument("--row-tile", type=int, help="rows of a tile (default: as an engine has here)")
    parser.add_argument("--sampling-tile", type=int, help="rows that are sampled together (likewise)")
    parser.add_argument("--report", action="store_true", help="print tables and write plots of the results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Measure, append to the results of this device, print a table; or report what was measured."""
    options = parse(arguments)
    if options.report:
        print(report(options.results))
        return
    platform = jax.devices()[0].platform
    if options.dispatch and platform != "gpu":
        raise SystemExit(
            f"--dispatch: got a {platform} device, expected a GPU, as only its programs become CUDA graphs; "
            "leave the option out"
        )
    about = describe_run(["--spec", *arguments], "benchmarks/step.py")
    model = make_model(options.model, options.synthetic)
    tiles = {"row_tile": options.row_tile, "sampling_tile": options.sampling_tile}
    given = {name: rows for name, rows in tiles.items() if rows is not None}
    model = replace(model, numerics=replace(model.numerics, **given))
    say(f"{model.name}: weights are there, acceptance is {model.acceptance}")
    is_forced = model.acceptance == SYNTHETIC
    results = []
    with forced_acceptance(conditional_chances(PUBLIC_CURVE)) if is_forced else nullcontext():
        for concurrency in options.concurrency or CONCURRENCY:
            if seconds_so_far() > options.stop_after:
                say(f"{concurrency}: not measured, {options.stop_after:g} s are over")
                continue
            found = measure(model, concurrency, options)
            append_results(found, about, options.results)
            results += found
    print_results(results, about)
