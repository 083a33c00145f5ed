"""Who may import whom, read from the source of every module.

Separate because the tree's shape is a promise of its own: a forbidden arrow fails here, in seconds.
Read next: `ARCHITECTURE.md` for the reasons; change `MAY_IMPORT` only by argument.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "deepinfer_jax"
ROOT = Path(__file__).parents[1] / PACKAGE

EVERYTHING = "*"

ENGINE_FRONT = {
    "step",
    "slot_steps",
    "checkpoint",
    "text",
    "sampling",
    "sampling_params",
    "slot_parameters",
    "engine_config",
    "plans",
    "config",
    "arrays",
    "model",
    "sharding",
    "assets",
}

MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "config_json": {"config"},
    "sampling_params": {"config"},
    "slot_parameters": {"config", "sampling_params"},
    "plans": {"config", "sampling_params", "slot_parameters"},
    "engine_config": {"config", "plans", "sampling_params"},
    "arrays": {"config"},
    "arithmetic": {"arrays"},
    "sharding": {"arrays"},
    "kernels": {"arrays", "arithmetic"},
    "model": {"arrays", "sharding", "kernels", "plans"},
    "sampling": {"arrays", "arithmetic", "sampling_params", "slot_parameters"},
    "spec_decode": {"model", "sampling", "plans"},
    # What the host learns from steps with drafts, and weighs them by.
    "spec_decode.calibrate": set(),
    "spec_decode.scaling": {"spec_decode.calibrate"},
    "spec_decode.calibration": {"sampling_params", "spec_decode.calibrate", "spec_decode.scaling"},
    "spec_decode.plots": {"spec_decode.calibrate"},
    "spec_decode.summary": set(),
    "spec_decode.stats": {"config", "spec_decode.calibration", "spec_decode.summary"},
    "spec_decode.costs": set(),
    "spec_decode.guard": set(),
    "spec_decode.rest": {"config", "plans"},
    "step_state": {"model", "sampling"},
    "step": {"model", "spec_decode", "sampling", "plans", "step_state"},
    "speculate": {"model", "spec_decode", "sampling", "plans", "step_state"},
    "slot_steps": {"step"},
    "lab": {"step", "sharding", "checkpoint.names", "lab_compile", "lab_model"},
    "lab_model": {"step", "sharding"},
    # Compiling is apart from predicting: a process of its own runs it.
    "lab_shapes": {"step", "sharding"},
    "lab_compile": {"lab_shapes"},
    "checkpoint": {"arrays", "sharding", "model.weights", "model.draft_weights", "config_json"},
    "engine": set(),
    # The host side decides without JAX, and without a model.
    "engine.pages": {"config"},
    "engine.prefix": {"config", "engine.pages"},
    "engine.request": {"config", "sampling_params", "engine.prefix"},
    "engine.places": {"config", "engine.pages", "engine.prefix", "engine.request"},
    "engine.admission": {"config", "plans", "slot_parameters", "engine.request"},
    "engine.lengths": {"engine.request"},
    "engine.scheduler": {
        *("config", "plans", "engine_config", "engine.places", "engine.admission", "engine.lengths"),
    },
    "engine.reading": {"engine.request"},
    "engine.stats": {"engine.prefix"},
    "engine.handoff": set(),
    # The device side knows no request, and both meet without any text.
    "engine.progress": set(),
    "engine.target": {"step", "sharding"},
    "engine.platform": {"step"},
    "engine.drafting": {"speculate", "engine_config", "spec_decode", "engine.target"},
    "engine.runner": {
        *("step", "speculate", "slot_steps", "plans"),
        *("engine.target", "engine.platform", "engine.progress", "engine.drafting"),
    },
    "engine.handover": {"model", "engine_config", "engine.handoff", "engine.request"},
    "engine.dispatch": set(),
    "engine.engine": {
        *("engine.scheduler", "engine.runner", "engine.dispatch", "engine.reading"),
        *("engine.handover", "engine.stats"),
    },
    "engine.generate": {"engine.engine"},
    "engine.load": {
        *("step", "checkpoint", "text", "assets"),
        *("engine.target", "engine.platform", "engine.progress"),
    },
    "engine.measure": {"engine.engine", "engine.load"},
    "engine.start": {"engine.measure"},
    "engine.confidences": {"engine.engine", "engine.load"},
    "engine.completion": {"engine.request", "engine.show"},
    "engine.jobs": {"text", "engine.completion"},
    # What a user sees knows how it looks; the arrow back is for types.
    "engine.show": {"engine.stats", "engine.completion", "engine.llm"},
    "engine.llm": {"engine", *ENGINE_FRONT},
    "engine.one_call": {"engine", *ENGINE_FRONT},
    "text": {"config", "sampling_params"},
    # Text besides the design's three: training renders its corpus with the tokenizer it ships.
    "training": {"model", "spec_decode", "checkpoint", "text", "assets"},
    "interop": {"model", "checkpoint"},
    "assets": set(),
    "testing": {EVERYTHING},
    "cli": {EVERYTHING},
    # The root names what users import; `__main__` is the one door to the command line.
    "": {EVERYTHING},
    "__main__": {"cli"},
}
"""Unit -> what it may import, besides itself and what those may import; longest matching name wins."""

FORBIDDEN_TO_ALL = {"cli": {"__main__"}}
"""Target -> the only other units that may import it, whatever `EVERYTHING` says."""

NEVER: dict[str, set[str]] = {"testing": {"engine", "cli"}}
"""Exceptions to `EVERYTHING`."""

ENGINE_HOST = (
    *("engine.request", "engine.scheduler", "engine.pages", "engine.prefix", "engine.places"),
    *("engine.admission", "engine.reading", "engine.stats", "engine.handoff", "engine.progress"),
    "engine.lengths",
    "engine.dispatch",
)
DRAFT_VALUES = tuple(
    f"spec_decode.{name}"
    for name in ("calibrate", "scaling", "calibration", "plots", "summary", "stats", "costs", "guard", "rest")
)
ENGINE_VALUES = ("engine.completion", "engine.jobs", "engine.show")
NO_JAX = (
    *("config", "config_json", "plans", "engine_config", "sampling_params", "slot_parameters", "text"),
    *ENGINE_HOST,
    *ENGINE_VALUES,
    *DRAFT_VALUES,
)
JAX_FAMILY = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}

JAX_INTERNALS_ALLOWED = "kernels.pallas.platform"


def is_inside(name: str, unit: str) -> bool:
    """Whether a dotted name is a unit or lies below it."""
    return name == unit or name.startswith(f"{unit}.")


def unit_of(name: str) -> str | None:
    """The longest entry of `MAY_IMPORT` that a module belongs to, None if there is none."""
    if name == "":
        return ""
    return max((unit for unit in MAY_IMPORT if unit and is_inside(name, unit)), key=len, default=None)


def reachable(unit: str) -> set[str]:
    """What a unit may import: itself, its row of the table, and what that row's units may import."""
    found: set[str] = set()
    pending = [unit]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(MAY_IMPORT.get(name, ()))
    return found


def imported_names(name: str, source: str, *, is_package: bool = False) -> list[tuple[str, int]]:
    """List (absolute dotted name, line) of everything a module imports, at any depth of its code.

    `from package import name` gives `package.name`: whether that is a module is left to the caller.
    """
    found = []
    own_parts = [PACKAGE, *filter(None, name.split("."))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            steps_up = node.level - is_package if node.level else 0
            base = own_parts[: len(own_parts) - steps_up] if node.level else []
            if node.module:
                base = [*base, *node.module.split(".")]
            found += [(".".join([*base, alias.name]), node.lineno) for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            found.append(("jax._src", node.lineno))
    return found


def is_module(target: str) -> bool:
    """Whether a dotted name below the package is a module on disk."""
    path = ROOT.joinpath(*target.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def violations(name: str, source: str, *, is_package: bool = False, is_module=is_module) -> list[str]:
    """Describe every forbidden import of one module."""
    unit = unit_of(name)
    if unit is None:
        return [f"{name}: no row in MAY_IMPORT"]
    allowed = reachable(unit)
    found = []
    for target, line in imported_names(name, source, is_package=is_package):
        where = f"{name or '__init__'}:{line}"
        head, _, rest = target.partition(".")
        if is_inside(target, "jax._src") and name != JAX_INTERNALS_ALLOWED:
            found.append(f"{where} uses {target}; only {JAX_INTERNALS_ALLOWED} may")
        if head in JAX_FAMILY and any(is_inside(name, row) for row in NO_JAX):
            found.append(f"{where} imports {target}; {unit} stays free of JAX")
        if head == PACKAGE:
            # What is imported may be an object of its module.
            module = rest if is_module(rest) else rest.rpartition(".")[0]
            if not is_allowed(unit, module, allowed):
                found.append(f"{where} imports {module or PACKAGE}; {unit} may not")
    # One import of several names is one arrow.
    return list(dict.fromkeys(found))


def is_allowed(unit: str, module: str, allowed: set[str]) -> bool:
    """Whether code of a unit may import a module of the package."""
    if unit and is_inside(module, unit):
        return True
    for target, importers in FORBIDDEN_TO_ALL.items():
        if is_inside(module, target):
            return unit in importers
    if any(is_inside(module, target) for target in NEVER.get(unit, ())):
        return False
    if EVERYTHING in allowed:
        return True
    return any(is_inside(module, target) for target in allowed if target)


def modules() -> list[tuple[str, Path]]:
    """List (dotted name below the package, path) of every module."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.mark.parametrize(("name", "path"), [pytest.param(*row, id=row[0] or PACKAGE) for row in modules()])
def test_imports_follow_the_table(name: str, path: Path) -> None:
    found = violations(name, path.read_text(), is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("config", "from .plans import StepPlan"),
        ("arrays", "from . import model"),
        ("kernels.quantize", "from ..model import linear"),
        ("kernels.quantize", "from deepinfer_jax.model.linear import project"),
        ("kernels.quantize", "def late():\n    import deepinfer_jax.model"),
        ("model.moe", "from ..step import decode_step"),
        ("checkpoint.reader", "from ..model.backbone import backbone"),
        ("lab", "from .checkpoint import reader"),
        ("engine.scheduler", "from ..step import decode_step"),
        ("engine.pages", "import jax.numpy as jnp"),
        ("engine.places", "import jax"),
        ("engine.admission", "from ..step import EngineState"),
        ("engine.reading", "from ..sampling.state import STOPPED"),
        ("engine.runner", "from .request import Request"),
        ("engine.engine", "from ..text.stream import TextStream"),
        ("engine.load", "from .engine import Engine"),
        ("engine.jobs", "import jax"),
        ("engine_config", "import jax"),
        ("engine_config", "from .engine.scheduler import Scheduler"),
        ("slot_parameters", "import jax.numpy as jnp"),
        ("plans", "from .engine_config import EngineConfig"),
        ("step", "from .slot_steps import save_step"),
        ("text.stream", "from ..plans import StepPlan"),
        ("engine.request", "from flax import struct"),
        ("text.tokenizer", "import jax"),
        ("text.tokenizer", "from ..arrays import Array"),
        ("step", "from .cli import main"),
        ("engine.llm", "from .. import cli"),
        ("", "from .cli import main"),
        ("testing.tiny", "from ..engine import llm"),
        ("model.moe", "from jax._src import core"),
        ("model.moe", "import jax\njax._src.core"),
        ("model.moe", "from .. import load"),
        ("surprise", ""),
    ],
)
def test_forbidden_arrow_is_found(name: str, source: str) -> None:
    assert len(_violations_in_the_design(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("model.moe", "from ..config import ModelConfig\nfrom . import rope\nfrom .rope import rotate"),
        ("step", "from .config import ModelConfig\nfrom .model.backbone import backbone"),
        ("checkpoint.reader", "from ..model.weights import weight_specs"),
        ("lab", "from .checkpoint import names"),
        ("engine.llm", "from . import scheduler\nfrom ..step import decode_step"),
        ("engine.scheduler", "from ..engine_config import EngineConfig\nfrom .places import Places"),
        ("engine.engine", "from ..engine_config import EngineConfig\nfrom ..step import Target"),
        ("engine.runner", "from ..slot_steps import save_step"),
        ("text.records", "from ..sampling_params import RequestError"),
        ("kernels.pallas.platform", "from jax._src import core"),
        ("__main__", "from .cli import main"),
        ("", "from .engine.generate import generate"),
        ("cli.generate", "from ..engine.generate import generate\nfrom .. import __version__"),
    ],
)
def test_listed_arrow_passes(name: str, source: str) -> None:
    assert _violations_in_the_design(name, source) == []


def test_what_stays_free_of_jax_does_so_at_run_time() -> None:
    """Importing a module runs its packages as well, and those of what it imports."""
    imports = "; ".join(f"import {PACKAGE}.{name}" for name in NO_JAX)
    code = f"import sys; {imports}; print(sorted({JAX_FAMILY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_package_imports_resolve_from_the_package_itself() -> None:
    assert imported_names("model", "from .moe import route", is_package=True) == [
        (f"{PACKAGE}.model.moe.route", 1)
    ]
    assert imported_names("", "from . import model", is_package=True) == [(f"{PACKAGE}.model", 1)]


def _violations_in_the_design(name: str, source: str) -> list[str]:
    # The examples speak of the whole design, so they must not depend on what is written so far.
    modules = {*MAY_IMPORT, "checkpoint.names", "checkpoint.reader", "model.backbone", "model.linear"}
    return violations(name, source, is_package=name == "", is_module=modules.__contains__)
