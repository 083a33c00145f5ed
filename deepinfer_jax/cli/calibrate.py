"""`calibrate`: fit the confidence in drafts to what is really accepted on some prompts.

Separate because it only parses words, runs prompts and prints.
Read next: `../engine/confidences.py`, `../spec_decode/calibrate.py`.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from ..plans import VERIFICATION_MODES
from ..sampling_params import RequestError
from .options import VERIFICATION_HELP, add_load_options

DEFAULT_MAX_TOKENS = 128

_DESCRIPTION = """\
Answer prompts with every draft verified, and fit a temperature, a shift and a base of
each draft position to what was accepted, for greedy, sampled and filtered requests.
Some hundred prompts of the kind that is to come are enough.

An engine reads the result from the checkpoint's folder, as draft_calibration.json.
"""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "calibrate",
        help="fit the confidence in drafts to what is accepted",
        description=_DESCRIPTION,
        epilog="example: deepinfer_jax calibrate prompts.jsonl --model FOLDER",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", type=Path, metavar="FILE", help="JSON lines as `batch` takes them")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"tokens of each answer at most (default: {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write it (default: in the checkpoint's folder)"
    )
    parser.add_argument(
        "--verification", default=VERIFICATION_MODES[0], choices=VERIFICATION_MODES, help=VERIFICATION_HELP
    )
    add_load_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answer, fit, write and print."""
    from ..engine.confidences import calibrate, in_every_regime
    from ..engine.load import load
    from ..sampling_params import SamplingParams
    from ..sharding.mesh import MeshShape, simulate_devices
    from ..spec_decode.calibration import CALIBRATION_FILE, REGIMES

    if options.output is None and options.model is None:
        raise RequestError(
            "output: got none for the embedded model, expected a file, as its folder belongs to the package; "
            "give --output FILE"
        )
    texts = _read(options.prompts)
    if options.mesh is not None:
        simulate_devices(MeshShape.parse(options.mesh))
    model = load(
        options.model,
        options.numerics,
        not options.no_batch_invariant,
        options.cache_format,
        options.mesh,
        options.layout,
    )
    if not model.config.draft.num_stages:
        raise RequestError(
            f"model: got {model.name}, which has no draft stages, expected a model with them; name another"
        )
    encoded = [model.encode(text, f"line {number}") for number, text in texts]
    regimes = in_every_regime(SamplingParams(max_tokens=options.max_tokens))
    prompts = [prompt for prompt in encoded for _ in regimes]
    params = [one for _ in encoded for one in regimes]
    source = {"prompts": len(encoded), "date": datetime.date.today().isoformat()}
    calibration = calibrate(model, prompts, params, options.verification, source)
    path = options.output or Path(options.model) / CALIBRATION_FILE
    calibration.save(path)
    for name in REGIMES:
        facts = calibration.source["regimes"][name]
        if not facts["fitted"]:
            print(f"{name}: {facts['rounds']} rounds are too few; left as it is")
            continue
        before, after = ([f"{value:.1%}" for value in facts[key]] for key in ("error_before", "error_after"))
        errors = f"{', '.join(before)} -> {', '.join(after)}"
        print(f"{name}: {facts['rounds']} rounds; calibration error by position {errors}")
    print(f"wrote {path}")
    return 0


def _read(path: Path) -> list[tuple[int, str | list[int]]]:
    """Read the prompts of a file, with the number of each line."""
    from ..text.jsonl import numbered_lines, parse_request

    if not path.is_file():
        raise RequestError(
            f"prompts: got {str(path)!r}, which is no file, expected JSON lines; check the path"
        )
    with path.open("rb") as file:
        requests = [parse_request(line, number) for number, line in numbered_lines(file)]
    if not requests:
        raise RequestError(f"prompts: got no line in {str(path)!r}, expected some hundred prompts; add some")
    return [(request.number, request.prompt) for request in requests]
