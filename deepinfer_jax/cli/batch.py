"""`batch`: a file of requests in, a file of results out, and on from there after an interruption.

Separate because it only parses words, opens what they name, and prints how it went.
Read next: `batch_lines.py` (the loop), `../text/jsonl.py` (what a line says).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..plans import DRAFT_MODES, VERIFICATION_MODES
from ..sampling_params import RequestError
from ..text.jsonl import line_keys, numbered_lines
from ..text.record_file import OutputError, RecordFile
from ..text.records import DoneLines
from . import EXIT_FAILED, EXIT_INTERRUPTED
from .batch_lines import PENDING_PER_SLOT, Tally, run_batch
from .options import add_model_options, add_size_options, draft_options, draft_words

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine_config import EngineConfig
    from ..spec_decode.summary import DraftSummary

ORDERS = ("input", "finish")

SECONDS_PER_REFRESH = 0.2

_DESCRIPTION = """\
Run a file of requests, one JSON object a line:

  {"prompt": "Once upon a time", "max_tokens": 32, "custom_id": "a"}
  {"prompt": [0, 17, 4], "temperature": 0, "stop": ["\\n"], "n": 2}

A prompt is text or token ids, custom_id is text that comes back with the result,
and every other name is a field of SamplingParams. A line that is refused gives a
record with an "error"; the others go on.

After an interruption, even kill -9, the same command continues: results that are
written stay, and none is lost or written twice.
"""

_EPILOG = """\
exit code: 0 all lines have results, 1 some have errors, 2 refused, 130 interrupted

example:
  echo '{"prompt": "Once upon a time", "max_tokens": 32}' > in.jsonl
  deepinfer_jax batch in.jsonl -o out.jsonl
"""


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "batch",
        help="run a file of requests",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="IN.JSONL", help="one request a line")
    parser.add_argument(
        "-o", "--output", required=True, metavar="OUT.JSONL", help="one result a line; continued if it exists"
    )
    parser.add_argument(
        "--order",
        default=ORDERS[0],
        choices=ORDERS,
        help="order of the results: that of the input (default), or as they finish",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="drop the results that are there, instead of continuing"
    )
    add_size_options(parser)
    parser.add_argument(
        "--max-pending",
        type=int,
        metavar="N",
        help=f"requests in memory at most (default: {PENDING_PER_SLOT} for each slot)",
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run what the output lacks and say how it went."""
    from ..engine_config import EngineConfig

    if options.max_pending is not None and options.max_pending < 1:
        raise RequestError(f"--max-pending: got {options.max_pending}, expected 1 or more; change it")
    sizes = EngineConfig(
        prefill=options.prefill,
        num_slots=options.slots,
        max_context=options.max_context,
        **draft_options(options),
    )
    settings = _settings(options)
    tally, started, draft = Tally(), time.monotonic(), None
    try:
        with _open_input(options) as lines, RecordFile(options.output) as output:
            keys = line_keys(lines, settings)
            is_in_order = options.order == ORDERS[0]
            done = DoneLines(bytearray()) if options.overwrite else output.done(keys, is_in_order)
            tally.num_lines = len(keys) - keys.count(0)
            tally.num_before = tally.num_done = done.num_done
            tally.num_failed = done.num_failed
            # Only now is the output touched: nothing was refused.
            if tally.num_done < tally.num_lines:
                draft = _run_rest(options, sizes, settings, lines, output, done, tally)
            else:
                output.cut(done.size)
    except KeyboardInterrupt:
        same = "the same command without --overwrite" if options.overwrite else "the same command"
        _say(f"interrupted: {tally.num_done} of {tally.num_lines} lines are written; {same} goes on")
        return EXIT_INTERRUPTED
    except OutputError as error:
        _say(f"deepinfer_jax batch: {error}")
        return EXIT_FAILED
    _say(_summary(tally, time.monotonic() - started) + draft_words(draft))
    return EXIT_FAILED if tally.num_failed else 0


def _run_rest(
    options: argparse.Namespace,
    sizes: EngineConfig,
    settings: str,
    lines: BinaryIO,
    output: RecordFile,
    done: DoneLines,
    tally: Tally,
) -> DraftSummary | None:
    """Load the model and run the lines that have no record; give what came of drafts, if any were made."""
    from ..engine.llm import LLM
    from ..sharding.mesh import MeshShape, simulate_devices

    if options.mesh is not None:
        simulate_devices(MeshShape.parse(options.mesh))
    with LLM(
        options.model,
        numerics=options.numerics,
        batch_invariant=not options.no_batch_invariant,
        cache_format=options.cache_format,
        mesh=options.mesh,
        layout=options.layout,
        options=sizes,
    ) as llm:
        output.cut(done.size)
        lines.seek(0)
        rest = ((number, line) for number, line in numbered_lines(lines) if number not in done)
        max_pending = options.max_pending or PENDING_PER_SLOT * llm.stats.slots
        with _progress_bar(tally, llm) as refresh:
            run_batch(
                rest,
                output.write,
                llm,
                settings=settings,
                in_order=options.order == ORDERS[0],
                max_pending=max_pending,
                tally=tally,
                refresh=refresh,
            )
        return llm.stats.draft


def _settings(options: argparse.Namespace) -> str:
    """Spell out what a result depends on besides its line; the order and the memory do not count."""
    names = ("numerics", "cache_format", "no_batch_invariant", "prefill", "mesh", "layout", "max_context")
    chosen = {name: getattr(options, name) for name in names}
    if options.drafts != DRAFT_MODES[0] and options.verification != VERIFICATION_MODES[0]:
        # Only coupled drafts change no token.
        chosen |= draft_options(options)
    return json.dumps({"model": _fingerprint(options.model), **chosen})


def _fingerprint(model: str | None) -> str:
    """Tell models apart by what is quick to read: configuration, tokenizer, names and sizes of weights."""
    from ..assets import NANO_FOLDER
    from ..config_json import read_config

    folder = NANO_FOLDER if model in (None, "nano") else Path(model)
    read_config(folder)
    digest = hashlib.blake2b(digest_size=16)
    for name in ("config.json", "tokenizer.json", "engram_token_map.npy"):
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        digest.update(hashlib.blake2b(content).digest())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _open_input(options: argparse.Namespace) -> BinaryIO:
    path, output = Path(options.input), Path(options.output)
    if not path.is_file():
        what = "a folder, pipe or device" if path.exists() else "no such file"
        raise RequestError(f"input {path}: got {what}, expected a file of JSON lines; check the path")
    if output.exists() and path.samefile(output):
        raise RequestError(f"output {output}: got the input itself, expected another file; give another -o")
    try:
        return path.open("rb")
    except OSError as error:
        raise RequestError(
            f"input {path}: got {error.strerror}, expected a file that can be read; check its permissions"
        ) from None


@contextmanager
def _progress_bar(tally: Tally, llm: LLM) -> Iterator[Callable[[], None]]:
    """Show how far the run is on a terminal, nothing elsewhere; gives a function that refreshes it."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from ..engine.progress import showing_bar

    text = TextColumn("{task.fields[rate]:.0f} tokens/s, {task.fields[failed]} failed, time left")
    columns = (TextColumn("lines"), BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
    shown = started = time.monotonic()
    with showing_bar(*columns) as progress:
        if progress is None:
            yield lambda: None
            return
        task = progress.add_task("", total=tally.num_lines, completed=tally.num_done, rate=0.0, failed=0)

        def refresh() -> None:
            nonlocal shown
            if (now := time.monotonic()) - shown >= SECONDS_PER_REFRESH:
                shown, rate = now, llm.stats.generated_tokens / (now - started)
                progress.update(task, completed=tally.num_done, rate=rate, failed=tally.num_failed)

        yield refresh


def _summary(tally: Tally, seconds: float) -> str:
    text = f"done: {tally.num_lines} lines, {tally.num_failed} failed"
    if tally.num_before == tally.num_lines:
        return f"{text}, nothing left to do"
    before = f" ({tally.num_before} lines were done before)" if tally.num_before else ""
    rate = tally.num_tokens / seconds if seconds else 0.0
    return f"{text}, {tally.num_tokens} tokens in {seconds:.1f} s ({rate:.0f} tokens/s){before}"


def _say(message: str) -> None:
    print(message, file=sys.stderr)
