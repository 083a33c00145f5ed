"""Compile a real step for devices that are not there, and ask the compiler what it would use.

Separate because a process has the devices that it started with: other ones need a process of their own,
which this module starts and which runs this module (`python -m deepinfer_jax.lab_compile FOLDER`).
Read next: `lab_shapes.py` (the abstract arguments), `sharding/compiled_step.py` (the answer).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .config import ModelConfig
from .lab_shapes import StepShape, lower_step
from .model.numerics import OFFICIAL, Numerics
from .sharding.activations import XLA_CPU_OPTIONS
from .sharding.compiled_step import CompiledStep
from .sharding.errors import LayoutError
from .sharding.gpu_targets import GPU_TARGETS, topology
from .sharding.hlo import read_collectives
from .sharding.layout import Layout
from .sharding.layout_plan import STEPS, Collective
from .sharding.mesh import MeshShape

TARGETS = ("cpu", *GPU_TARGETS)
"""What a step can be compiled for: simulated devices of this machine, or GPUs without a GPU."""

AOT_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")
"""Packages that compile for GPUs: XLA's GPU backend, the assembler, the device library."""

_DEVICE_COUNT = "--xla_force_host_platform_device_count="


def compile_step(
    config: ModelConfig,
    mesh: MeshShape,
    layout: Layout,
    slots: int,
    context: int,
    step: str = "decode",
    target: str = "cpu",
    *,
    prefill_rows: int | None = None,
    numerics: Numerics = OFFICIAL,
) -> CompiledStep:
    """Compile a step as it would run, from shapes alone, in a process of its own if need be.

    Args:
        config: the architecture.
        mesh: the grid of devices, which need not exist.
        layout: on that mesh or any other.
        slots: sequences, over all devices.
        context: tokens that each slot can hold.
        step: "prefill" or "decode".
        target: one of `TARGETS`.
        prefill_rows: prompt rows of a prefill step, over all devices; a full step on each by default.
        numerics: the choice of arithmetic.

    Returns:
        The compiler's numbers for each device.

    Raises:
        LayoutError: a layout that does not fit, or an unknown step or target.
        ValueError: packages that are missing for a GPU target.
        RuntimeError: the compiling process died; its last words.
    """
    if step not in STEPS or target not in TARGETS:
        raise LayoutError(
            f"compile: got step {step!r} for {target!r}, expected one of {list(STEPS)} for one of "
            f"{list(TARGETS)}; choose from these"
        )
    shape = StepShape(config, mesh, layout.on(mesh), slots, context, step, prefill_rows, numerics)
    shape.check()
    if target != "cpu":
        require_aot_packages()
    elif jax.default_backend() == "cpu" and len(jax.devices()) >= mesh.num_devices:
        return _compile(shape, target)
    return _compile_elsewhere(shape, target)


def require_aot_packages() -> None:
    """Refuse a GPU target where the packages that compile for it are missing or of another version.

    Raises:
        ValueError: naming them and how to install them.
    """
    found: dict[str, str | None] = {}
    for name in AOT_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    missing = [name for name, version in found.items() if version is None]
    wanted = importlib.metadata.version("jaxlib")
    others = [f"{name} {found[name]}" for name in AOT_PACKAGES[:2] if found[name] not in (None, wanted)]
    if missing or others:
        got = ", ".join([*(f"no {name}" for name in missing), *others])
        raise ValueError(
            f"compiling for a GPU without one: got {got}, expected {', '.join(AOT_PACKAGES)}, the first two "
            f"of jaxlib's version {wanted}; install the optional extra (about 750 MB): "
            "pip install --constraint constraints.txt 'deepinfer-jax[aot]'"
        )


def _compile(shape: StepShape, target: str) -> CompiledStep:
    """Compile in this process, which has the devices; JAX's persistent cache, where it is on, may help."""
    devices, where = _devices(shape.mesh.num_devices, target)
    with where:
        start = time.perf_counter()
        compiled = lower_step(shape, devices).compile(XLA_CPU_OPTIONS if target == "cpu" else None)
        seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    return CompiledStep(
        step=shape.step,
        target=target,
        seconds_to_compile=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        # All that is allocated for one run. XLA's own peak leaves temporaries out on the CPU.
        peak_bytes=memory.total_allocation_bytes,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        collectives=_collectives(shape, text),
    )


def _collectives(shape: StepShape, text: str) -> tuple[Collective, ...]:
    """List the collectives of a program, called as JAX calls the operation that they come from."""
    if shape.mesh.num_devices == 1:
        return ()
    return tuple(
        Collective(
            step=shape.step,
            part=found.op_name.rsplit("/", 1)[-1] + " (data-dependent)" * found.depends_on_data,
            kind=found.kind,
            axes=found.axes,
            num_devices=found.num_devices,
            num_bytes=found.num_bytes,
            calls=found.calls,
        )
        for found in read_collectives(text, shape.mesh)
    )


def _devices(count: int, target: str) -> tuple[Sequence[Any], Any]:
    """Give devices to compile for, and the context in which kernels take them for the real ones."""
    if target == "cpu":
        return jax.devices("cpu")[:count], contextlib.nullcontext()
    from jax.experimental import topologies

    description = GPU_TARGETS[target].description()
    found = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=topology(count)
    ).devices
    return found, jax.default_device(found[0])


def _compile_elsewhere(shape: StepShape, target: str) -> CompiledStep:
    """Compile in a new process with as many devices as the mesh has."""
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder, "job"), Path(folder, "answer")
        job.write_bytes(pickle.dumps((shape, target)))
        command = [sys.executable, "-m", __name__, folder]
        environment = _environment(os.environ, shape.mesh.num_devices, target)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not answer.exists():
            raise RuntimeError(
                f"compiling the {shape.step} step for {target}: got exit code {done.returncode}, "
                f"expected an answer; its last words: {done.stderr.strip()[-2000:]!r}; make the mesh or the "
                "model smaller, or give the machine more memory"
            )
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def _environment(current: Any, num_devices: int, target: str) -> dict[str, str]:
    """Give the variables that JAX reads once, when it starts."""
    flags = [flag for flag in current.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    changed = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    # A program from a cache would say nothing of what compiling it takes.
    changed["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if target == "cpu":
        flags.append(f"{_DEVICE_COUNT}{num_devices}")
    # The same package as here, wherever it was imported from.
    package = str(Path(__file__).parents[1])
    changed["PYTHONPATH"] = os.pathsep.join(filter(None, [package, current.get("PYTHONPATH")]))
    return {**current, **changed, "XLA_FLAGS": " ".join(flags)}


def main(folder: str) -> None:
    """Answer the job in a folder: what was compiled, or the refusal."""
    shape, target = pickle.loads(Path(folder, "job").read_bytes())
    try:
        result: Any = _compile(shape, target)
    except ValueError as error:
        result = error
    Path(folder, "answer").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
