"""`generate`: text or token ids in, text or token ids out.

Separate because it only parses words and prints.
Read next: `../engine/llm.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ..plans import RequestError, SamplingParams, check_prompt

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
    parser.add_argument("--seed", type=int, default=0, help="64-bit seed (default: 0)")
    parser.add_argument("--numerics", default="official", help="official (default) or float32")
    parser.add_argument("--stats", action="store_true", help="print times to standard error")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Generate and print one block per prompt."""
    started = time.monotonic()
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    prompts = [*options.prompts, *(_parse_ids(text) for text in options.token_ids)]
    if not prompts:
        raise RequestError("prompts: got none, expected a TEXT or --token-ids IDS; give at least one prompt")

    from ..engine.generate import Timing
    from ..engine.llm import generate, load
    from ..text.stream import TextStream

    model = load(options.model, options.numerics)
    loaded = time.monotonic()
    timing = Timing()
    if len(prompts) == 1 and model.tokenizer is not None:
        stream = TextStream(model.tokenizer)
        # Checked before anything is printed: a refused prompt leaves standard output empty.
        ids = model.encode(prompts[0])
        check_prompt(ids, params, model.config, "prompt 0")
        _print_now(prompts[0] if isinstance(prompts[0], str) else "")
        generate([ids], params, model, lambda _, token: _print_now(stream.push(token)), timing)
        _print_now(stream.finish() + "\n")
    else:
        _print_blocks(prompts, generate(prompts, params, model, timing=timing), model)
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


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"--token-ids: got {text!r}, expected integers separated by commas; write them as in 0,17,4"
        ) from None
