"""`params`: the table of a model's parameters, from its configuration alone.

Separate because it needs no weights and no device.
Read next: `../model/weights.py`.
"""

from __future__ import annotations

import argparse

PIPE_WIDTH = 200
"""Columns of the table when it is not printed to a terminal."""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "params",
        help="print the parameter table of a configuration",
        description="Print every weight with shape, logical axes, storage and size, from config.json alone.",
        epilog="example: deepinfer_jax params",
    )
    parser.add_argument("--model", default=None, metavar="PATH", help="folder of config.json (default: nano)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from ..arrays import spec_leaves
    from ..assets import NANO_FOLDER
    from ..checkpoint.names import expected_tensors
    from ..config_json import read_config
    from ..model.draft_weights import draft_weight_specs
    from ..model.weights import weight_specs

    config = read_config(NANO_FOLDER if options.model is None else options.model)
    table = Table("weight", "shape", "logical axes", "storage", "parameters", "bytes", box=None)
    totals = [0, 0]
    draft = draft_weight_specs(config)
    trees = [("", weight_specs(config)), *([("mtp.", draft)] if draft is not None else [])]
    for prefix, tree in trees:
        for path, spec in spec_leaves(tree):
            size = sum(tensor.num_bytes for tensor in expected_tensors(spec, config.is_quantized))
            totals[0] += spec.num_parameters
            totals[1] += size
            shape = " x ".join(str(length) for length in spec.stacked_shape)
            storage = spec.storage.value if config.is_quantized else "bf16"
            axes = ", ".join(spec.stacked_axes)
            table.add_row(prefix + path, shape, axes, storage, f"{spec.num_parameters:,}", f"{size:,}")
    table.add_row("total", "", "", "", f"{totals[0]:,}", f"{totals[1]:,}")
    # A pipe has no width of its own: give it room for whole lines.
    is_terminal = Console().is_terminal
    Console(width=None if is_terminal else PIPE_WIDTH).print(table)
    return 0
