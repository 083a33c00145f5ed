"""Options that several verbs share: which model runs, how, where, and with which drafts.

Separate so that a word means the same everywhere.
Read next: `generate.py`, `batch.py`, `costs.py`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..plans import DEFAULT_SLOTS, DRAFT_MODES, PREFILL_MODES, SLOT_BUCKETS, VERIFICATION_MODES

if TYPE_CHECKING:
    from ..spec_decode.summary import DraftSummary

VERIFICATION_HELP = (
    "how drafts are accepted: coupled (default), so that the tokens are those without drafts; rejection or "
    "block, which accept more and give other tokens of the same distribution"
)

DEFAULT_THRESHOLD = 0.5


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which model runs, how, where, and with which drafts.

    Args:
        parser: of a verb.
    """
    add_load_options(parser)
    parser.add_argument(
        "--prefill",
        default=PREFILL_MODES[0],
        choices=PREFILL_MODES,
        help="bounded: the decoder half sees only the end of a long prompt (faster, approximate)",
    )
    _add_draft_options(parser)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which model is loaded, and onto what.

    Args:
        parser: of a verb.
    """
    parser.add_argument("--model", default=None, metavar="PATH", help="checkpoint folder (default: nano)")
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


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that size an engine.

    Args:
        parser: of a verb.
    """
    slots = ", ".join(map(str, SLOT_BUCKETS))
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help=f"requests that run together: {slots} (default: {DEFAULT_SLOTS})",
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens of a prompt and its output")


def draft_options(options: argparse.Namespace) -> dict[str, Any]:
    """Give the fields of an `EngineConfig` that say how drafts are made.

    Args:
        options: parsed words of a verb with `add_model_options`.

    Returns:
        Values by name.
    """
    names = ("drafts", "verification", "max_drafts", "draft_threshold")
    return {name: getattr(options, name) for name in names}


def draft_words(draft: DraftSummary | None) -> str:
    """Say in a few words what came of drafts; nothing where none were made.

    Args:
        draft: an engine's counters.

    Returns:
        Words that follow a comma.
    """
    if draft is None or not draft.rounds:
        return ""
    return (
        f", tau {draft.tau:.2f} (tokens a round of drafts; {draft.draft_acceptance:.0%} of drafts accepted)"
    )


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafts",
        default=DRAFT_MODES[0],
        choices=DRAFT_MODES,
        help="guess several tokens ahead and verify them together, with a model that has draft stages: off "
        "(default); fixed verifies all guesses; dynamic as many as pay, by step times that `deepinfer_jax "
        "costs` measures once; threshold up to the first of low confidence; early_stop as the published "
        "search finds",
    )
    parser.add_argument(
        "--verification", default=VERIFICATION_MODES[0], choices=VERIFICATION_MODES, help=VERIFICATION_HELP
    )
    parser.add_argument(
        "--max-drafts",
        type=int,
        metavar="N",
        help="guesses of one sequence verified in a step at most (default: the model's whole block)",
    )
    parser.add_argument(
        "--draft-threshold",
        type=float,
        default=DEFAULT_THRESHOLD,
        metavar="P",
        help=f"lowest confidence, 0 to 1, for --drafts threshold (default: {DEFAULT_THRESHOLD})",
    )
