"""`generate`: text or token ids in, text or token ids out.

Separate because it only parses words and prints.
Read next: `../engine/llm.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from ..sampling_params import RequestError, SamplingParams
from .options import add_model_options, draft_options, draft_words

if TYPE_CHECKING:
    from ..engine.llm import LLM


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Declare the verb's arguments."""
    parser = verbs.add_parser(
        "generate",
        help="generate from prompts",
        description="Generate from one or more prompts with the embedded nano model or a checkpoint folder.",
        epilog='example: deepinfer_jax generate "Once upon a time" --max-tokens 64 --seed 1',
    )
    parser.add_argument("prompts", nargs="*", metavar="TEXT", help="prompts, run together")
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
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that ends the output (may be given more than once)",
    )
    parser.add_argument("--include-stop", action="store_true", help="keep that text at the end")
    parser.add_argument("--bad-token-ids", default="", metavar="IDS", help="ids never generated, as in 5,7")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    parser.add_argument("--seed", type=int, default=0, help="64-bit seed (default: 0)")
    parser.add_argument("--n", type=int, default=1, help="outputs of each prompt (default: 1)")
    add_model_options(parser)
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
        stop=tuple(options.stop),
        include_stop=options.include_stop,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
        n=options.n,
    )
    prompts = [*options.prompts, *(_parse_ids("--token-ids", text) for text in options.token_ids)]
    if not prompts:
        raise RequestError("prompts: got none, expected a TEXT or --token-ids IDS; give at least one prompt")

    from ..engine_config import EngineConfig

    wanted = EngineConfig(prefill=options.prefill, **draft_options(options))

    from ..engine.llm import LLM
    from ..engine.load import load
    from ..engine.one_call import size_for
    from ..sharding.mesh import MeshShape, simulate_devices

    if options.mesh is not None:
        simulate_devices(MeshShape.parse(options.mesh))
    model = load(
        *(options.model, options.numerics, not options.no_batch_invariant, options.cache_format),
        mesh=options.mesh,
        layout=options.layout,
    )
    loaded = time.monotonic()
    # Checked before anything is printed: a refused prompt leaves standard output empty.
    ids = [model.encode(prompt) for prompt in prompts]
    sizes = size_for(wanted, ids, [params] * len(ids), model)
    texts = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    with LLM(model, options=sizes) as llm:
        first_token = _print_outputs(llm, ids, texts, params)
        stats = llm.stats
    if options.stats:
        print(
            f"load {loaded - started:.2f} s, first token {first_token:.2f} s after it, "
            f"{stats.generated_tokens} tokens at {stats.tokens_per_second:.0f} tokens/s"
            f"{draft_words(stats.draft)}",
            file=sys.stderr,
        )
    return 0


def _print_outputs(llm: LLM, prompts: list[list[int]], texts: list[str], params: SamplingParams) -> float:
    """Print what comes, one prompt as it comes; give the seconds to the first token."""
    from ..engine.generate import refuse_invalid

    if len(prompts) == params.n == 1 and llm.tokenizer is not None:
        _print_now(texts[0])
        first_token = 0.0
        for event in llm.stream(prompts[0], params):
            _print_now(event.text)
            if event.completion is not None:
                first_token = event.completion.timing.first_token
                refuse_invalid([event.finish_reason], [event.completion])
        _print_now("\n")
        return first_token
    completions = llm.generate(prompts, params)
    for number, completion in enumerate(completions):
        if llm.tokenizer is None:
            print(",".join(str(token) for token in completion.token_ids))
        else:
            print(texts[number // params.n] + completion.text)
    return min(completion.timing.first_token for completion in completions)


def _print_now(text: str) -> None:
    print(text, end="", flush=True)


def _parse_ids(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"{option}: got {text!r}, expected integers separated by commas; write them as in 0,17,4"
        ) from None
