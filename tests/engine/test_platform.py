"""What a platform changes of an engine: tiles and compiler options, never arithmetic.

Separate because no test here has another platform than the CPU; a GPU's programs are only compiled.
Read next: `benchmarks/step.py --spec --dispatch`, which runs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, SamplingParams, load
from deepinfer_jax.engine import platform
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.platform import (
    COMMAND_BUFFERS,
    GPU_ROW_TILE,
    GPU_SAMPLING_TILE,
    REPEATABLE,
    compiled_with,
    compiler_options,
    platform_of,
    program,
    suited,
)
from deepinfer_jax.engine.target import make_target
from deepinfer_jax.lab_compile import require_aot_packages
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL
from deepinfer_jax.sharding.hlo import read_computations
from deepinfer_jax.speculate import speculate_step
from deepinfer_jax.step import ONE_DEVICE, decode_step, encode_step, prefill_step
from deepinfer_jax.testing.presets import SMALLEST_DRAFTED, random_weights

STEPS = (decode_step, encode_step, prefill_step, speculate_step)


def test_a_target_is_on_the_platform_of_its_devices() -> None:
    assert platform_of(ONE_DEVICE) == "cpu"
    assert platform_of(make_target(SMALLEST_DRAFTED, "2", "data")) == "cpu"


@pytest.mark.parametrize("numerics", [OFFICIAL, FLOAT32])
def test_a_gpu_has_larger_tiles_and_the_same_arithmetic(numerics: Any) -> None:
    found = suited(numerics, "gpu")
    assert (found.row_tile, found.sampling_tile) == (GPU_ROW_TILE, GPU_SAMPLING_TILE)
    assert replace(found, row_tile=numerics.row_tile, sampling_tile=numerics.sampling_tile) == numerics
    assert suited(numerics, "cpu") == numerics


def test_a_loaded_model_has_the_tiles_of_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().numerics == OFFICIAL
    monkeypatch.setattr("deepinfer_jax.engine.load.platform_of", lambda target: "gpu")
    assert load().numerics.row_tile == GPU_ROW_TILE


@pytest.mark.parametrize("step", STEPS)
def test_only_gpus_get_programs_of_their_own(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program(step, ONE_DEVICE, OFFICIAL) is step
    monkeypatch.setattr(platform, "platform_of", lambda target: "gpu")
    own = compiled_with(step, tuple({**REPEATABLE, **COMMAND_BUFFERS}.items()))
    assert program(step, ONE_DEVICE, OFFICIAL) is own is not step


def test_no_clock_decides_what_must_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, varying = make_target(SMALLEST_DRAFTED, "2", "data"), replace(OFFICIAL, batch_invariant=False)
    assert compiler_options(ONE_DEVICE, OFFICIAL) == compiler_options(mesh, OFFICIAL) == {}
    monkeypatch.setattr(platform, "platform_of", lambda target: "gpu")
    assert compiler_options(ONE_DEVICE, OFFICIAL) == {**REPEATABLE, **COMMAND_BUFFERS}
    assert compiler_options(ONE_DEVICE, varying) == COMMAND_BUFFERS
    assert compiler_options(mesh, OFFICIAL) == REPEATABLE
    assert compiler_options(mesh, varying) == {}


def tokens_of(options: EngineConfig, numerics: Any = FLOAT32) -> list[list[int]]:
    """Answer a few prompts."""
    weights = random_weights(SMALLEST_DRAFTED, jax.random.key(4))
    engine = Engine(weights, SMALLEST_DRAFTED, numerics, options)
    params = [SamplingParams(max_tokens=9, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    requests = [engine.submit([5, 6, 7 + place], one) for place, one in enumerate(params)]
    while engine.has_work:
        engine.step()
    engine.close()
    return [request.token_ids for request in requests]


@pytest.mark.parametrize("drafts", ["off", "fixed"])
def test_programs_made_for_a_gpu_are_the_same_steps(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the options that a CPU refuses: static arguments and the donated state are found."""
    options = EngineConfig(num_slots=8, max_context=128, drafts=drafts)
    expected = tokens_of(options)
    used: list[str] = []

    def without_options(step: Any, given: Any) -> Any:
        used.append(step.__name__)
        return compiled_with(step, ())

    monkeypatch.setattr(platform, "compiled_with", without_options)
    monkeypatch.setattr(platform, "platform_of", lambda target: "gpu")
    assert tokens_of(options) == expected
    assert {"prefill_step", "decode_step" if drafts == "off" else "speculate_step"} <= set(used)


@pytest.mark.parametrize("drafts", ["off", "fixed"])
def test_larger_tiles_give_the_same_tokens_here(drafts: str) -> None:
    options = EngineConfig(num_slots=8, max_context=128, drafts=drafts)
    assert tokens_of(options, suited(FLOAT32, "gpu")) == tokens_of(options)


@pytest.fixture(scope="module")
def gpu_dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile for an H200 without one, and give the folder of what XLA wrote down."""
    try:
        require_aot_packages()
    except ValueError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("dumps")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text",
    }
    script = Path(__file__).with_name("compile_drafts_for_gpu.py")
    subprocess.run([sys.executable, str(script)], env=environment, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("step", ["speculate_step", "decode_step"])
def test_a_step_is_one_graph_on_a_gpu(step: str, gpu_dumps: Path) -> None:
    """All of XLA's launches lie in a single command buffer."""
    (path,) = gpu_dumps.glob(f"*{step}*.thunk_sequence_after_thunk_passes.txt")
    top = [line.split()[1] for line in path.read_text().splitlines() if line[:1].isdigit()]
    assert Counter(top) == {"kCommandBuffer": 1}
    assert np.sum(["kWhile" in line for line in path.read_text().splitlines()]) > 3


def found_in(pattern: str, line: str) -> str:
    """Give the first group of a pattern that must be there."""
    match = re.search(pattern, line)
    assert match, (pattern, line)
    return match[1]


def product_cuts(path: Path) -> dict[str, set[str]]:
    """Read how the matrix products of a program are cut, by what they multiply."""
    bodies, _ = read_computations(path.read_text())
    cuts: dict[str, set[str]] = {}
    for line in (line for body in bodies.values() for line in body if "__triton_nested_gemm_fusion" in line):
        own = bodies[found_in(r"calls=%([\w.-]+)", line)]
        shapes = dict(re.findall(r"%([\w.-]+) = (\S+) ", "\n".join(own)))
        (dot,) = (line for line in own if " dot(" in line)
        left, right = re.findall(r"%([\w.-]+)", dot)[1:3]
        dims = re.findall(r"\w+_dims=\{[\d,]*\}", dot)
        product = f"{found_in(r'= (\S+) dot', dot)} = {shapes[left]} x {shapes[right]} {' '.join(dims)}"
        tile, step = found_in(r'"output_tiles":(\[.*?\}\])', line), found_in(r'"sizes":(\[.*?\])', dot)
        cuts.setdefault(product, set()).add(f"{tile}, {step} at a time")
    return cuts


@pytest.mark.slow
def test_products_are_cut_alike_with_and_without_drafts_on_a_gpu(gpu_dumps: Path) -> None:
    """Else the last bits of a sum, and with them tokens, depend on what else a program holds."""
    (plain,) = gpu_dumps.glob("*decode_step*gpu_after_optimizations.txt")
    (drafted,) = gpu_dumps.glob("*speculate_step*gpu_after_optimizations.txt")
    expected, found = product_cuts(plain), product_cuts(drafted)
    assert len(expected) > 10
    assert all(len(cuts) == 1 for cuts in expected.values())
    assert {product: found[product] for product in expected} == expected
