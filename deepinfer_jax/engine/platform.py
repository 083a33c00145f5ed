"""What a platform wants of the same programs: how many rows at once, and which options of the compiler.

Separate because neither the model nor a step knows a device, and an engine has to.
Read next: `load.py` and `runner.py`, which ask.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from ..model.numerics import Numerics
from ..step import Target

GPU = "gpu"

GPU_ROW_TILE, GPU_SAMPLING_TILE = 256, 64
"""Rows of a tile on a GPU, which pays for reading weights and starting kernels; a CPU pays for every row."""

COMMAND_BUFFERS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUSTOM_CALL,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
"""Kernels, loops and conditionals become CUDA graphs; else the host waits for the value of each condition.

Source: spec/platform.md section 8, measured by `benchmarks/step.py --spec --dispatch`.
"""

REPEATABLE = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_experimental_cost_model_gemm_tiling_default": True,
}
"""Products are cut as XLA's cost model says, not as its clock does while it compiles.

A clock decides anew in every program and run, and how a sum is cut decides its last bits: autotuned steps
with drafts and without gave different tokens on an H200. Without the cost model every product would be cut
into 16 by 8 values, which products of a released model's width cannot afford (measured).
"""


def platform_of(target: Target) -> str:
    """Name the platform of the devices that a target is on: "cpu", "gpu", or a plugin's."""
    return (jax.devices()[0] if target.mesh is None else target.mesh.devices.flat[0]).platform


def suited(numerics: Numerics, platform: str) -> Numerics:
    """Give numerics the tiles that suit a platform; their arithmetic stays.

    Args:
        numerics: the choice of arithmetic.
        platform: from `platform_of`.

    Returns:
        The same with other tiles.
    """
    if platform != GPU:
        return numerics
    return replace(numerics, row_tile=GPU_ROW_TILE, sampling_tile=GPU_SAMPLING_TILE)


def program(step: Callable[..., Any], target: Target, numerics: Numerics) -> Callable[..., Any]:
    """Give a jitted step as it is compiled for the devices of a target.

    Args:
        step: of `step.py` or `speculate.py`; keyword-only arguments are static, and `state` is consumed.
        target: where it is to run.
        numerics: the choice of arithmetic that it is called with.

    Returns:
        On GPUs the same function with `compiler_options`; elsewhere the step itself.
    """
    options = compiler_options(target, numerics)
    return compiled_with(step, tuple(options.items())) if options else step


def compiler_options(target: Target, numerics: Numerics) -> dict[str, Any]:
    """Choose the options of steps for the devices of a target, none but on GPUs.

    On several GPUs there are no command buffers, as what they do between collectives has not been measured.
    """
    if platform_of(target) != GPU:
        return {}
    repeatable = REPEATABLE if numerics.batch_invariant else {}
    return {**repeatable, **(COMMAND_BUFFERS if target.mesh is None else {})}


@functools.cache
def compiled_with(step: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Jit the function of a step once more, with options of the compiler."""
    function: Any = inspect.unwrap(step)
    parameters = inspect.signature(function).parameters.values()
    static = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    return jax.jit(
        function, static_argnames=static, donate_argnames=("state",), compiler_options=dict(options)
    )
