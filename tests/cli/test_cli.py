"""The command line: what it prints, and that refused input is one line and exit code 2.

Separate because only here does anything print or exit.
Read next: `deepinfer_jax/cli/generate.py`.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import jax
import pytest

from deepinfer_jax import (
    Completion,
    EngineConfig,
    InvalidOutputError,
    SamplingParams,
    StreamEvent,
    generate,
    load,
)
from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.checkpoint import write_checkpoint
from deepinfer_jax.cli import EXIT_FAILED, EXIT_REFUSED, main
from deepinfer_jax.config_json import parse_config
from deepinfer_jax.engine.stats import EngineStats
from deepinfer_jax.spec_decode.stats import DraftStats
from deepinfer_jax.step import ONE_DEVICE
from deepinfer_jax.testing.presets import SMALLEST, random_weights

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = str(GOLDEN / "tiny_fp8fp4")


class Output(NamedTuple):
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str


type Command = Callable[..., Output]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line in this process."""

    def run(*words: str) -> Output:
        code = main(list(words))
        return Output(code, *capsys.readouterr())

    return run


@pytest.fixture
def folder_with(tmp_path: Path) -> Callable[..., str]:
    """Make a checkpoint folder whose config.json is that of the tiny model with some keys replaced."""

    def make(text: dict | None = None, **top: object) -> str:
        document = json.loads((GOLDEN / "tiny_fp8fp4" / "config.json").read_text())
        document["text_config"].update(text or {})
        (tmp_path / "config.json").write_text(json.dumps({**document, **top}))
        return str(tmp_path)

    return make


def assert_refused(output: Output, *parts: str) -> None:
    """Check for exit code 2, nothing printed, and one line that holds all the parts."""
    assert output.code == EXIT_REFUSED == 2
    assert output.out == ""
    assert output.err.count("\n") == 1 and output.err.endswith("\n"), output.err
    assert output.err.startswith("deepinfer_jax ")
    assert "Traceback" not in output.err
    missing = [part for part in ("got", "expected", ";", *parts) if part not in output.err]
    assert missing == [], output.err


@pytest.fixture(scope="module")
def official_folder(smallest_document: dict, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of three layers in the official layout: every storage format, quick to compile."""
    folder, config = tmp_path_factory.mktemp("official"), parse_config(smallest_document)
    weights = random_weights(config, jax.random.key(6))
    write_checkpoint(folder, smallest_document, weights, config)
    return str(folder)


PROMPTS = ["--token-ids", "5,17,4", "--token-ids", "9 8"]


def test_an_official_layout_checkpoint_end_to_end(command: Command, official_folder: str) -> None:
    # One token of each, so that one step is compiled; `engine/test_nano.py` streams a longer text.
    words = ["generate", "--model", official_folder, *PROMPTS, "--max-tokens", "1", "--ignore-eos"]
    first = command(*words, "--temperature", "0")
    assert (first.code, first.err) == (0, "")
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    completions = generate([[5, 17, 4], [9, 8]], params, load(official_folder))
    tokens = [[int(token) for token in line.split(",")] for line in first.out.splitlines()]
    assert tokens == [completion.token_ids for completion in completions]
    assert command(*words, "--temperature", "0") == first
    seeded = [command(*words, "--temperature", "5", "--seed", seed).out for seed in ("1", "2", "1")]
    assert seeded[0] == seeded[2] != seeded[1]
    stats = command(*words, "--temperature", "0", "--stats")
    assert stats.out == first.out
    assert "tokens/s" in stats.err
    # Only the best token is left to draw from.
    assert command(*words, "--temperature", "2", "--top-p", "1", "--top-k", "1") == first
    assert command(*words, "--temperature", "2", "--top-p", "1", "--min-p", "1") == first
    # The first output of a prompt is the one that comes alone; the others are others.
    words = [*words, "--temperature", "5"]
    lines = command(*words, "--n", "3").out.splitlines()
    assert len(lines) == 6 and len(set(lines[:3])) > 1
    assert lines[::3] == command(*words).out.splitlines()
    words = words[:-2]
    stop = str(tokens[0][0])
    stopped = command(*words, "--temperature", "0", "--stop-token-ids", stop)
    assert stopped.out.splitlines()[0] == ""
    banned = command(*words, "--temperature", "0", "--bad-token-ids", stop)
    assert stop not in banned.out.splitlines()[0].split(",")


NOT_OFFERED = {"routing_counts": None, "redundant_experts": 0}
"""Arguments of `load` that take arrays, which the command line does not."""


class Captured(NamedTuple):
    """How the command line called the package."""

    load: dict[str, object]
    params: SamplingParams
    options: EngineConfig


class FakeLLM:
    """Answers 3,4 to every prompt, or says "a" and "b" of a prompt that it streams."""

    tokenizer: object = None
    reason = "length"

    def __init__(self, model: object, *, options: EngineConfig) -> None:
        self.options, self.stats, self.is_closed = options, EngineStats(generated_tokens=2), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def completion(self, prompt: list[int]) -> Completion:
        return Completion("ab", [3, 4], self.reason, prompt)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        assert prompts == [[5, 17, 4], [9, 8]]
        return [self.completion(prompt) for prompt in prompts for _ in range(params.n)]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[StreamEvent]:
        assert params.n == 1
        yield from (StreamEvent("a", [3]), StreamEvent("", [4]))
        yield StreamEvent("b", [], 0, self.reason, self.completion(prompt))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put a model and an engine that are not there in place; what was asked of them will be here."""
    found: dict[str, Any] = {"tokenizer": None, "reason": "length"}

    def fake_load(*arguments: object, **keywords: object) -> SimpleNamespace:
        bound = inspect.signature(load).bind(*arguments, **keywords)
        bound.apply_defaults()
        found["load"] = bound.arguments
        return SimpleNamespace(config=SMALLEST, encode=list, target=ONE_DEVICE)

    def make(model: object, *, options: EngineConfig) -> FakeLLM:
        found["llm"] = llm = FakeLLM(model, options=options)
        llm.tokenizer, llm.reason = found["tokenizer"], found["reason"]
        for name in ("generate", "stream"):
            monkeypatch.setattr(llm, name, noting(getattr(llm, name), found))
        return llm

    monkeypatch.setattr("deepinfer_jax.engine.load.load", fake_load)
    monkeypatch.setattr("deepinfer_jax.engine.llm.LLM", make)
    return found


def noting(method: Callable[..., Any], found: dict[str, Any]) -> Callable[..., Any]:
    """Keep the parameters that a method of the engine is called with."""

    def call(prompts: Any, params: SamplingParams) -> Any:
        found["params"] = params
        return method(prompts, params)

    return call


@pytest.fixture
def captured(command: Command, made: dict[str, Any]) -> Callable[..., Captured]:
    """Run words with a model that is not there and say what was asked of it; nothing is computed."""

    def run(*words: str) -> Captured:
        output = command("generate", *PROMPTS, *words)
        assert output == Output(0, "3,4\n" * 2 * made["params"].n, "")
        assert made["llm"].is_closed
        return Captured(made["load"], made["params"], made["llm"].options)

    return run


def test_every_option_arrives(captured: Callable[..., Captured]) -> None:
    found = captured(
        *("--model", "here", "--numerics", "float32", "--cache-format", "fp8", "--no-batch-invariant"),
        *("--prefill", "bounded"),
        *("--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.25", "--top-k", "7", "--min-p", "0.125"),
        *("--repetition-penalty", "1.5", "--presence-penalty", "-2", "--frequency-penalty", "0.75"),
        *("--min-tokens", "3", "--stop-token-ids", "5,7", "--bad-token-ids", "8 9,1", "--ignore-eos"),
        *("--seed", str(2**64 - 1), "--mesh", "2x4", "--layout", "tensor"),
        *("--stop", "the end", "--stop", "\n", "--include-stop", "--n", "3"),
        *("--drafts", "threshold", "--verification", "block", "--max-drafts", "2"),
        *("--draft-threshold", "0.25"),
    )
    expected = {"folder": "here", "numerics": "float32", "batch_invariant": False, "cache_format": "fp8"}
    expected |= {"mesh": "2x4", "layout": "tensor", **NOT_OFFERED}
    assert found.load == expected
    # As large as these prompts need.
    drafts = {"drafts": "threshold", "verification": "block", "max_drafts": 2, "draft_threshold": 0.25}
    assert found.options == EngineConfig(prefill="bounded", num_slots=8, max_context=12, **drafts)
    assert found.params == SamplingParams(
        **{"max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125},
        **{"repetition_penalty": 1.5, "presence_penalty": -2.0, "frequency_penalty": 0.75, "min_tokens": 3},
        **{"stop_token_ids": (5, 7), "bad_token_ids": (1, 8, 9), "ignore_eos": True, "seed": 2**64 - 1},
        **{"stop": ("\n", "the end"), "include_stop": True, "n": 3},
    )


def test_options_left_out_change_nothing(captured: Callable[..., Captured]) -> None:
    found = captured()
    expected = {"folder": None, "numerics": "official", "batch_invariant": True, "cache_format": None}
    expected |= {"mesh": None, "layout": None, **NOT_OFFERED}
    assert found.load == expected
    assert found.options == EngineConfig(num_slots=8, max_context=131)
    assert found.params == SamplingParams(max_tokens=128, temperature=0.7, top_p=0.95)


def test_invalid_output_is_one_line_and_exit_code_1(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise InvalidOutputError("prompts [0]: the logits held NaN, expected numbers; check the weights", [])

    monkeypatch.setattr("deepinfer_jax.engine.llm.LLM.generate", fail)
    output = command("generate", "--model", TINY, "--token-ids", "5")
    assert (output.code, output.out) == (EXIT_FAILED, "") and EXIT_FAILED == 1
    assert output.err == (
        "deepinfer_jax generate: prompts [0]: the logits held NaN, expected numbers; check the weights\n"
    )


ONE_PROMPT = ["generate", "--token-ids", "5,17,4"]


def test_one_prompt_is_printed_as_it_comes(command: Command, made: dict[str, Any]) -> None:
    made["tokenizer"] = object()
    assert command(*ONE_PROMPT) == Output(0, "ab\n", "")
    # Several outputs are printed one after the other, as several prompts are.
    assert command("generate", *PROMPTS, "--n", "2") == Output(0, "ab\n" * 4, "")
    assert "2 tokens at" in command(*ONE_PROMPT, "--stats").err


def test_drafts_of_a_model_without_draft_stages_are_refused(command: Command, official_folder: str) -> None:
    words = ["generate", "--model", official_folder, *PROMPTS, "--drafts", "fixed"]
    assert_refused(command(*words), "drafts", "'fixed'", "'off'", "no draft stages", "leave drafts off")


def test_statistics_say_what_came_of_drafts(
    command: Command, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = DraftStats(5)
    counts = {"num_tokens": [3], "num_verified": [5], "num_accepted": [2]}
    stats.add(**counts, logits=[[0.0] * 5], regimes=[0], choice=1)
    drafted = EngineStats(generated_tokens=3, draft=stats.summary())
    monkeypatch.setattr(f"{__name__}.EngineStats", lambda **_: drafted)
    made["tokenizer"] = object()
    assert command(*ONE_PROMPT, "--stats").err.endswith(
        " tokens/s, tau 3.00 (tokens a round of drafts; 40% of drafts accepted)\n"
    )


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_without_a_place(
    command: Command, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class WarningLLM(FakeLLM):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            warnings.warn("drafts='dynamic': no step times", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr("deepinfer_jax.engine.llm.LLM", WarningLLM)
    output = command("generate", *PROMPTS)
    assert output == Output(
        0, "3,4\n3,4\n", "deepinfer_jax generate: warning: drafts='dynamic': no step times\n"
    )


def test_invalid_output_of_a_stream_is_one_line_and_exit_code_1(
    command: Command, made: dict[str, Any]
) -> None:
    made.update(tokenizer=object(), reason="invalid")
    output = command(*ONE_PROMPT)
    assert output.code == EXIT_FAILED
    assert output.err.count("\n") == 1
    assert output.err.startswith("deepinfer_jax generate: prompts [0]: the logits held NaN")


PIECES_OF_PARAMS = ("weight", "logical axes", "storage", "layers, experts, ffn, embed", "mxfp4 1x32", "mtp.")


def test_params_of_the_tiny_model(command: Command) -> None:
    output = command("params", "--model", TINY)
    assert (output.code, output.err) == (0, "")
    assert [piece for piece in PIECES_OF_PARAMS if piece not in output.out] == []
    lines = [line.split() for line in output.out.splitlines()[1:]]
    *weights, total = lines
    assert total[0] == "total"
    for column in (-2, -1):
        assert sum(as_int(line[column]) for line in weights) == as_int(total[column])


def as_int(text: str) -> int:
    return int(text.replace(",", ""))


def test_params_of_the_released_model(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((GOLDEN / "released_config.json").read_bytes())
    output = command("params", "--model", str(tmp_path))
    parameters, size = (as_int(word) for word in output.out.splitlines()[-1].split()[1:])
    assert parameters == 762_720_047_314
    # All tensors but the vision tower's 0.90 GiB (spec/checkpoint.md, sizes by kind).
    assert round(size / 2**30, 2) == round(475.24 - 0.90, 2)


def test_params_of_the_embedded_model_need_no_weights(command: Command) -> None:
    assert (NANO_FOLDER / "config.json").is_file()
    output = command("params")
    assert (output.code, output.err) == (0, "")
    assert "4096 x 256" in output.out


def test_unknown_model_folder(command: Command, tmp_path: Path) -> None:
    for words in (["generate", "--token-ids", "5"], ["params"]):
        output = command(*words, "--model", str(tmp_path / "nowhere"))
        assert_refused(output, "model folder", "nowhere", "does not exist", "pass")


def test_model_folder_without_config(command: Command, tmp_path: Path) -> None:
    output = command("generate", "--token-ids", "5", "--model", str(tmp_path))
    assert_refused(output, "model folder", "config.json does not exist", "copy")


def test_model_folder_without_weights(command: Command, folder_with: Callable[..., str]) -> None:
    output = command("generate", "--token-ids", "5", "--model", folder_with())
    assert_refused(output, "safetensors")


def test_wrong_quantization_config(command: Command, folder_with: Callable[..., str]) -> None:
    folder = folder_with(quantization_config={"quant_method": "awq", "bits": 4})
    assert_refused(
        command("generate", "--token-ids", "5", "--model", folder), "quantization_config", "awq", "ue8m0"
    )


def test_unknown_keys_that_may_change_the_maths(command: Command, folder_with: Callable[..., str]) -> None:
    folder = folder_with({"num_hash_layers": 3})
    assert_refused(command("generate", "--token-ids", "5", "--model", folder), "num_hash_layers", "remove")


def test_known_key_with_another_value(command: Command, folder_with: Callable[..., str]) -> None:
    folder = folder_with({"hc_shifted": False})
    assert_refused(command("params", "--model", folder), "'hc_shifted'", "False", "True", "fix config.json")


BAD_INPUT: dict[str, tuple[list[str], list[str]]] = {
    "over_the_limit": (["--token-ids", ",".join(["5"] * 1020)], ["1020 prompt tokens", "1024", "shorten"]),
    "empty": (["--token-ids", ""], ["prompt 0", "no tokens", "non-empty"]),
    "empty_neighbour": (["--token-ids", "5", "--token-ids", ""], ["prompt 1", "no tokens", "non-empty"]),
    "outside": (["--token-ids", "5,128"], ["prompt 0", "128", "0..127", "tokenizer"]),
    "negative_id": (["--token-ids=-1"], ["prompt 0", "-1", "0..127"]),
    "no_integers": (["--token-ids", "5,x"], ["--token-ids", "'5,x'", "integers", "write them"]),
    "float_id": (["--token-ids", "5.5"], ["--token-ids", "'5.5'", "integers"]),
    "no_prompt": ([], ["prompts", "none", "TEXT", "give"]),
    "no_tokenizer": (["hello"], ["text", "token ids", "tokenizer.json"]),
    "empty_text": ([""], ["prompt"]),
}
"""Words after `generate`, and what the refusal must say."""

BAD_OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "numerics": (["--numerics", "float16"], ["numerics", "'float16'", "'official'", "choose"]),
    "cache_format": (["--cache-format", "int8"], ["cache_format", "'int8'", "'fp4'", "choose"]),
    "negative_max_tokens": (["--max-tokens", "-1"], ["max_tokens", "-1", ">= 0", "change"]),
    "temperature": (["--temperature", "-1"], ["temperature", "-1.0", "[0, 1e+30]", "change"]),
    "temperature_nan": (["--temperature", "nan"], ["temperature", "nan", "a number"]),
    "top_p": (["--top-p", "0"], ["top_p", "0.0", "(0, 1]"]),
    "top_k": (["--top-k", "-2"], ["top_k", "-2", ">= -1", "change"]),
    "min_p": (["--min-p", "1.5"], ["min_p", "1.5", "[0, 1]", "change"]),
    "repetition_penalty": (["--repetition-penalty", "0"], ["repetition_penalty", "0.0", "[0.01, 100]"]),
    "presence_penalty": (["--presence-penalty", "101"], ["presence_penalty", "101.0", "[-100, 100]"]),
    "frequency_penalty": (["--frequency-penalty", "inf"], ["frequency_penalty", "inf", "[-100, 100]"]),
    "negative_min_tokens": (["--min-tokens", "-1"], ["min_tokens", "-1", ">= 0", "change"]),
    "min_tokens": (["--min-tokens", "5", "--max-tokens", "4"], ["min_tokens", "5", "max_tokens (4)"]),
    "stop_words": (["--stop-token-ids", "5,x"], ["--stop-token-ids", "'5,x'", "integers", "write them"]),
    "stop_outside": (["--stop-token-ids", "5,128"], ["stop_token_ids", "128", "0..127"]),
    "too_many_stops": (["--stop-token-ids", ",".join(map(str, range(65)))], ["stop_token_ids", "at most 64"]),
    "bad_words": (["--bad-token-ids", "none"], ["--bad-token-ids", "'none'", "integers", "write them"]),
    "bad_negative": (["--bad-token-ids=-1"], ["bad_token_ids", "-1", "token ids", "change"]),
    "bad_outside": (["--bad-token-ids", "128"], ["bad_token_ids", "128", "0..127"]),
    "all_bad": (
        ["--bad-token-ids", ",".join(map(str, range(128)))],
        ["bad_token_ids", "every token", "fewer"],
    ),
    "seed": (["--seed", "-3"], ["seed", "-3", "2^64-1"]),
    "empty_stop": (["--stop", ""], ["stop", "('',)", "none empty", "change"]),
    "too_many_stop_texts": ([f"--stop={number}" for number in range(65)], ["stop", "at most 64"]),
    "stop_without_tokenizer": (["--stop", "x"], ["prompt 0", "['x']", "no tokenizer", "use stop_token_ids"]),
    "no_output": (["--n", "0"], ["n:", "got 0", "1..64", "change"]),
    "no_draft": (["--drafts", "fixed", "--max-drafts", "0"], ["max_drafts", "got 0", "1 or more", "change"]),
    "threshold": (["--draft-threshold", "1.5"], ["draft_threshold", "1.5", "between 0 and 1", "change"]),
    "threshold_nan": (["--draft-threshold", "nan"], ["draft_threshold", "nan", "between 0 and 1"]),
    "too_many_outputs": (["--n", "65"], ["n:", "got 65", "1..64", "change"]),
}
"""Words after a prompt that is right, and what the refusal must say."""


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(command: Command, name: str) -> None:
    words, parts = BAD_INPUT[name]
    assert_refused(command("generate", "--model", TINY, *words), *parts)


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(command: Command, name: str) -> None:
    words, parts = BAD_OPTIONS[name]
    assert_refused(command("generate", "--model", TINY, "--token-ids", "5", *words), *parts)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["generate", "--max-tokens", "many"],
        ["generate", "--top-k", "0.5"],
        ["generate", "--min-tokens", "few"],
        ["generate", "--min-p", "x"],
        ["generate", "--prefill", "fast"],
        ["generate", "--drafts", "all"],
        ["generate", "--verification", "none"],
        ["generate", "--max-drafts", "few"],
        ["generate", "--draft-threshold", "low"],
        ["generate", "--ignore-eos=yes"],
        ["generate", "--no-batch-invariant=1"],
        ["generate", "--stop-token-ids"],
        ["generate", "--stop"],
        ["generate", "--include-stop=yes"],
        ["generate", "--n", "two"],
    ],
    ids=lambda words: "_".join(words) or "nothing",
)
def test_command_lines_that_do_not_parse_exit_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == EXIT_REFUSED
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "--help" in message


def test_help_of_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "deepinfer_jax", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for word in ("generate", "batch", "costs", "layout", "params", "doctor", "example:"):
        assert word in done.stdout


def test_an_interrupt_is_one_line_and_exit_code_130(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deepinfer_jax.engine.load.load", interrupted)
    output = command("generate", "--model", TINY, "--token-ids", "5")
    assert output == Output(130, "", "deepinfer_jax generate: interrupted\n")
