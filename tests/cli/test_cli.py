"""The command line: what it prints, and that refused input is one line and exit code 2.

Separate because only here does anything print or exit.
Read next: `deepinfer_jax/cli/generate.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from deepinfer_jax import SamplingParams, generate, load
from deepinfer_jax.cli import EXIT_REFUSED, main
from deepinfer_jax.engine.llm import NANO_FOLDER

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


def test_an_official_layout_checkpoint_end_to_end(command: Command) -> None:
    words = ["generate", "--model", TINY, "--token-ids", "5,17,4", "--token-ids", "9 8", "--max-tokens", "4"]
    first = command(*words, "--temperature", "0")
    assert (first.code, first.err) == (0, "")
    params = SamplingParams(max_tokens=4, temperature=0.0)
    completions = generate([[5, 17, 4], [9, 8]], params, load(TINY))
    assert [[int(token) for token in line.split(",")] for line in first.out.splitlines()] == [
        completion.token_ids for completion in completions
    ]
    assert command(*words, "--temperature", "0") == first
    seeded = [command(*words, "--temperature", "1", "--seed", seed).out for seed in ("1", "2", "1")]
    assert seeded[0] == seeded[2] != seeded[1]
    stats = command(*words, "--temperature", "0", "--stats")
    assert stats.out == first.out
    assert "tokens/s" in stats.err


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


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--token-ids", ",".join(["5"] * 1020)], ["1020 prompt tokens", "at most 1024", "shorten"]),
        (["--token-ids", ""], ["prompt 0", "no tokens", "non-empty"]),
        (["--token-ids", "5", "--token-ids", ""], ["prompt 1", "no tokens", "non-empty"]),
        (["--token-ids", "5,128"], ["prompt 0", "128", "0..127", "tokenizer"]),
        (["--token-ids=-1"], ["prompt 0", "-1", "0..127"]),
        (["--token-ids", "5", "--max-tokens", "-1"], ["max_tokens", "-1", ">= 0", "change"]),
        (["--token-ids", "5", "--temperature", "-1"], ["temperature", "-1.0", ">= 0"]),
        (["--token-ids", "5", "--top-p", "0"], ["top_p", "0.0", "(0, 1]"]),
        (["--token-ids", "5", "--seed", "-3"], ["seed", "-3", "2^64-1"]),
        (["--token-ids", "5,x"], ["--token-ids", "'5,x'", "integers", "write them"]),
        (["--token-ids", "5.5"], ["--token-ids", "'5.5'", "integers"]),
        ([], ["prompts", "none", "TEXT", "give"]),
        (["--token-ids", "5", "--numerics", "float16"], ["numerics", "'float16'", "'official'", "choose"]),
        (["hello"], ["text", "token ids", "tokenizer.json"]),
        ([""], ["prompt"]),
    ],
    ids=[
        *("over_the_limit", "empty", "empty_neighbour", "outside", "negative_id", "negative_max_tokens"),
        *("temperature", "top_p", "seed", "no_integers", "float_id", "no_prompt", "numerics", "no_tokenizer"),
        "empty_text",
    ],
)
def test_bad_input(command: Command, words: list[str], parts: list[str]) -> None:
    assert_refused(command("generate", "--model", TINY, *words), *parts)


@pytest.mark.parametrize("words", [[], ["fly"], ["generate", "--max-tokens", "many"]])
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
    for word in ("generate", "params", "example:"):
        assert word in done.stdout
