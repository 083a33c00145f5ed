"""`doctor`: what is installed, what JAX sees, and what is off and why.

Separate because it must say something wherever the package is installed: every part is asked on its own,
and one that fails becomes a line that says so.
Read next: `../engine/load.py` (the cache folder), `../kernels/dispatch.py` (which implementation runs).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors")
CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
DISTRIBUTION = "deepinfer-jax"
MEMORY_FILE = Path("/proc/meminfo")
CHARACTERS_OF_AN_ERROR = 300

LATER = "not part of this version"
DRAFTS = "speculative drafts"


class Line(NamedTuple):
    """One thing that is reported: its name, words for a reader, and the same for a program."""

    name: str
    words: str
    value: Any


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "doctor",
        help="print versions, devices, memory, caches, and what is off and why",
        description="Print what is installed, what JAX sees, and which features are off and how to turn "
        "them on. Nothing is downloaded or changed.",
        epilog="example: deepinfer_jax doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print the same as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    sections = report()
    print(report_json(sections) if options.json else report_text(sections))
    return 0


def report() -> dict[str, list[Line]]:
    """Ask every probe.

    Returns:
        The lines of each section; a probe that failed has one line, which says how.
    """
    return {title: _asked(probe) for title, probe in SECTIONS.items()}


def report_text(sections: dict[str, list[Line]]) -> str:
    """Write the report as aligned text."""
    width = max(len(line.name) for lines in sections.values() for line in lines)
    blocks = [
        "\n".join([title, *(f"  {line.name:<{width}}  {line.words}" for line in lines)])
        for title, lines in sections.items()
    ]
    return "\n\n".join(blocks)


def report_json(sections: dict[str, list[Line]]) -> str:
    """Write the report as one JSON object: section -> name -> value."""
    values = {title: {line.name: line.value for line in lines} for title, lines in sections.items()}
    return json.dumps(values, indent=2)


def _asked(probe: Callable[[], list[Line]]) -> list[Line]:
    """Ask a probe; whatever it raises becomes its line."""
    try:
        return probe()
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:CHARACTERS_OF_AN_ERROR]
        return [Line("failed", words, {"error": words})]


def _versions() -> list[Line]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    lines = [
        Line("deepinfer_jax", *2 * (_version(DISTRIBUTION) or "not installed as a package",)),
        Line("Python", *2 * (platform.python_version(),)),
        Line("system", system, system),
    ]
    for name in PACKAGES:
        version = _version(name)
        lines.append(Line(name, version or "not installed", version))
    return lines


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Line]:
    import jax

    devices = jax.local_devices()
    lines = []
    for (backend, kind), count in Counter((one.platform, one.device_kind) for one in devices).items():
        same = [one for one in devices if (one.platform, one.device_kind) == (backend, kind)]
        memory = [_device_memory(one) for one in same]
        value = {"platform": backend, "kind": kind, "count": count, "memory": memory}
        name = kind if kind == backend else f"{kind} ({backend})"
        lines.append(Line(name, f"{count}, {_memory_words(memory)}", value))
    if jax.process_count() > 1:
        lines.append(Line("processes", str(jax.process_count()), jax.process_count()))
    return lines


def _device_memory(device: Any) -> dict[str, int] | None:
    """Ask a device's allocator, None where it does not say."""
    stats = device.memory_stats()
    if not stats:
        return None
    return {name: int(stats[name]) for name in ("bytes_in_use", "bytes_limit") if name in stats}


def _memory_words(memory: list[dict[str, int] | None]) -> str:
    known = [one for one in memory if one and "bytes_limit" in one]
    if not known:
        return "memory that of the host"
    used = [f"{_size(one.get('bytes_in_use', 0))} of {_size(one['bytes_limit'])}" for one in known]
    return f"memory in use of what JAX may take: {', '.join(used)}"


def _host() -> list[Line]:
    page = os.sysconf("SC_PAGE_SIZE")
    total, available = (page * os.sysconf(f"SC_{name}") for name in ("PHYS_PAGES", "AVPHYS_PAGES"))
    if MEMORY_FILE.is_file():
        # Free pages alone leave out those that hold files and would be given up.
        fields = dict(line.split(":") for line in MEMORY_FILE.read_text().splitlines())
        available = 1024 * int(fields["MemAvailable"].split()[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        Line("memory", _size(total), total),
        Line("available", _size(available), available),
        Line("cores for this process", str(cores), cores),
    ]


def _cache() -> list[Line]:
    from ..engine.load import use_compilation_cache

    folder = use_compilation_cache()
    sizes = [_file_size(path) for path in folder.glob("*")]
    programs = sum(1 for _ in folder.glob("*-cache"))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    words = "yes" if is_writable else f"no: {existing} cannot be written; set JAX_COMPILATION_CACHE_DIR"
    return [
        Line("folder", str(folder), str(folder)),
        Line("programs", f"{programs:,}, {_size(sum(sizes))}", {"count": programs, "bytes": sum(sizes)}),
        Line("writable", words, is_writable),
    ]


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        # Another process may have removed it just now.
        return 0


def _embedded_model() -> list[Line]:
    from ..arrays import spec_leaves
    from ..assets import NANO_FOLDER
    from ..config_json import read_config
    from ..model.draft_weights import draft_weight_specs
    from ..model.weights import weight_specs

    config = read_config(NANO_FOLDER)
    draft = draft_weight_specs(config)
    trees = (weight_specs(config), () if draft is None else draft)
    parameters, drafting = (sum(spec.num_parameters for _, spec in spec_leaves(tree)) for tree in trees)
    num_bytes = sum(path.stat().st_size for path in NANO_FOLDER.glob("*.safetensors"))
    return [
        Line("folder", str(NANO_FOLDER), str(NANO_FOLDER)),
        Line("parameters", f"{parameters:,}", parameters),
        Line("draft parameters", f"{drafting:,}", drafting),
        Line("weights", _size(num_bytes), num_bytes),
    ]


def _features() -> list[Line]:
    probes: dict[str, Callable[[], str | Line | None]] = {
        "GPU": _gpu,
        "compile for absent GPUs": _compile_for_gpus,
        **{f"kernel {name}": lambda name=name: _kernel(name) for name in _kernel_names()},
        "training": lambda: _module("optax", "pip install 'deepinfer-jax[train]'"),
        "plots": lambda: _module("matplotlib", "pip install 'deepinfer-jax[train]'"),
        "progress in notebooks": lambda: _module("ipywidgets", "pip install ipywidgets"),
        DRAFTS: _drafts,
        "images": lambda: f"{LATER}; the vision tensors of a checkpoint are not loaded",
        "chat": lambda: f"{LATER}; prompts are plain text or token ids",
        "structured output": lambda: LATER,
    }
    return [_feature(name, probe) for name, probe in probes.items()]


def _feature(name: str, probe: Callable[[], str | Line | None]) -> Line:
    """Report one feature; its probe gives the reason why it is off, or a line of its own."""
    try:
        reason = probe()
    except Exception as error:
        reason = f"could not be asked: {type(error).__name__}: {error}"
    if isinstance(reason, Line):
        return reason
    if reason is None:
        return Line(name, "on", {"on": True})
    words = " ".join(reason.split())
    return Line(name, f"off  {words}", {"on": False, "reason": words})


def _drafts() -> str | Line:
    """Say whether the embedded model drafts, and whether step times of the default engine are known."""
    from ..assets import NANO_FOLDER
    from ..config_json import read_config
    from ..engine.load import Model
    from ..engine.measure import find_costs
    from ..engine_config import EngineConfig
    from ..model.numerics import OFFICIAL

    config = read_config(NANO_FOLDER)
    if not config.draft.num_stages:
        return "the embedded model has no draft stages; use a checkpoint with `mtp.*` tensors"
    # Nothing runs, so no weights are read.
    model: Any = Model(config, None, OFFICIAL, None, name=NANO_FOLDER.name)  # pyright: ignore[reportArgumentType]
    table, reason = find_costs(model, EngineConfig())
    if table is None:
        words = f"on   drafts='dynamic' verifies all drafts: {reason} (run: deepinfer_jax costs)"
        return Line(DRAFTS, words, {"on": True, "costs": None, "reason": reason})
    words = f"on   step times of the default engine were measured on {table.date}"
    return Line(DRAFTS, words, {"on": True, "costs": table.date})


def _gpu() -> str | None:
    import jax

    if any(device.platform == "gpu" for device in jax.devices()):
        return None
    plugins = [f"{name} {version}" for name in CUDA_PLUGINS if (version := _version(name))]
    if not plugins:
        return "no CUDA backend is installed; on a machine with a GPU: pip install 'jax[cuda13]'"
    chosen = os.environ.get("JAX_PLATFORMS")
    how = f"JAX_PLATFORMS={chosen}; unset it" if chosen else "check nvidia-smi, and its driver's version"
    return f"{plugins[0]} is installed, but JAX finds no GPU: {how}"


def _compile_for_gpus() -> str | None:
    from ..lab_compile import require_aot_packages

    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "needs Linux on x86-64"
    try:
        require_aot_packages()
    except ValueError as error:
        return str(error)


def _kernel_names() -> list[str]:
    """List the operations that have a table of implementations."""
    from ..kernels import pallas

    return [
        module.name
        for module in pkgutil.iter_modules(pallas.__path__)
        if module.ispkg and (Path(pallas.__path__[0]) / module.name / "api.py").is_file()
    ]


def _kernel(name: str) -> str | None:
    """Say which functions of an operation have nothing but their reference, None if none is left to it."""
    api = importlib.import_module(f"..kernels.pallas.{name}.api", __package__)
    left = {}
    for key, table in sorted(vars(api).items()):
        if key.endswith("IMPLEMENTATIONS") and (why := _why_reference(table)) is not None:
            left.setdefault(why, []).append(key.removesuffix("IMPLEMENTATIONS").strip("_").lower())
    parts = [f"{', '.join(names)}: {why}".removeprefix(": ") for why, names in left.items()]
    return "; ".join(parts) or None


def _why_reference(table: Mapping[str, Any]) -> str | None:
    """Say why a table's first choice is the reference, None if it is not."""
    from ..kernels.dispatch import Unavailable

    reasons = [f"{word}: {one.reason}" for word, one in table.items() if isinstance(one, Unavailable)]
    usable = [word for word, one in table.items() if not isinstance(one, Unavailable)]
    if usable and usable[0] != "reference":
        return None
    runs = "the reference runs" if usable else "nothing can run"
    return f"{runs} ({'; '.join(reasons) or 'nothing else is written yet'})"


def _module(name: str, how: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"no {name}; {how}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


SECTIONS: dict[str, Callable[[], list[Line]]] = {
    "versions": _versions,
    "devices": _devices,
    "host": _host,
    "compiled programs": _cache,
    "embedded model": _embedded_model,
    "features": _features,
}
"""What is reported, in this order."""
