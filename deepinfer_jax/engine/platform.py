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


def program(step: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """Give a jitted step as it is compiled for the devices of a target.

    Args:
        step: of `step.py` or `speculate.py`; keyword-only arguments are static, and `state` is consumed.
        target: where it is to run.

    Returns:
        On one GPU the same function with command buffers; elsewhere the step itself. On several GPUs too, as
        what command buffers do between collectives has not been measured.
    """
    if platform_of(target) != GPU or target.mesh is not None:
        return step
    return with_command_buffers(step)


@functools.cache
def with_command_buffers(step: Callable[..., Any]) -> Callable[..., Any]:
    """Jit the function of a step once more, with `COMMAND_BUFFERS`."""
    function: Any = inspect.unwrap(step)
    parameters = inspect.signature(function).parameters.values()
    static = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    return jax.jit(
        function, static_argnames=static, donate_argnames=("state",), compiler_options=dict(COMMAND_BUFFERS)
    )
