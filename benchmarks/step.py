"""Measure decode steps of a cut model of the released widths: time, memory, row invariance.

Weights are drawn on the device in the released storage; a short prompt runs in every slot, then slots are
put at the given context length and decode steps are timed. Memory is compared with arithmetic from the
configuration alone. Prints a table and appends one JSON line for each number to
`benchmarks/results/<device>.jsonl`.

    python benchmarks/step.py [--slots 1 --slots 8 --slots 64] [--context 8192] [--steps 20] [--variant]

With drafts, and against decoding without them (`spec.py`):

    python benchmarks/step.py --spec [--model nano|cut] [--concurrency 16 --concurrency 64] [--pairs 10]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from generate import append_results, describe_run, print_results

from deepinfer_jax.checkpoint.names import tensor_table
from deepinfer_jax.config import CacheConfig, ModelConfig
from deepinfer_jax.engine.platform import platform_of, program, suited
from deepinfer_jax.engine.target import num_row_shares, num_slot_shares, to_devices
from deepinfer_jax.model.backbone import backbone, head_logits
from deepinfer_jax.model.numerics import OFFICIAL, Numerics
from deepinfer_jax.model.rows import chunk_rows
from deepinfer_jax.plans import Admission, PromptSpan, prefill_plans
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.slot_parameters import slot_parameters
from deepinfer_jax.step import (
    ONE_DEVICE,
    EngineState,
    Target,
    admit_step,
    decode_step,
    initial_state,
    prefill_step,
)
from deepinfer_jax.testing.presets import random_resident_weights, released_cut

PROMPT_TOKENS = 40


def tree_bytes(tree: Any) -> int:
    """Count the bytes of all arrays of a tree."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def bytes_in_use() -> int | None:
    """Ask the device's allocator, None where it does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else int(stats["bytes_in_use"])


def expected_weight_bytes(config: ModelConfig) -> int:
    """Add up the tensors of the checkpoint's table, and the token map."""
    return sum(tensor.num_bytes for tensor in tensor_table(config).values()) + 4 * config.vocab_size


def expected_cache_bytes(config: ModelConfig, sizes: CacheConfig) -> int:
    """Compute the cache's bytes from the formats of spec/serving.md section 2."""
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    entry = config.head_dim * 9 // 16 + config.index_head_dim * 17 // 32
    pages = sizes.num_pages * sum(sizes.page_tokens // ratio * entry for ratio in ratios)
    window = config.num_hidden_layers * config.sliding_window * (config.head_dim + config.head_dim // 32)
    pending = ratios.count(2) * 2 * 4 * config.head_dim
    integers = 4 * (sizes.pages_per_slot + config.engram_max_ngram_size - 1 + 1)
    return pages + sizes.num_slots * (window + pending + integers)


def ready_state(
    weights: Any, config: ModelConfig, sizes: CacheConfig, numerics: Numerics, target: Target = ONE_DEVICE
) -> EngineState:
    """Admit and prefill one random prompt in every slot."""
    slots = sizes.num_slots
    options = {"config": config, "numerics": numerics, "target": target}
    is_forbidden = to_devices(np.zeros(config.vocab_size, bool), (), target)
    state = initial_state(is_forbidden, sizes=sizes, **options)
    params = [SamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True)] * slots
    nothing = np.zeros(slots, np.int32)
    admission = Admission(
        is_admitted=np.ones(slots, bool),
        page_table=np.arange(sizes.num_pages, dtype=np.int32).reshape(slots, -1),
        decoder_starts=nothing,
        lengths=nothing,
        tokens=nothing,
        is_running=np.zeros(slots, bool),
        prompt_lengths=np.full(slots, PROMPT_TOKENS, np.int32),
        num_generated=nothing,
        parameters=slot_parameters(params, config.eos_token_id),
    )
    state = admit_step(state, to_devices(admission, ("slots",), target), target=target)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (slots, PROMPT_TOKENS))
    spans = [PromptSpan(slot, prompts[slot].astype(np.int32), 0, PROMPT_TOKENS) for slot in range(slots)]
    shares = num_slot_shares(target), num_row_shares(target)
    for plan in prefill_plans(spans, slots, 64, None, *shares):
        state, _ = prefill_step(weights, state, to_devices(plan, ("slots",), target), **options)
    return state


def time_steps(step, state: EngineState, count: int) -> tuple[EngineState, list[float]]:
    """Time single steps, each waited for."""
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        state, output = step(state)
        output.tokens.block_until_ready()
        seconds.append(time.perf_counter() - started)
    return state, seconds


def measure(
    weights: Any, config: ModelConfig, numerics: Numerics, slots: int, context: int, steps: int
) -> list[dict[str, Any]]:
    """Measure decode with every slot active."""
    sizes = CacheConfig.for_slots(slots, context)
    before = bytes_in_use()
    state = ready_state(weights, config, sizes, numerics)
    cache_bytes, state_bytes = tree_bytes(state.cache), tree_bytes(state)
    used = None if before is None else bytes_in_use() - before
    is_active, decode = jnp.ones(slots, bool), program(decode_step, ONE_DEVICE, numerics)

    def step(state: EngineState):
        return decode(weights, state, is_active, config=config, numerics=numerics)

    started = time.perf_counter()
    state, _ = time_steps(step, state, 1)
    compiled = time.perf_counter() - started
    state = state.replace(lengths=jnp.full(slots, context - steps - 4, jnp.int32))
    state, _ = time_steps(step, state, 2)
    state, seconds = time_steps(step, state, steps)
    milliseconds = 1000 * statistics.median(seconds)
    what = f"decode step, {slots} slots at {context} tokens, batch_invariant={numerics.batch_invariant}"
    return [
        {"name": what, "value": round(milliseconds, 3), "unit": "ms", "compile_s": round(compiled, 1)},
        {
            "name": f"tokens/s of it, {slots} slots",
            "value": round(1000 * slots / milliseconds, 1),
            "unit": "/s",
        },
        {
            "name": f"cache, {slots} slots",
            "value": cache_bytes,
            "unit": "bytes",
            "expected": expected_cache_bytes(config, sizes),
            "state": state_bytes,
            "allocated_for_state": used,
        },
    ]


def check_row_invariance(weights: Any, config: ModelConfig, numerics: Numerics) -> dict[str, Any]:
    """Compare the logits of slots alone with those among 64 others, bit for bit."""
    sizes = CacheConfig.for_slots(64, 256)
    state = ready_state(weights, config, sizes, numerics)

    @jax.jit
    def logits_of(weights: Any, is_active: jax.Array, state: EngineState) -> jax.Array:
        rows = chunk_rows(state.tokens[:, None], state.lengths, is_active.astype(jnp.int32))
        hidden, _, _ = backbone(weights, config, rows, state.cache, numerics)
        return head_logits(hidden, weights, numerics)

    together = np.asarray(logits_of(weights, jnp.ones(64, bool), state))
    differing = 0
    for slot in (0, 1, 31, 63):
        alone = np.asarray(logits_of(weights, jnp.arange(64) == slot, state))
        differing += int((alone[slot] != together[slot]).sum())
    return {"name": "logits that differ alone and among 64", "value": differing, "unit": "elements"}


def main(arguments: list[str]) -> None:
    """Measure, append to the results of this device, print a table."""
    if "--spec" in arguments:
        # Its imports are not needed otherwise.
        from spec import main as measure_drafts

        return measure_drafts([argument for argument in arguments if argument != "--spec"])
    parser = argparse.ArgumentParser(description="Measure decode steps.")
    parser.add_argument("--spec", action="store_true", help="steps with drafts instead: see --spec --help")
    parser.add_argument("--slots", type=int, action="append", help="may be given more than once (1, 8, 64)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each slot (default: 8192)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: 20)")
    parser.add_argument("--variant", action="store_true", help="also without batch invariance")
    options = parser.parse_args(arguments)
    config, about, results = released_cut(), describe_run(arguments, "benchmarks/step.py"), []

    def record(found: list[dict[str, Any]]) -> None:
        results.extend(found)
        append_results(found, about)

    before = bytes_in_use()
    started = time.perf_counter()
    draw = jax.jit(lambda key: random_resident_weights(config, key))
    weights = jax.block_until_ready(draw(jax.random.key(0)))
    drawn = time.perf_counter() - started
    record(
        [
            {
                "name": "weights",
                "value": tree_bytes(weights),
                "unit": "bytes",
                "expected": expected_weight_bytes(config),
                "allocated": None if before is None else bytes_in_use() - before,
                "drawn_in_s": round(drawn, 1),
            }
        ]
    )
    official = suited(OFFICIAL, platform_of(ONE_DEVICE))
    choices = [official, replace(official, batch_invariant=False)][: 2 if options.variant else 1]
    for slots in options.slots or (1, 8, 64):
        for numerics in choices:
            record(measure(weights, config, numerics, slots, options.context, options.steps))
    record([check_row_invariance(weights, config, official)])
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None:
        record([{"name": "peak", "value": int(stats["peak_bytes_in_use"]), "unit": "bytes"}])
    print_results(results, about)


if __name__ == "__main__":
    main(sys.argv[1:])
