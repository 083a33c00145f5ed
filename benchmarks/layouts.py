"""Measure decode steps of a cut model of the released widths on several devices, beside one device.

Weights are drawn once on the first device and placed on the mesh of each layout. For each: tokens a second,
the share of the devices' time that collectives take (from a profile), whether tokens and log-probabilities
are those of one device, and what the layout lab predicts. Appends one JSON line for each number to
`benchmarks/results/<device>.jsonl`.

    python benchmarks/layouts.py [--mesh 2] [--layout data+expert --layout tensor] [--slots 64] [--steps 10]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from generate import append_results, describe_run, print_results
from step import ready_state, time_steps

from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.engine.target import make_target, put_on, to_devices
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.step import ONE_DEVICE, EngineState, StepOutput, Target, decode_step
from deepinfer_jax.testing.presets import DIVISIBLE, random_resident_weights, released_cut

COMPARED_STEPS = 4
"""Steps whose tokens and log-probabilities are compared with those of one device."""

COLLECTIVE_WORDS = ("nccl", "all-gather", "all-reduce", "all-to-all", "reduce-scatter")


def collective_share(folder: Path) -> dict[str, float]:
    """Read a profile: milliseconds that the first device worked, and those of them in collectives."""
    data = jax.profiler.ProfileData.from_file(str(next(folder.rglob("*.xplane.pb"))))
    busy = moved = 0.0
    for plane in data.planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                busy += event.duration_ns
                moved += event.duration_ns * any(word in event.name.lower() for word in COLLECTIVE_WORDS)
    return {"busy_ms": busy / 1e6, "collectives_ms": moved / 1e6}


def measure(
    weights: Any, config: ModelConfig, target: Target, slots: int, context: int, steps: int
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Time decode steps with every slot active.

    Returns:
        The record, and log-probabilities and tokens of the first steps.
    """
    sizes = CacheConfig.for_slots(slots, context)
    state = ready_state(weights, config, sizes, OFFICIAL, target)
    is_active = to_devices(np.ones(slots, bool), ("slots",), target)

    def step(state: EngineState) -> tuple[EngineState, StepOutput]:
        return decode_step(weights, state, is_active, config=config, numerics=OFFICIAL, target=target)

    reported, started = [], time.perf_counter()
    for _ in range(COMPARED_STEPS):
        state, output = step(state)
        reported += [np.asarray(output.tokens), np.asarray(output.logprobs)]
    warmed = time.perf_counter() - started
    state, seconds = time_steps(step, state, steps)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            time_steps(step, state, 1)
        profile = collective_share(Path(folder))
    milliseconds = 1000 * statistics.median(seconds)
    record = {
        "name": f"decode on {target.layout.name}, {slots} slots at {context} tokens",
        "value": round(1000 * slots / milliseconds, 1),
        "unit": "tokens/s",
        "devices": 1 if target.mesh is None else target.mesh.size,
        "step_ms": round(milliseconds, 2),
        "first_steps_s": round(warmed, 1),
        **{name: round(value, 3) for name, value in profile.items()},
    }
    return record, reported


def compare(found: list[np.ndarray], expected: list[np.ndarray]) -> dict[str, Any]:
    """Count differing tokens and log-probabilities."""
    tokens = sum(int((a != b).sum()) for a, b in zip(found[::2], expected[::2], strict=True))
    logprobs = [np.abs(a - b) for a, b in zip(found[1::2], expected[1::2], strict=True)]
    return {
        "tokens_differing": tokens,
        "logprobs_differing": sum(int((difference > 0).sum()) for difference in logprobs),
        "largest_logprob_difference": float(max(difference.max() for difference in logprobs)),
        "compared": len(found[0]) * COMPARED_STEPS,
    }


def main(arguments: list[str]) -> None:
    """Measure, append to the results of this device, print a table."""
    parser = argparse.ArgumentParser(description="Measure layouts on several devices.")
    parser.add_argument("--mesh", default="2", help="grid of devices (default: 2)")
    parser.add_argument("--layout", action="append", help="may be given more than once")
    parser.add_argument("--slots", type=int, action="append", help="over all devices; more than once")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each slot (default: 8192)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: 10)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to try this file without a GPU")
    options = parser.parse_args(arguments)
    config = released_cut()
    if options.tiny:
        config = replace(DIVISIBLE, is_quantized=True)
    about, results = describe_run(arguments, "benchmarks/layouts.py"), []
    draw = jax.jit(lambda key: random_resident_weights(config, key))
    weights = jax.block_until_ready(draw(jax.random.key(0)))
    alone: dict[int, list[np.ndarray]] = {}
    for name in (None, *(options.layout or ("data+expert", "tensor"))):
        target = ONE_DEVICE if name is None else make_target(config, options.mesh, name)
        placed = jax.block_until_ready(put_on(weights, config, target))
        for slots in options.slots or (8, 64):
            record, reported = measure(placed, config, target, slots, options.context, options.steps)
            record |= compare(reported, alone.setdefault(slots, reported))
            results.append(record)
            append_results([record], about)
        del placed
    print_results(results, about)


if __name__ == "__main__":
    main(sys.argv[1:])
