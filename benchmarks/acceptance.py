"""Measure what becomes of drafts: tau by kind of prompt and schedule, calibration errors by position.

The confidences are calibrated on prompts of the corpus' held-out files, with all drafts verified. Errors are
measured on the evaluation prompts, which are never among those, and on the held-out ones by cross-validation;
then tau with each schedule. Prints a table, appends one JSON line a number, and draws the reliability.

    python benchmarks/acceptance.py --corpus FOLDER [--max-tokens 128] [--calibration FILE] [--plot FILE]
        [--only calibration|schedules]

--calibration writes what was fitted; --only schedules uses those beside the model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from generate import RESULTS, append_results, describe_run, print_results

from deepinfer_jax import EngineConfig, Model, SamplingParams, load
from deepinfer_jax.engine.confidences import (
    Rounds,
    chance_errors,
    collect_rounds,
    cross_fitted,
    fit_rounds,
    in_every_regime,
)
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.measure import measure_costs
from deepinfer_jax.spec_decode.calibrate import Floats, reliability_of, survival_errors, survivals_of
from deepinfer_jax.spec_decode.calibration import REGIMES, SAMPLED, Calibration
from deepinfer_jax.spec_decode.costs import CostTable
from deepinfer_jax.spec_decode.guard import Guard
from deepinfer_jax.spec_decode.plots import plot_reliability
from deepinfer_jax.training.data import read_records, turn_text

SLOTS, CONTEXT = 64, 1024
SCHEDULES = ("fixed", "dynamic", "threshold")
ANSWER_AS_JSON = "\nReply with a JSON object that has the integer key answer."
OPENING = re.compile(r"""(.+?[.!?]["']?\s+.+?[.!?]["']?)(?=\s+["'A-Z])""", re.DOTALL)
"""The first two sentences of a longer paragraph, as the story prompts are cut."""


def read_prompts(path: Path) -> list[tuple[str, str, str]]:
    """Read kind, source and text of the evaluation prompts; stories are of one source."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        ("story", "story", record["prompt"])
        if record["kind"] == "story"
        else (record["kind"], record["source"], record["messages"][0]["content"])
        for record in records
    ]


def encode(model: Model, kind: str, text: str) -> list[int]:
    """Encode an opening, or a user's turn up to where the answer begins."""
    # An answer begins where the text of an empty one ends, before its end token.
    return model.encode(text) if kind == "story" else model.encode(turn_text(text, ""))[:-1]


def held_out_texts(corpus: Path, evaluated: set[str]) -> dict[str, list[str]]:
    """Give prompts of the held-out files by source, in the form of those evaluated and without them."""
    stories = [record["text"] for record in read_records(corpus, "stories_valid")]
    paragraphs = [one for text in stories for one in text.split("\n\n")]
    # The evaluation's openings are parts of paragraphs of these very files.
    free = [one for one in paragraphs if not any(text in one for text in evaluated)]
    openings = [match[1] for one in free if (match := OPENING.match(one))]
    found = {"story": [one for one in openings if 60 <= len(one) <= 400]}
    for name in ("chat_valid", "json_valid"):
        for record in read_records(corpus, name):
            source = "wordnet" if name == "json_valid" else record["kind"]
            found.setdefault(source, []).append(record["messages"][0]["content"])
    texts = {source: sorted(set(texts) - evaluated) for source, texts in found.items()}
    for one in texts.values():
        random.Random(0).shuffle(one)
    # From the other end, so that few questions are asked both ways.
    as_json = [text + ANSWER_AS_JSON for text in reversed(texts["math"])]
    texts["gsm8k-test"] = [text for text in as_json if text not in evaluated]
    return texts


def fitting_prompts(
    corpus: Path, model: Model, held: Sequence[tuple[str, str, str]], count: int
) -> list[list[int]]:
    """Choose held-out prompts, as many of each kind, in the shares of sources evaluated or all there are."""
    texts = held_out_texts(corpus, {text for _, _, text in held})
    of_kind = Counter(kind for kind, _, _ in held)
    of_source = Counter((kind, source) for kind, source, _ in held)
    return [
        encode(model, kind, text)
        for (kind, source), number in of_source.items()
        for text in texts[source][: round(count * number / of_kind[kind])]
    ]


def requests_of(
    prompts: Sequence[list[int]], max_tokens: int, seed: int = 0, regimes: slice = slice(None)
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Give every prompt in every regime, or some, each request with a seed of its own."""
    chosen = in_every_regime(SamplingParams(max_tokens=max_tokens))[regimes]
    pairs = [(prompt, one) for prompt in prompts for one in chosen]
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


def measure_calibration(
    model: Model, held: Sequence[tuple[str, str, str]], options: argparse.Namespace
) -> tuple[Calibration, list[dict[str, Any]]]:
    """Fit the calibration to answers as long as those it is measured on; loops come late in an answer."""
    sizes = EngineConfig(num_slots=SLOTS, max_context=CONTEXT)
    choose = partial(fitting_prompts, options.corpus, model, held)
    greedy = requests_of(choose(options.greedy_prompts), options.max_tokens, regimes=slice(1))
    others = requests_of(choose(options.fit_prompts), options.max_tokens, regimes=slice(1, None))
    rounds = collect_rounds(model, greedy[0] + others[0], greedy[1] + others[1], sizes)
    source = {"model": model.name, "verification": "coupled", "max_tokens": options.max_tokens}
    source |= {"answers": len(greedy[0] + others[0]), "date": datetime.date.today().isoformat()}
    calibration = fit_rounds(rounds, source)
    print(f"calibrated on {len(rounds.logits)} rounds: {calibration.temperatures}", flush=True)
    if options.calibration is not None:
        calibration.save(options.calibration)
    everything = [encode(model, kind, text) for kind, _, text in held]
    judged = collect_rounds(model, *requests_of(everything, options.max_tokens, seed=10**6), sizes)
    before = survivals_of(judged.logits, np.ones(judged.logits.shape[1]))
    after = calibration.survivals(judged.logits, judged.regimes)
    results = report_errors("before scaling", judged, before)
    results += report_errors("after scaling", judged, after)
    results += report_errors(
        "after scaling, cross-validated on held-out prompts", rounds, cross_fitted(rounds)
    )
    if options.plot is not None:
        own = judged.regimes == SAMPLED
        positions = range(before.shape[1])
        series = {
            name: [reliability_of(table[own, k], judged.num_accepted[own] > k) for k in positions]
            for name, table in (("before", before), ("after", after))
        }
        plot_reliability(series, options.plot)
    return calibration, results


def report_errors(name: str, rounds: Rounds, survivals: Floats) -> list[dict[str, Any]]:
    """Give the calibration errors of each regime, and those that exact survivals would show by chance."""
    results = []
    for index, regime in enumerate(REGIMES):
        own = rounds.regimes == index
        parts = survivals[own], rounds.num_accepted[own]
        errors = survival_errors(*parts)
        chance = chance_errors(*parts, rounds.requests[own])
        percents = {
            "by_position": errors,
            "by_chance": chance.mean(axis=0),
            "by_chance_95": np.quantile(chance, 0.95, axis=0),
        }
        results.append(
            {
                "name": f"largest calibration error of a position, {regime}, {name}",
                "value": round(100 * float(errors.max()), 2),
                "unit": "%",
                **{key: [round(100 * float(one), 2) for one in row] for key, row in percents.items()},
                "rounds": int(own.sum()),
                "answers": len(np.unique(rounds.requests[own])),
            }
        )
        print(results[-1], flush=True)
    return results


def measure_schedules(
    model: Model, held: Sequence[tuple[str, str, str]], calibration: Calibration, max_tokens: int
) -> list[dict[str, Any]]:
    """Answer each kind of prompt under each schedule."""
    results = []
    costs = measure_costs(model, EngineConfig(num_slots=SLOTS, max_context=CONTEXT, drafts="dynamic"))
    for kind in dict.fromkeys(kind for kind, _, _ in held):
        prompts = [encode(model, kind, text) for one, _, text in held if one == kind]
        for schedule in SCHEDULES:
            found = measure_schedule(model, *requests_of(prompts, max_tokens), schedule, calibration, costs)
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
    return results


def main(arguments: list[str]) -> None:
    """Calibrate, measure, print, append."""
    parser = argparse.ArgumentParser(description="Measure acceptance and calibration of drafts.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--fit-prompts", type=int, default=200, help="of each kind (default: 200)")
    parser.add_argument(
        "--greedy-prompts", type=int, default=600, help="of each kind, answered greedily (default: 600)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--only", choices=("calibration", "schedules"), help="leave out the other part")
    parser.add_argument("--calibration", type=Path, default=None, help="write what was fitted here")
    parser.add_argument("--plot", type=Path, default=None, help="draw the reliability here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(arguments)
    warnings.simplefilter("error")
    model, results = load(), []
    held = read_prompts(options.corpus / "eval_prompts.jsonl")
    calibration = model.calibration
    if options.only != "schedules":
        calibration, results = measure_calibration(model, held, options)
    assert calibration is not None
    if options.only != "calibration":
        results += measure_schedules(model, held, calibration, options.max_tokens)
    about = describe_run(arguments, "benchmarks/acceptance.py")
    append_results(results, about, options.results)
    print_results(results, about)


if __name__ == "__main__":
    main(sys.argv[1:])
