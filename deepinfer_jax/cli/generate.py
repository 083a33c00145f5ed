"""`generate`: text or token ids in, text or token ids out.

Separate because it only parses words and prints.
Read next: `../engine/llm.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ..plans import PREFILL_MODES
from ..sampling_params import RequestError, SamplingParams, check_request

if TYPE_CHECKING:
    from ..engine.llm import Completion, Model


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "generate",
        help="generate from prompts",
        description="Generate from one or more prompts with the embedded nano model or a checkpoint folder.",
        epilog='example: deepinfer_jax generate "Once upon a time" --max-tokens 64 --seed 1',
    )
    parser.add_argument("prompts", nargs="*", metavar="TEXT", help="prompts, run together")
    parser.add_argument("--model", default=None, metavar="PATH", help="checkpoint folder (default: nano)")
    parser.add_argument(
        "--token-ids",
        action="append",
        default=[],
        metavar="IDS",
        help="a prompt as token ids, such as 0,17,4 (may be given more than once)",
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: 0.7)")
    parser.add_argument("--top-p", type=float, default=0.95, help="probability mass kept (default: 0.95)")
    parser.add_argument("--top-k", type=int, default=0, help="most probable tokens kept (default: 0, all)")
    parser.add_argument("--min-p", type=float, default=0.0, help="share of the best kept (default: 0)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 avoids repetition")
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="above 0 avoids used tokens")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="the same, for each use")
    parser.add_argument(
        "--min-tokens", type=int, default=0, help="tokens before the end may come (default: 0)"
    )
    parser.add_argument(
        "--stop-token-ids", default="", metavar="IDS", help="ids that end the text, as in 5,7"
    )
    parser.add_argument("--bad-token-ids", default="", metavar="IDS", help="ids never generated, as in 5,7")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    parser.add_argument("--seed", type=int, default=0, help="64-bit seed (default: 0)")
    parser.add_argument(
        "--prefill",
        default="exact",
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
    parser.add_argument("--stats", action="store_true", help="print times to standard error")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Generate and print one block per prompt."""
    started = time.monotonic()
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        min_tokens=options.min_tokens,
        stop_token_ids=tuple(_parse_ids("--stop-token-ids", options.stop_token_ids)),
        bad_token_ids=tuple(_parse_ids("--bad-token-ids", options.bad_token_ids)),
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )
    prompts = [*options.prompts, *(_parse_ids("--token-ids", text) for text in options.token_ids)]
    if not prompts:
        raise RequestError("prompts: got none, expected a TEXT or --token-ids IDS; give at least one prompt")

    from ..engine.driver import DriverOptions, Timing
    from ..engine.llm import generate, load
    from ..sharding.mesh import MeshShape, simulate_devices
    from ..text.stream import TextStream

    if options.mesh is not None:
        simulate_devices(MeshShape.parse(options.mesh))
    model = load(
        *(options.model, options.numerics, not options.no_batch_invariant, options.cache_format),
        mesh=options.mesh,
        layout=options.layout,
    )
    loaded = time.monotonic()
    timing, how = Timing(), DriverOptions(prefill=options.prefill)
    if len(prompts) == 1 and model.tokenizer is not None:
        stream = TextStream(model.tokenizer)
        # Checked before anything is printed: a refused prompt leaves standard output empty.
        ids = model.encode(prompts[0])
        check_request(ids, params, model.config, "prompt 0")
        _print_now(prompts[0] if isinstance(prompts[0], str) else "")
        generate([ids], params, model, lambda _, token: _print_now(stream.push(token)), timing, how)
        _print_now(stream.finish() + "\n")
    else:
        _print_blocks(prompts, generate(prompts, params, model, timing=timing, options=how), model)
    if options.stats:
        rate = timing.num_decoded / timing.decoding if timing.decoding else 0.0
        print(
            f"load {loaded - started:.2f} s, first token {timing.first_token:.2f} s after it, "
            f"{timing.num_decoded} tokens decoded at {rate:.0f} tokens/s",
            file=sys.stderr,
        )
    return 0


def _print_now(text: str) -> None:
    print(text, end="", flush=True)


def _print_blocks(prompts: list[str | list[int]], completions: list[Completion], model: Model) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        if model.tokenizer is None:
            print(",".join(str(token) for token in completion.token_ids))
        else:
            print((prompt if isinstance(prompt, str) else "") + completion.text)


def _parse_ids(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"{option}: got {text!r}, expected integers separated by commas; write them as in 0,17,4"
        ) from None
