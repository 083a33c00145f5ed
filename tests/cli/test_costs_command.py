"""The `costs` verb: words arrive, the table is kept and printed, a model without drafts is refused.

Separate because what is measured is mostly replaced by a table written by hand.
Read next: `deepinfer_jax/cli/costs.py`, `../engine/test_measure.py`.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from deepinfer_jax import EngineConfig, Model, load
from deepinfer_jax.cli import EXIT_REFUSED, main
from deepinfer_jax.config_json import read_config
from deepinfer_jax.engine.measure import find_costs, measure_costs
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.spec_decode.costs import CostTable, MeasuredEngine, default_path
from deepinfer_jax.testing.presets import SMALLEST

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = str(GOLDEN / "tiny_fp8fp4")
ENGINE = MeasuredEngine("cpu", "0.11.2", "tiny", "official, fp4", 8, 4, 3, 64)
TABLE = CostTable(ENGINE, "2026-11-30", {64: 5.25, 128: 7.5}, {1: 0.5, 8: 1.5}, uniform_ms=8.0)


class Output(NamedTuple):
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def kept_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tables in a folder of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """Run `costs` with some words in this process."""

    def run(*words: str) -> Output:
        code = main(["costs", *words])
        return Output(code, *capsys.readouterr())

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Load and measure nothing; what was asked for will be here."""
    found: dict[str, Any] = {}

    def fake_load(*arguments: Any, **keywords: Any) -> str:
        found["load"] = inspect.signature(load).bind(*arguments, **keywords).arguments
        return "the model"

    def fake_measure(*arguments: Any, **keywords: Any) -> CostTable:
        found["measure"] = inspect.signature(measure_costs).bind(*arguments, **keywords).arguments
        progress = found["measure"]["progress"]
        if progress is not None:
            progress(7, 8)
        return TABLE

    monkeypatch.setattr("deepinfer_jax.engine.load.load", fake_load)
    monkeypatch.setattr("deepinfer_jax.engine.measure.measure_costs", fake_measure)
    return found


def test_what_was_measured_is_printed_with_the_place_where_it_is_kept(
    command: Callable[..., Output], asked: dict[str, Any]
) -> None:
    output = command("--model", TINY)
    assert (output.code, output.err) == (0, "")
    lines = [line.split() for line in output.out.splitlines()]
    assert lines[0] == "tiny on cpu, numerics official, fp4, layout single".split()
    assert lines[1] == "8 slots, blocks of 3 drafts, JAX 0.11.2, 2026-11-30".split()
    assert lines[3:] == [
        "64 rows, no drafting 5.250".split(),
        "128 rows, no drafting 7.500".split(),
        "the full block of every slot, no drafting 8.000".split(),
        "drafting adds, 1 slot running 0.500".split(),
        "drafting adds, 8 slots running 1.500".split(),
        ["kept", "in", str(default_path(ENGINE))],
    ]


def test_every_option_arrives(command: Callable[..., Output], asked: dict[str, Any]) -> None:
    words = ["--model", TINY, "--slots", "16", "--max-context", "300", "--context", "77", "--steps", "3"]
    words += ["--verification", "block", "--numerics", "float32", "--cache-format", "fp8"]
    words += ["--no-batch-invariant", "--mesh", "2", "--layout", "data"]
    assert command(*words).code == 0
    assert asked["load"] == {
        **{"folder": TINY, "numerics": "float32", "batch_invariant": False, "cache_format": "fp8"},
        **{"mesh": "2", "layout": "data"},
    }
    options = EngineConfig(num_slots=16, max_context=300, drafts="dynamic", verification="block")
    assert asked["measure"] == {
        **{"model": "the model", "options": options, "steps": 3, "progress": None},
        **{"context": 77, "keep": True},
    }


def test_options_left_out_measure_the_default_engine(
    command: Callable[..., Output], asked: dict[str, Any]
) -> None:
    assert command("--model", TINY).code == 0
    assert asked["measure"]["options"] == EngineConfig(drafts="dynamic")
    assert (asked["measure"]["steps"], asked["measure"]["context"]) == (5, None)


def test_a_terminal_shows_how_far_it_is(
    command: Callable[..., Output], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(stderr=True, force_terminal=True)
    monkeypatch.setattr("deepinfer_jax.engine.progress._console", console)
    output = command("--model", TINY)
    assert "measuring steps" in output.err and "7/8" in output.err


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "slots": (["--slots", "3"], ["num_slots", "3", "[None, 1, 8, 16, 64, 256]"]),
    "max_context": (["--max-context", "99999"], ["max_context", "99999", "lower"]),
    "model": (["--model", "nowhere"], ["model folder", "nowhere"]),
}
"""Words, and what the refusal must say."""


def assert_refused(output: Output, *parts: str) -> None:
    assert (output.code, output.out) == (EXIT_REFUSED, "")
    assert output.err.startswith("deepinfer_jax costs: ") and output.err.count("\n") == 1
    missing = [part for part in ("got", "expected", ";", *parts) if part not in output.err]
    assert missing == [], output.err


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_loads_no_weights(
    command: Callable[..., Output], asked: dict[str, Any], name: str
) -> None:
    words, parts = REFUSED[name]
    assert_refused(command("--model", TINY, *words), *parts)
    assert asked == {}


def test_a_model_without_draft_stages_is_refused(
    command: Callable[..., Output], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer_jax.config_json.read_config", lambda _: SMALLEST)
    assert_refused(command("--model", TINY), "without draft stages", "`mtp.*`")
    assert asked == {}


@pytest.mark.parametrize("words", [["--slots", "many"], ["--verification", "none"], ["--prefill", "exact"]])
def test_words_that_do_not_parse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["costs", *words])
    assert raised.value.code == EXIT_REFUSED
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--help" in message


def test_help_starts_without_jax() -> None:
    code = (
        "import sys\nfrom deepinfer_jax.cli import main\n"
        "try:\n    main(['costs', '--help'])\nfinally:\n    assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("--slots", "--max-context", "--verification", "example: deepinfer_jax costs"):
        assert part in done.stdout


@pytest.mark.slow
def test_a_folder_is_measured_and_the_next_engine_finds_the_table(command: Callable[..., Output]) -> None:
    words = ["--model", TINY, "--slots", "1", "--max-context", "256", "--steps", "1"]
    output = command(*words)
    assert output.code == 0, output.err
    sizes = EngineConfig(num_slots=1, max_context=256, drafts="dynamic")
    nothing: Any = None
    model = Model(read_config(TINY), nothing, OFFICIAL, None, name="tiny_fp8fp4")
    table, reason = find_costs(model, sizes)
    assert table is not None and reason is None
    assert output.out.splitlines()[-1] == f"kept in {default_path(table.engine)}"
