"""`layout`: what a layout of the model on many devices would cost, before there are devices or weights.

Separate because it only parses words and prints.
Read next: `../lab.py` (the predictions), `../sharding/report/` (what is printed).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..sharding.layout_plan import LayoutPlan
    from ..sharding.mesh import MeshShape

PIPE_WIDTH = 140
"""Columns when the report is not printed to a terminal."""

MOST_LISTED = 20
"""Layouts of a sweep that are printed."""

DEFAULT_DEVICES = 64
DEFAULT_PRESET = "data+expert"

_DESCRIPTION = """\
Predict how a model would run on many devices: does it fit into their memory, what
do they send to each other, how long does a step take. Nothing is loaded, and no
device is needed.

  device   one chip with a memory of its own, such as an H200
  mesh     the devices as a grid with named axes: 8x8 is 64 devices, 8 along an axis
           called "data" and 8 along one called "model"
  layout   which parts of the model are divided along which axes of the mesh; what is
           not divided lies on every device
  slots    sequences that are generated at once, over all devices
  context  tokens, prompt and answer together, that each slot can hold

layouts that have names:
  single        nothing is divided
  data          each device has its own slots and the whole model
  expert        each device has its own experts; all compute all slots
  data+expert   both, over the same devices: the most tokens a second
  tensor        every layer is divided: the fastest step on a few devices
  weights-only  weights are stored divided and put together before each use
  sequence      the rows of one long prompt are divided, and experts
"""

_EPILOG = """\
examples:
  deepinfer_jax layout --devices 64 --preset data+expert --slots 4096 --context 131072
  deepinfer_jax layout --mesh 2x4 --compare data+expert,tensor,weights-only --slots 64
  deepinfer_jax layout --devices 8 --sweep --slots 64 --context 32768
"""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "layout",
        help="predict memory and speed of a model on many devices",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=int, metavar="N", help="how many (default: 64, or those of --mesh)")
    parser.add_argument(
        "--mesh", metavar="GRID", help="8x8, or data=8,model=8 (default: all devices along one axis)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--preset", metavar="NAME", help=f"the layout (default: {DEFAULT_PRESET})")
    which.add_argument("--compare", metavar="NAMES", help="several layouts side by side, as in data,expert")
    which.add_argument("--sweep", action="store_true", help="all layouts on all grids, the best first")
    parser.add_argument(
        "--objective",
        default="throughput",
        metavar="GOAL",
        help="what is best in a sweep: throughput (default) or latency",
    )
    parser.add_argument("--slots", type=int, default=4096, metavar="N", help="(default: 4096)")
    parser.add_argument("--context", type=int, default=131072, metavar="TOKENS", help="(default: 131072)")
    parser.add_argument(
        "--prefill-rows", type=int, metavar="N", help="prompt tokens read in one step, over all devices"
    )
    parser.add_argument(
        "--model",
        default="released",
        metavar="MODEL",
        help="released (default), nano, or a folder that holds config.json",
    )
    parser.add_argument("--device", default="H200", metavar="NAME", help="H200 (default), B200 or Ascend950")
    parser.add_argument("--svg", metavar="FILE", help="write a picture of who holds what")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument(
        "--compile",
        choices=("cpu", "h200", "b200"),
        help="also compile the decode step for as many imagined devices and compare; takes minutes",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a report on one layout, or a comparison of several."""
    config, mesh = _config(options.model), _mesh(options)
    if options.sweep or options.compare is not None:
        _require_one_layout(options)
        plans, notes = _sweep(options, config, mesh) if options.sweep else _compare(options, config, mesh)
        _print_comparison(options, plans, notes)
    else:
        plan = _plan(options, config, mesh, options.preset or DEFAULT_PRESET)
        if options.compile not in (None, "cpu"):
            from ..lab_compile import require_aot_packages

            require_aot_packages()
        _print_report(options, plan)
        if options.compile is not None:
            return _print_compiled(options, plan)
    return 0


def _print_report(options: argparse.Namespace, plan: LayoutPlan) -> None:
    from ..sharding.report import page, report_html, report_svg, report_text

    # Files first: after a refusal standard output is empty.
    if options.svg is not None:
        _write("--svg", options.svg, report_svg(plan))
    if options.html is not None:
        _write("--html", options.html, page(f"Layout {plan.layout.name}", report_html(plan)))
    width, is_coloured = _paper()
    print(report_text(plan, width, is_coloured=is_coloured), end="", flush=True)


def _print_comparison(options: argparse.Namespace, plans: Sequence[LayoutPlan], notes: list[str]) -> None:
    from ..sharding.report import comparison_html, comparison_text, page

    if options.html is not None:
        _write("--html", options.html, page("Layouts", comparison_html(plans)))
    width, is_coloured = _paper()
    print(comparison_text(plans, width, is_coloured=is_coloured), end="")
    for note in notes:
        print(note)


def _print_compiled(options: argparse.Namespace, plan: LayoutPlan) -> int:
    """Compile and print; a compiler that died is told in one line, and is not the user's input."""
    from ..engine.progress import working_on
    from ..lab_compile import compile_step
    from ..sharding.report import compiled_text
    from . import EXIT_FAILED

    try:
        with working_on(f"compiling the decode step for {plan.mesh.num_devices} imagined devices"):
            compiled = compile_step(
                plan.config, plan.mesh, plan.layout, plan.num_slots, plan.context, "decode", options.compile
            )
    except RuntimeError as error:
        print(f"deepinfer_jax layout: {error}", file=sys.stderr)
        return EXIT_FAILED
    width, is_coloured = _paper()
    print(compiled_text(plan, compiled, width, is_coloured=is_coloured), end="")
    return 0


def _plan(options: argparse.Namespace, config: ModelConfig, mesh: MeshShape, name: str) -> LayoutPlan:
    from ..lab import plan
    from ..sharding.presets import find_layout

    layout, rows = find_layout(name), options.prefill_rows
    return plan(config, mesh, layout, options.slots, options.context, options.device, prefill_rows=rows)


def _compare(
    options: argparse.Namespace, config: ModelConfig, mesh: MeshShape
) -> tuple[Sequence[LayoutPlan], list[str]]:
    """Plan each layout that was named; one that is refused does not hide the others."""
    from ..lab import compare
    from ..sharding.errors import LayoutError
    from ..sharding.presets import find_layout

    names = [name.strip() for name in options.compare.split(",")]
    for name in names:
        find_layout(name)
    plans, refused = [], []
    for name in names:
        try:
            plans.append(_plan(options, config, mesh, name))
        except LayoutError as error:
            refused.append(str(error))
    if not plans:
        raise LayoutError(refused[0])
    return compare(plans), [f"refused: {reason}" for reason in refused]


def _sweep(
    options: argparse.Namespace, config: ModelConfig, mesh: MeshShape
) -> tuple[Sequence[LayoutPlan], list[str]]:
    from ..lab import sweep

    found = sweep(
        *(config, mesh.num_devices, options.slots, options.context, options.device, options.objective),
        prefill_rows=options.prefill_rows,
    )
    notes = []
    if len(found) > MOST_LISTED:
        notes.append(f"{len(found) - MOST_LISTED} more were tried and are slower.")
    if found.refused:
        notes.append(
            f"{len(found.refused)} more cannot be; --preset NAME --mesh GRID says why, as for layout "
            f"{found.refused[0].layout} on mesh {found.refused[0].mesh}."
        )
    return found[:MOST_LISTED], notes


def _require_one_layout(options: argparse.Namespace) -> None:
    """Refuse what belongs to one layout beside several."""
    several = "--sweep" if options.sweep else "--compare"
    for name in ("svg", "compile"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"--{name}: got {several} as well, expected one layout; choose it with --preset NAME"
            )


def _config(model: str) -> ModelConfig:
    from ..assets import NANO_FOLDER, RELEASED_FOLDER
    from ..config_json import read_config

    path = Path({"released": RELEASED_FOLDER, "nano": NANO_FOLDER}.get(model, model))
    return read_config(path.parent if path.name == "config.json" else path)


def _mesh(options: argparse.Namespace) -> MeshShape:
    """Read the grid, and check that it has as many devices as were asked for."""
    from ..sharding.errors import LayoutError
    from ..sharding.mesh import MeshShape

    wanted = options.devices
    if wanted is not None and wanted < 1:
        raise LayoutError(f"--devices: got {wanted}, expected 1 or more; write --devices 8")
    if options.mesh is None:
        return MeshShape.parse(str(wanted or DEFAULT_DEVICES))
    mesh = MeshShape.parse(options.mesh)
    if wanted not in (None, mesh.num_devices):
        raise LayoutError(
            f"--devices: got {wanted} and a mesh {mesh}, expected its {mesh.num_devices}; leave --devices out"
        )
    return mesh


def _paper() -> tuple[int, bool]:
    """Give the columns to fill, and whether colours may be used."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        return PIPE_WIDTH, False
    return shutil.get_terminal_size().columns, console.color_system is not None and not console.no_color


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{option}: got {path!r}, which cannot be written ({error.strerror}), expected a file "
            "in a folder that exists; choose another path"
        ) from error
