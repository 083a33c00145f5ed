"""Measure the operations of `deepinfer_jax.kernels` on the released widths of their tables of cases.

Every call is one jitted program, waited for; the median of the repeats counts, launch included. Prints a
table and appends one JSON line for each number to `benchmarks/results/<device>.jsonl`.

    python benchmarks/kernels.py [--case released_decode_64 --case released_64] [--implementation reference]
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from generate import append_results, describe_run, print_results

from deepinfer_jax import kernels
from deepinfer_jax.kernels.cases import RELEASED
from deepinfer_jax.kernels.pallas.hyper_connection.cases import HyperCase
from deepinfer_jax.kernels.pallas.quantize_rows.cases import RowsCase
from deepinfer_jax.testing.battery import draw_case

OPS = (
    *("sparse_attention", "index_top_k", "grouped_experts", "engram_gather", "hyper_connection"),
    "quantize_rows",
)


def operation_of(name: str, case: Any) -> Any:
    """Give the function that a table's cases call."""
    if isinstance(case, HyperCase):
        return kernels.enter_site
    return kernels.pack_rows if isinstance(case, RowsCase) else getattr(kernels, name)


def median_seconds(run: Callable[[Any], Any], operands: Any, repeats: int) -> float:
    """Time calls of a compiled program, each waited for."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run(operands))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(name: str, case: Any, implementation: str | None, repeats: int) -> dict[str, Any]:
    """Time one case after a warm-up."""
    op = operation_of(name, case)
    operands, keywords = draw_case(op, case, jax.random.key(0))
    keywords |= {"implementation": implementation}
    run = jax.jit(lambda operands: op(**operands, **keywords))
    started = time.perf_counter()
    jax.block_until_ready(run(operands))
    compiled = time.perf_counter() - started
    return {
        "name": f"{name}/{case.name}",
        "value": round(1e6 * median_seconds(run, operands, repeats), 1),
        "unit": "us",
        "implementation": implementation or "best",
        "compile_s": round(compiled, 1),
        "operand_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(operands)),
    }


def measure_copy(repeats: int) -> dict[str, Any]:
    """Time reading and writing 1 GiB: the bandwidth that the other numbers stand beside."""
    values = jnp.zeros(2**28, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    add(values).block_until_ready()
    return {
        "name": "read and write 1 GiB of float32",
        "value": round(2 * values.nbytes / median_seconds(add, values, repeats) / 1e9, 1),
        "unit": "GB/s",
    }


def main(arguments: list[str]) -> None:
    """Measure, append to the results of this device, print a table."""
    parser = argparse.ArgumentParser(description="Measure operations.")
    parser.add_argument("--case", action="append", help="names of cases (default: all of released widths)")
    parser.add_argument("--implementation", default=None, help="a name (default: the best)")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls after a warm-up (default: 20)")
    options = parser.parse_args(arguments)
    about = describe_run(arguments, "benchmarks/kernels.py")
    results = [measure_copy(options.repeats)]
    append_results(results, about)
    for name in OPS:
        table = importlib.import_module(f"deepinfer_jax.kernels.pallas.{name}.cases").CASES
        for case in table:
            if case.name in options.case if options.case else RELEASED in case.tags:
                results.append(measure(name, case, options.implementation, options.repeats))
                append_results(results[-1:], about)
    print_results(results, about)


if __name__ == "__main__":
    main(sys.argv[1:])
