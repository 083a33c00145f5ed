"""Measure an engine under load: requests of mixed lengths that arrive over time, and the same one at a time.

Prints tokens/s, time to the first token, time between tokens, how long the device waits between steps and
what the host spends on scheduling, and appends one JSON line for each number to
`benchmarks/results/<device>.jsonl`. A second mode times one long prompt in exact and in bounded prefill.

    python benchmarks/load.py [--model nano] [--requests 256] [--rate 32] [--slots 64] [--overlap 1]
    python benchmarks/load.py --model wide [--prefill-compare]
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from generate import RESULTS, ROOT, append_results, describe_run, print_results

from deepinfer_jax import SamplingParams, load
from deepinfer_jax.engine.llm import LLM
from deepinfer_jax.engine.load import Model, use_compilation_cache
from deepinfer_jax.engine.platform import platform_of, suited
from deepinfer_jax.engine_config import EngineConfig
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.step import ONE_DEVICE
from deepinfer_jax.testing.presets import DIVISIBLE, random_resident_weights, released_cut

PROMPT_TOKENS = (4, 400)
OUTPUT_TOKENS = (16, 128)
"""Fewest and most tokens of a request's prompt and of its output."""

CONTEXT = PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
ALONE = 16
"""Requests that are run one at a time as well."""

LONG_PROMPT = 8191
"""Tokens of the prompt of the second mode: with the token that follows it fills 64 pages."""

SWITCH_SECONDS = 1e-4
"""How long one thread may keep another from running Python while the device is watched."""

SOURCES = ("README.md", "ARCHITECTURE.md", "deepinfer_jax/assets/nano/MODEL_CARD.md")
"""Texts that prompts are cut from."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come: seconds after the start, prompt, parameters."""

    arrival: float
    token_ids: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Seen:
    """What was seen of a request: when it came, and when each of its tokens was known, on one clock."""

    arrival: float
    times: list[float] = field(default_factory=list)


class DeviceWatch:
    """Notes when each step was given to the device and when the device was done with it.

    Args:
        llm: whose steps.
    """

    def __init__(self, llm: LLM) -> None:
        self.dispatched: list[float] = []
        self.ready: list[float] = []
        self._llm = llm
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> DeviceWatch:
        # The thread must not wait for long until it may look at the clock.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()
        self._llm.engine.on_dispatch = self._note
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.engine.on_dispatch = None
        self._steps.put(None)
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _note(self, started: float, outputs: object) -> None:
        # Not every step has a result to read, but each changes the state, which the next step consumes.
        self.dispatched.append(started)
        self._steps.put(jnp.copy(self._llm.engine.runner.state.lengths))

    def _wait(self) -> None:
        while (array := self._steps.get()) is not None:
            array.block_until_ready()
            self.ready.append(time.monotonic())


def plan_requests(source: Sequence[int], count: int, rate: float, seed: int) -> list[Planned]:
    """Draw requests that arrive at random times, on average `rate` a second.

    Args:
        source: token ids that prompts are slices of.
        count: how many.
        rate: requests a second; infinite for all at once.
        seed: of the draw.

    Returns:
        The requests in the order of their arrival.
    """
    random = np.random.default_rng(seed)
    gaps = random.exponential(1.0, count) / rate
    requests = []
    for number, arrival in enumerate(np.cumsum(gaps) - gaps[0]):
        length = int(random.integers(*PROMPT_TOKENS, endpoint=True))
        start = int(random.integers(0, len(source) - length, endpoint=True))
        max_tokens = int(random.integers(*OUTPUT_TOKENS, endpoint=True))
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.7, top_p=0.95, seed=number, ignore_eos=True
        )
        requests.append(Planned(float(arrival), list(source[start : start + length]), params))
    return requests


def idle_share(dispatched: Sequence[float], ready: Sequence[float], without_work: float = 0.0) -> float:
    """Compute the share of time in which no step was with the device.

    sum_i max(0, d_{i+1} - max_{j <= i} r_j) over max r - d_0, both less the time in which there was nothing
    to do at all.

    Args:
        dispatched: seconds at which each step was given to the device, rising.
        ready: seconds at which each was done.
        without_work: seconds in which no request was there; the device was idle then.

    Returns:
        In 0..1; 0 for fewer than two steps.
    """
    if len(ready) < 2:
        return 0.0
    idle, covered = 0.0, ready[0]
    for start, end in zip(dispatched[1:], ready[1:], strict=True):
        idle += max(0.0, start - covered)
        covered = max(covered, end)
    busy_span = covered - dispatched[0] - without_work
    return max(0.0, idle - without_work) / busy_span


def latencies(seen: Sequence[Seen]) -> dict[str, float]:
    """Compute median and 95th percentile of what a reader waits for, in milliseconds.

    Args:
        seen: requests with a token at least.

    Returns:
        Time from arrival to the first token, and from each token to the next of the same request.
    """
    first = [one.times[0] - one.arrival for one in seen]
    between = [later - earlier for one in seen for earlier, later in pairwise(one.times)]
    found = {}
    for name, seconds in (("time to first token", first), ("time between tokens", between)):
        for word, share in (("median", 50), ("p95", 95)):
            found[f"{name}, {word}"] = 1000 * float(np.percentile(seconds, share)) if seconds else 0.0
    return found


def drive(llm: LLM, requests: Sequence[Planned]) -> tuple[list[Seen], float, float]:
    """Submit requests as their time comes, and step until all are done.

    Returns:
        What was seen of each, seconds from the first arrival to the last token, and those of them in which
        no request was there.
    """
    waiting, running, seen = list(reversed(requests)), [], []
    started, without_work = time.perf_counter(), 0.0
    while waiting or llm.has_work:
        now = time.perf_counter() - started
        while waiting and waiting[-1].arrival <= now:
            one = waiting.pop()
            seen.append(Seen(one.arrival))
            running.append((llm.submit(one.token_ids, one.params), seen[-1]))
        if not llm.has_work:
            time.sleep(max(0.0, waiting[-1].arrival - now))
            without_work += time.perf_counter() - started - now
            continue
        llm.step()
        now = time.perf_counter() - started
        for job, one in running:
            one.times += [now] * (len(job.samples[0].request.token_ids) - len(one.times))
            assert not job.is_done or job.completions[0].finish_reason == "length", job.completions[0]
        running = [entry for entry in running if not entry[0].is_done]
    return seen, time.perf_counter() - started, without_work


def measure_load(model: Model, requests: Sequence[Planned], slots: int, overlap: int) -> dict[str, Any]:
    """Run requests as they arrive, after a warm-up.

    Returns:
        Number by name.
    """
    options = EngineConfig(num_slots=slots, max_context=CONTEXT, overlap=overlap)
    with LLM(model, options=options) as llm:
        warm_up(llm, requests)
        before = asdict(llm.stats)
        with DeviceWatch(llm) as watch:
            seen, seconds, without_work = drive(llm, requests)
        counted = differences(before, asdict(llm.stats))
    host = {"scheduling": "host", "dispatching": "dispatch", "waiting": "wait"}
    return {
        "tokens/s": counted["generated_tokens"] / seconds,
        "steps": counted["steps"],
        **latencies(seen),
        "device idle between steps": 100 * idle_share(watch.dispatched, watch.ready, without_work),
        "seconds without any request": without_work,
        **{
            f"host {word} a step": 1000 * counted[f"{name}_seconds"] / counted["steps"]
            for word, name in host.items()
        },
        "prompt tokens": counted["prompt_tokens"],
        "prefix hits": counted["prefix"]["hits"],
        "prefix tokens reused": counted["prefix"]["hit_tokens"],
        "preemptions": counted["preemptions"],
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Subtract counters from later ones, groups of them inside too."""
    groups = {
        name: differences(before.get(name, {}), one) for name, one in after.items() if isinstance(one, dict)
    }
    return groups | {name: one - before.get(name, 0) for name, one in after.items() if name not in groups}


def measure_alone(model: Model, requests: Sequence[Planned]) -> dict[str, Any]:
    """Run requests one after the other on one slot, after a warm-up."""
    with LLM(model, options=EngineConfig(num_slots=1, max_context=CONTEXT)) as llm:
        warm_up(llm, requests)
        started = time.perf_counter()
        for one in requests:
            job = llm.submit(one.token_ids, one.params)
            while not job.is_done:
                llm.step()
        tokens = sum(one.params.max_tokens for one in requests)
        return {"tokens/s": tokens / (time.perf_counter() - started)}


def warm_up(llm: LLM, requests: Sequence[Planned]) -> None:
    """Compile all programs, those of the watch too, and run a few tokens that no prefix is left of."""
    llm.warmup()
    jnp.copy(llm.engine.runner.state.lengths).block_until_ready()
    few = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.95, ignore_eos=True)
    for one in requests[:2]:
        llm.submit(one.token_ids[:100], few)
    while llm.has_work:
        llm.step()


def compare_prefill(model: Model, num_tokens: int, pairs: int, overlap: int) -> list[dict[str, Any]]:
    """Time a long prompt in exact and bounded prefill, taking turns.

    Args:
        model: with as many layers in both halves for a fair ratio.
        num_tokens: of the prompt; one token follows.
        pairs: timed runs of each, after one that is not.
        overlap: as in `EngineConfig`.

    Returns:
        The fields of the results.
    """
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size // 2, num_tokens).tolist()
    seconds: dict[str, list[float]] = {"exact": [], "bounded": []}
    rows = {}
    # Without a prefix cache, or the second run would find what the first one left.
    options = EngineConfig(num_slots=1, max_context=num_tokens + 1, prefix_cache=False, overlap=overlap)
    engines = {mode: LLM(model, options=replace(options, prefill=mode)) for mode in seconds}
    for pair in range(pairs + 1):
        # Each goes first in turn, so that a drift of the clock speed favours neither.
        for mode in list(seconds)[:: 1 if pair % 2 else -1]:
            before, taken = asdict(engines[mode].stats), time_prompt(engines[mode], ids)
            counted = differences(before, asdict(engines[mode].stats))
            rows[mode] = {name: counted[name] for name in ("encoder_rows", "decoder_rows")}
            if pair:
                seconds[mode].append(taken)
    for llm in engines.values():
        llm.close()
    return prefill_results(seconds, rows, num_tokens)


def time_prompt(llm: LLM, ids: list[int]) -> float:
    """Time a prompt from its submission to its only token."""
    started = time.perf_counter()
    job = llm.submit(ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while not job.is_done:
        llm.step()
    return time.perf_counter() - started


def prefill_results(
    seconds: dict[str, list[float]], rows: dict[str, dict[str, int]], num_tokens: int
) -> list[dict[str, Any]]:
    """Make results of the times and rows of both modes, and the median ratio of the pairs."""
    results = [
        {
            "name": f"{mode} prefill of {num_tokens} tokens",
            "value": round(1000 * statistics.median(seconds[mode]), 1),
            "unit": "ms",
            "runs_ms": [round(1000 * one, 1) for one in seconds[mode]],
            **rows[mode],
        }
        for mode in seconds
    ]
    ratios = [b / e for b, e in zip(seconds["bounded"], seconds["exact"], strict=True)]
    ratio = {"name": "bounded / exact", "value": round(statistics.median(ratios), 3), "unit": "of the time"}
    return [*results, ratio | {"ratios": [round(one, 3) for one in ratios]}]


UNITS = {
    "tokens/s": "tokens/s",
    "seconds": "s",
    "device": "%",
    "time": "ms",
    "host": "ms",
    "prompt": "tokens",
}
"""Unit by the first word of a number's name."""


def load_results(numbers: dict[str, float], what: str) -> list[dict[str, Any]]:
    """Make results of named numbers."""
    return [
        {"name": f"{what}: {name}", "value": round(value, 3), "unit": UNITS.get(name.split()[0], "")}
        for name, value in numbers.items()
    ]


def make_model(name: str) -> tuple[Model, list[int]]:
    """Load the embedded model, or draw another one; and give token ids to cut prompts from."""
    if name == "nano":
        model = load()
        assert model.tokenizer is not None
        return model, model.encode("\n".join((ROOT / path).read_text("utf-8") for path in SOURCES))
    use_compilation_cache()
    config = released_cut() if name == "wide" else replace(DIVISIBLE, is_quantized=True)
    draw = jax.jit(lambda key: random_resident_weights(config, key))
    weights = jax.block_until_ready(draw(jax.random.key(0)))
    ids = np.random.default_rng(0).integers(3, config.vocab_size // 2, 100_000).tolist()
    numerics = suited(OFFICIAL, platform_of(ONE_DEVICE))
    return Model(config, weights, numerics, None, name=name), ids


def main(arguments: list[str]) -> None:
    """Measure, append to the results of this device, print a table."""
    parser = argparse.ArgumentParser(description="Measure an engine under load.")
    models = "nano (default), wide: released widths, four layers; tiny: to try this file"
    parser.add_argument("--model", default="nano", choices=("nano", "wide", "tiny"), help=models)
    parser.add_argument("--requests", type=int, default=256, help="(default: 256)")
    parser.add_argument("--rate", type=float, default=32.0, help="requests a second, or inf (default: 32)")
    parser.add_argument("--slots", type=int, default=64, help="sequences together (default: 64)")
    parser.add_argument("--overlap", type=int, default=1, choices=(0, 1), help="(default: 1)")
    parser.add_argument("--alone", type=int, default=ALONE, help=f"one at a time (default: {ALONE})")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and arrivals (default: 0)")
    parser.add_argument("--prefill-compare", action="store_true", help="time exact and bounded prefill")
    parser.add_argument("--prompt-tokens", type=int, default=LONG_PROMPT, help="of the second mode")
    parser.add_argument("--pairs", type=int, default=3, help="timed runs of the second mode (default: 3)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(arguments)
    about = describe_run(arguments, "benchmarks/load.py")
    model, source = make_model(options.model)
    if options.prefill_compare:
        longest = min(options.prompt_tokens, model.config.max_position_embeddings - 1)
        results = compare_prefill(model, longest, options.pairs, options.overlap)
    else:
        requests = plan_requests(source, options.requests, options.rate, options.seed)
        what = f"load, {options.slots} slots, overlap {options.overlap}, rate {options.rate:g}/s"
        loaded = measure_load(model, requests, options.slots, options.overlap)
        results = load_results(loaded, what)
        if options.alone:
            alone = measure_alone(model, requests[: options.alone])
            ratio = loaded["tokens/s"] / alone["tokens/s"]
            results += load_results(alone, f"{min(options.alone, len(requests))} of them one at a time")
            results.append({"name": "together / one at a time", "value": round(ratio, 2), "unit": "times"})
    results = [{**result, "model": options.model} for result in results]
    path = append_results(results, about, options.results)
    print_results(results, about)
    print(f"appended to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
