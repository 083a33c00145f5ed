"""Options that several verbs share: which model runs, how, and where.

Separate so that a word means the same everywhere.
Read next: `generate.py`, `batch.py`.
"""

from __future__ import annotations

import argparse

from ..plans import PREFILL_MODES


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which model runs, how, and where.

    Args:
        parser: of a verb.
    """
    parser.add_argument("--model", default=None, metavar="PATH", help="checkpoint folder (default: nano)")
    parser.add_argument(
        "--prefill",
        default=PREFILL_MODES[0],
        choices=PREFILL_MODES,
        help="bounded: the decoder half sees only the end of a long prompt (faster, approximate)",
    )
    parser.add_argument(
        "--no-batch-invariant",
        action="store_true",
        help="let a prompt's tokens depend on what runs beside it (faster for a few prompts)",
    )
    parser.add_argument("--numerics", default="official", help="official (default) or float32")
    parser.add_argument("--cache-format", help="fp4, fp8, bf16 or float32 (default: the numerics' own)")
    parser.add_argument(
        "--mesh",
        metavar="SIZES",
        help="run on several devices, as a grid such as 8, 2x4 or data=2,model=4 (default: one device; "
        "simulated devices where there is only a CPU)",
    )
    parser.add_argument(
        "--layout",
        metavar="NAME",
        help="what lies where on the mesh, such as data+expert (default), tensor or sequence; "
        "`deepinfer_jax layout --help` lists all",
    )
