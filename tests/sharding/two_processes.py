"""One of two processes that run the same requests on one mesh; started by `test_two_processes.py`.

Usage: python two_processes.py ADDRESS PROCESS_NUMBER DEVICES_EACH
"""

from __future__ import annotations

import json
import sys

import jax

from deepinfer_jax import EngineConfig, SamplingParams
from deepinfer_jax.engine.generate import generate_ids
from deepinfer_jax.engine.target import make_target, put_on
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.presets import DIVISIBLE, random_weights

# As many as in `test_layouts.py`, so that one device has the same programs. One is longer than a page: the
# second of its like finds its prefix, and every process must find the same.
PROMPTS = [[5, 17, 99], [3] * 140, list(range(2, 90)), [7], list(range(50, 3, -1))] * 2
PARAMS = [
    SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=4, temperature=1.0, seed=3, ignore_eos=True, logprobs=1),
] * 5


def run(mesh: str | None) -> list[list[object]]:
    """Generate and give each request's tokens and log-probabilities."""
    weights = random_weights(DIVISIBLE, jax.random.key(8))
    target = make_target(DIVISIBLE, mesh, None)
    placed = put_on(weights, DIVISIBLE, target)
    options = EngineConfig(max_rows=64)
    generations = generate_ids(placed, DIVISIBLE, FLOAT32, PROMPTS, PARAMS, options=options, target=target)
    return [[one.token_ids, [entry.logprob for entry in one.logprobs]] for one in generations]


if __name__ == "__main__":
    address, number, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(address, 2, number)
    assert len(jax.devices()) == 2 * devices and len(jax.local_devices()) == devices
    print(json.dumps(run(f"2x{devices}")))
