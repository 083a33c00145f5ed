"""Measure generation with the embedded model: decode tokens/s, and time to the first token of a process.

Prints a small table and appends one JSON line for each number to `benchmarks/results/<device>.jsonl`.
Everything is measured after a warm-up with the same shapes, so that no compilation is counted; the
second process finds its programs in the compilation cache, as a user's second command does.

    python benchmarks/generate.py [--batch 1 --batch 8 --batch 64] [--max-tokens 96] [--repeats 3]
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PROMPT = "Once upon a time"

FIRST_TOKEN = f"""
import time
started = time.monotonic()
from deepinfer_jax import SamplingParams, generate
generate({PROMPT!r}, SamplingParams(max_tokens=1, temperature=0.0))
print(time.monotonic() - started)
"""
"""What the second process runs: its clock starts before the package is imported."""


def measure_decode(batch: int, max_tokens: int, repeats: int, batch_invariant: bool) -> dict[str, Any]:
    """Measure decode steps after a warm-up.

    Args:
        batch: prompts that run together.
        max_tokens: tokens of each; all but the first are decoded.
        repeats: measured calls, of which the median counts.
        batch_invariant: whether rows run in fixed tiles.

    Returns:
        The fields of a result.
    """
    from deepinfer_jax import SamplingParams, load
    from deepinfer_jax.engine.generate import Timing, generate_ids

    model = load(batch_invariant=batch_invariant)
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=0.7, top_p=0.95, seed=seed, ignore_eos=True)
        for seed in range(batch)
    ]
    prompts = [model.encode(PROMPT)] * batch
    arguments = (model.weights, model.config, model.numerics, prompts, params)
    rates = []
    for repeat in range(repeats + 1):
        timing = Timing()
        generate_ids(*arguments, timing=timing, forbidden_ids=model.forbidden_ids)
        if repeat:
            rates.append(timing.num_decoded / timing.decoding)
    return {
        "name": f"decode, batch {batch}, batch_invariant={batch_invariant}",
        "value": round(statistics.median(rates), 1),
        "unit": "tokens/s",
        "repeats": repeats,
        "max_tokens": max_tokens,
    }


def measure_first_token(repeats: int) -> dict[str, Any]:
    """Measure a fresh process from the import of the package to its first token.

    Args:
        repeats: measured processes after one that fills the compilation cache; the median counts.

    Returns:
        The fields of a result.
    """
    seconds = []
    for repeat in range(repeats + 1):
        command = [sys.executable, "-c", FIRST_TOKEN]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        if repeat:
            seconds.append(float(done.stdout.split()[-1]))
    return {
        "name": "import to first token, second process",
        "value": round(statistics.median(seconds), 2),
        "unit": "s",
        "repeats": repeats,
    }


def describe_run(arguments: list[str], script: str = "benchmarks/generate.py") -> dict[str, Any]:
    """Say where, when and by which command a number was measured."""
    import jax

    device = jax.devices()[0]
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device.device_kind if device.platform != "cpu" else "cpu",
        "jax": jax.__version__,
        "commit": commit or "unknown",
        "command": shlex.join(["python", script, *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def append_results(results: list[dict[str, Any]], about: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Append results to the file of their device, one JSON line each, and give the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{about['device'].lower().replace(' ', '_')}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**result, **about}) + "\n" for result in results)
    return path


def print_results(results: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Print the table of a run."""
    print(f"{about['device']}, JAX {about['jax']}, commit {about['commit'][:9]}")
    for result in results:
        print(f"  {result['name']:<72}{result['value']:>18,} {result['unit']}")


def main(arguments: list[str]) -> None:
    """Measure, append to the results of this device, print a table."""
    parser = argparse.ArgumentParser(description="Measure generation with the embedded model.")
    parser.add_argument("--batch", type=int, action="append", help="may be given more than once (1, 8, 64)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of each prompt (default: 96)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs after a warm-up (default: 3)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON lines")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    results = [
        measure_decode(batch, options.max_tokens, options.repeats, batch_invariant)
        for batch in options.batch or (1, 8, 64)
        for batch_invariant in (True, False)
    ]
    results.append(measure_first_token(options.repeats))
    about = describe_run(arguments)
    path = append_results(results, about, options.results)
    print_results(results, about)
    print(f"appended to {path} after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
