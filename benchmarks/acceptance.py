"""Measure what becomes of drafts: tau by kind of prompt and schedule, calibration errors by position.

The confidences are calibrated on prompts of the corpus' held-out files, and measured on others: with all
drafts verified for acceptance and calibration, then with each schedule. Prints a table, appends one JSON line
for each number, and draws the reliability.

    python benchmarks/acceptance.py --corpus FOLDER [--max-tokens 128] [--calibration FILE] [--plot FILE]

--calibration writes the temperatures and shifts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from generate import RESULTS, append_results, describe_run, print_results

from deepinfer_jax import EngineConfig, Model, SamplingParams, load
from deepinfer_jax.engine.confidences import collect_rounds, in_every_regime
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.measure import measure_costs
from deepinfer_jax.spec_decode.calibrate import calibration_errors, reliability
from deepinfer_jax.spec_decode.calibration import REGIMES, Calibration, fit_calibration
from deepinfer_jax.spec_decode.costs import CostTable
from deepinfer_jax.spec_decode.guard import Guard
from deepinfer_jax.spec_decode.plots import plot_reliability
from deepinfer_jax.training.data import normalise_story, read_records, turn_text

SLOTS, CONTEXT = 64, 1024
PROMPT_TOKENS, FIT_TOKENS = 48, 64
SCHEDULES = ("fixed", "dynamic", "threshold")


def read_prompts(path: Path, model: Model) -> dict[str, list[list[int]]]:
    """Encode the prompts of a file by kind."""
    found: dict[str, list[list[int]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        text = record.get("prompt")
        ids = question_ids(record, model) if text is None else model.encode(text)
        found.setdefault(record["kind"], []).append(ids)
    return found


def question_ids(record: dict[str, Any], model: Model) -> list[int]:
    """Encode a user's turn up to where the answer begins."""
    # An answer begins where the text of an empty one ends, before its end token.
    return model.encode(turn_text(record["messages"][0]["content"], ""))[:-1]


def held_out_prompts(corpus: Path, model: Model, count: int) -> list[list[int]]:
    """Cut prompts out of the held-out files of the corpus, as many of each kind."""
    stories = [normalise_story(record["text"]) for record in read_records(corpus, "stories_valid")]
    ids = [token for text in stories for token in model.encode(text)]
    starts = np.linspace(0, len(ids) - PROMPT_TOKENS, count).astype(int)
    prompts = [ids[start : start + PROMPT_TOKENS] for start in starts]
    for name in ("chat_valid", "json_valid"):
        records = read_records(corpus, name)
        prompts += [
            question_ids(record, model) for record in records[:: max(1, len(records) // count)][:count]
        ]
    return prompts


def requests_of(
    prompts: Sequence[list[int]], max_tokens: int, seed: int = 0
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Give every prompt in every regime, each request with a seed of its own."""
    regimes = in_every_regime(SamplingParams(max_tokens=max_tokens))
    pairs = [(prompt, one) for prompt in prompts for one in regimes]
    params = [replace(one, seed=seed + number) for number, (_, one) in enumerate(pairs)]
    return [prompt for prompt, _ in pairs], params


def measure_schedule(
    model: Model,
    prompts: list[list[int]],
    params: list[SamplingParams],
    schedule: str,
    calibration: Calibration,
    costs: CostTable,
) -> dict[str, Any]:
    """Run requests under a schedule."""
    options = EngineConfig(num_slots=SLOTS, max_context=CONTEXT, drafts=schedule)
    arguments = (model.weights, model.config, model.numerics, options, model.forbidden_ids)
    engine = Engine(*arguments, calibration=calibration, costs=costs)
    assert engine.drafting is not None
    # Nothing else is to change the schedule while it is measured.
    engine.drafting.guard = Guard(max_error=1e9)
    for prompt, one in zip(prompts, params, strict=True):
        engine.submit(prompt, one)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    summary, tokens = engine.stats.draft, engine.stats.generated_tokens
    engine.close()
    return {"summary": summary, "tokens_per_second": tokens / seconds}


def main(arguments: list[str]) -> None:
    """Calibrate, measure, print, append."""
    parser = argparse.ArgumentParser(description="Measure acceptance and calibration of drafts.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--fit-prompts", type=int, default=200, help="of each kind (default: 200)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--calibration", type=Path, default=None, help="write the temperatures here")
    parser.add_argument("--plot", type=Path, default=None, help="draw the reliability here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(arguments)
    warnings.simplefilter("error")
    model = load()
    held = read_prompts(options.corpus / "eval_prompts.jsonl", model)
    sizes = EngineConfig(num_slots=SLOTS, max_context=CONTEXT)
    fitting = held_out_prompts(options.corpus, model, options.fit_prompts)
    rounds = collect_rounds(model, *requests_of(fitting, FIT_TOKENS), sizes)
    source = {"model": model.name, "verification": "coupled", "prompts": len(fitting)}
    source["date"] = datetime.date.today().isoformat()
    calibration = fit_calibration(*rounds, source=source)
    print(f"calibrated on {len(rounds.logits)} rounds: {calibration.temperatures}", flush=True)
    if options.calibration is not None:
        calibration.save(options.calibration)
    everything = [prompt for prompts in held.values() for prompt in prompts]
    judged = collect_rounds(model, *requests_of(everything, options.max_tokens, seed=10**6), sizes)
    results = report_calibration(judged, calibration, options.plot)
    costs = measure_costs(model, replace(sizes, drafts="dynamic"))
    for kind, prompts in held.items():
        for schedule in SCHEDULES:
            found = measure_schedule(
                model, *requests_of(prompts, options.max_tokens), schedule, calibration, costs
            )
            summary = found["summary"]
            results.append(
                {
                    "name": f"tau, {kind}, {schedule}",
                    "value": round(summary.tau, 3),
                    "unit": "tokens",
                    "per_step": round(summary.tokens_per_slot_step, 3),
                    "verified": round(summary.mean_verified, 3),
                    "accepted_share": round(summary.draft_acceptance, 4),
                    "unconditional": [round(float(one), 4) for one in summary.unconditional_acceptance],
                    "tokens_per_second": round(found["tokens_per_second"], 1),
                    "rounds": summary.rounds,
                }
            )
            print(results[-1], flush=True)
    about = describe_run(arguments, "benchmarks/acceptance.py")
    append_results(results, about, options.results)
    print_results(results, about)


def report_calibration(judged: Any, calibration: Calibration, plot: Path | None) -> list[dict[str, Any]]:
    """Compare calibration errors before and after on prompts that were not fitted to."""
    results, size = [], judged.logits.shape[1]
    for index, regime in enumerate(REGIMES):
        own = judged.regimes == index
        logits, accepted = judged.logits[own].astype(np.float64), judged.num_accepted[own]
        fitted = (np.asarray(calibration.temperatures[regime]), np.asarray(calibration.shifts[regime]))
        series = {}
        for name, (temperatures, shifts) in {
            "before": (np.ones(size), np.zeros(size)),
            "after": fitted,
        }.items():
            errors = calibration_errors(logits + shifts, accepted, temperatures)
            series[name] = [
                reliability(logits + shifts, accepted, temperatures, place + 1) for place in range(size)
            ]
            results.append(
                {
                    "name": f"largest calibration error of a position, {regime}, {name} scaling",
                    "value": round(100 * float(errors.max()), 2),
                    "unit": "%",
                    "by_position": [round(100 * float(error), 2) for error in errors],
                    "rounds": int(own.sum()),
                }
            )
        print(results[-2:], flush=True)
        if plot is not None and regime == "sampled":
            plot_reliability(series, plot)
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
