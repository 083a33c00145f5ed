"""`costs`: measure the step times that dynamic verification weighs, and keep them for later engines.

Separate because it only parses words, measures and prints.
Read next: `../engine/measure.py`, `../spec_decode/costs.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..plans import VERIFICATION_MODES
from .options import VERIFICATION_HELP, add_load_options, add_size_options

if TYPE_CHECKING:
    from ..spec_decode.costs import CostTable

DEFAULT_STEPS = 5

_DESCRIPTION = """\
Measure how long a decode step takes by the rows that it verifies, and what drafting
adds. With --drafts dynamic an engine of the same model, device, numerics, slots and
context weighs tokens against these times; without them it verifies all drafts.

The times are kept in the cache folder and hold for 30 days and one version of JAX.
"""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "costs",
        help="measure the step times that dynamic verification weighs",
        description=_DESCRIPTION,
        epilog="example: deepinfer_jax costs --slots 64 --max-context 8192",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_size_options(parser)
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of every sequence while it is measured (default: half of what a slot holds)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"steps of each kind, of which the median counts (default: {DEFAULT_STEPS})",
    )
    parser.add_argument(
        "--verification", default=VERIFICATION_MODES[0], choices=VERIFICATION_MODES, help=VERIFICATION_HELP
    )
    add_load_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, keep the table, and print it."""
    from ..assets import NANO_FOLDER
    from ..config_json import read_config
    from ..engine.load import load
    from ..engine.measure import measure_costs, refuse_without_drafts
    from ..engine_config import EngineConfig
    from ..sharding.mesh import MeshShape, simulate_devices
    from ..spec_decode.costs import default_path

    sizes = EngineConfig(
        num_slots=options.slots,
        max_context=options.max_context,
        drafts="dynamic",
        verification=options.verification,
    )
    # Before the weights are read, which may take minutes.
    config = read_config(NANO_FOLDER if options.model in (None, "nano") else Path(options.model))
    refuse_without_drafts(config)
    sizes.cache_sizes(config)
    if options.mesh is not None:
        simulate_devices(MeshShape.parse(options.mesh))
    model = load(
        *(options.model, options.numerics, not options.no_batch_invariant, options.cache_format),
        mesh=options.mesh,
        layout=options.layout,
    )
    with _progress_bar() as progress:
        table = measure_costs(model, sizes, options.steps, progress, context=options.context, keep=True)
    _print_table(table)
    print(f"kept in {default_path(table.engine)}")
    return 0


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], object] | None]:
    """Show how far it is on a terminal, nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from ..engine.progress import showing_bar

    columns = (TextColumn("measuring steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with showing_bar(*columns) as progress:
        if progress is None:
            yield None
            return
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print_table(table: CostTable) -> None:
    """Print what was measured."""
    from rich.console import Console
    from rich.table import Table

    engine = table.engine
    shown = Table("a step of one device", "ms", box=None)
    for rows, milliseconds in table.verify_ms.items():
        shown.add_row(f"{_counted(rows, 'row')}, no drafting", f"{milliseconds:.3f}")
    shown.add_row("the full block of every slot, no drafting", f"{table.uniform_ms:.3f}")
    for slots, milliseconds in table.draft_ms.items():
        shown.add_row(f"drafting adds, {_counted(slots, 'slot')} running", f"{milliseconds:.3f}")
    for slots, milliseconds in table.plain_ms.items():
        shown.add_row(
            f"a step that knows no drafts, {_counted(slots, 'slot')} running", f"{milliseconds:.3f}"
        )
    print(f"{engine.model} on {engine.device}, numerics {engine.numerics}, layout {engine.layout}")
    sizes = f"{_counted(engine.num_slots, 'slot')}, blocks of {engine.block_size} drafts"
    print(f"{sizes}, JAX {engine.jax_version}, {table.date}")
    Console().print(shown)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
