"""The `layout` verb: words arrive, reports are printed and written, refusals are one line.

Separate because what is predicted or compiled is mostly replaced by values written by hand.
Read next: `deepinfer_jax/cli/layout.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from deepinfer_jax.assets import NANO_FOLDER, RELEASED_FOLDER
from deepinfer_jax.cli import EXIT_REFUSED, main
from deepinfer_jax.cli.layout import PIPE_WIDTH
from deepinfer_jax.config_json import read_config
from deepinfer_jax.lab import Refusal, Sweep
from deepinfer_jax.sharding.errors import LayoutError
from deepinfer_jax.sharding.layout_plan import LayoutPlan
from deepinfer_jax.sharding.mesh import MeshShape
from deepinfer_jax.sharding.presets import PRESETS
from deepinfer_jax.sharding.report import (
    comparison_html,
    comparison_text,
    compiled_text,
    page,
    report_html,
    report_svg,
    report_text,
)
from deepinfer_jax.testing.layout_plans import COMPILED, plan_of

GOLDEN = Path(__file__).parents[1] / "golden"


class Output(NamedTuple):
    """What a command left: exit code and both streams."""

    code: int
    out: str
    err: str


class Calls(NamedTuple):
    """How the command line called the package."""

    planned: list[tuple[tuple, dict[str, Any]]]
    swept: list[tuple]
    compiled: list[tuple]
    required: list[str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """Run `layout` with some words in this process."""

    def run(*words: str) -> Output:
        code = main(["layout", *words])
        return Output(code, *capsys.readouterr())

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replace predicting and compiling by values written by hand; `tensor` is refused."""
    found = Calls([], [], [], [])

    def plan(*arguments: Any, **keywords: Any) -> LayoutPlan:
        found.planned.append((arguments, keywords))
        _, mesh, layout, slots, *_ = arguments
        if layout.name == "tensor":
            raise LayoutError("layout 'tensor': got 64 devices, expected 8; change the mesh")
        return plan_of(",".join(f"{name}={size}" for name, size in mesh.axes), layout, slots=slots)

    def compare(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
        return list(reversed(plans))

    def sweep(*arguments: Any, **keywords: Any) -> Sweep:
        found.swept.append((*arguments, keywords))
        plans = [plan_of("2x2"), *[plan_of("4", "single")] * 21]
        return Sweep(tuple(plans), (Refusal("tensor", plans[0].mesh, "too many"),))

    def compile_step(*arguments: Any) -> Any:
        found.compiled.append(arguments)
        return COMPILED

    lab = SimpleNamespace(plan=plan, compare=compare, sweep=sweep)
    monkeypatch.setitem(sys.modules, "deepinfer_jax.lab", lab)
    lab_compile = SimpleNamespace(
        compile_step=compile_step, require_aot_packages=lambda: found.required.append("gpu")
    )
    monkeypatch.setitem(sys.modules, "deepinfer_jax.lab_compile", lab_compile)
    return found


def test_one_layout(command: Callable[..., Output], calls: Calls) -> None:
    output = command("--mesh", "2x2", "--slots", "8")
    assert output == Output(0, report_text(plan_of(), PIPE_WIDTH), "")
    assert calls.compiled == []


def test_options_left_out(command: Callable[..., Output], calls: Calls) -> None:
    assert command().code == 0
    config = read_config(RELEASED_FOLDER)
    arguments = (config, MeshShape((("data", 64),)), PRESETS["data+expert"], 4096, 131072)
    assert calls.planned == [((*arguments, "H200"), {"prefill_rows": None})]


def test_every_option_arrives(command: Callable[..., Output], calls: Calls) -> None:
    output = command(
        *("--devices", "8", "--mesh", "rows=4,columns=2", "--preset", "expert", "--slots", "24"),
        *("--context", "512", "--prefill-rows", "1024", "--model", "nano", "--device", "B200"),
    )
    assert output.code == 0
    mesh = MeshShape((("rows", 4), ("columns", 2)))
    arguments = (read_config(NANO_FOLDER), mesh, PRESETS["expert"], 24, 512)
    assert calls.planned == [((*arguments, "B200"), {"prefill_rows": 1024})]


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_model_is_a_folder_or_its_configuration(
    command: Callable[..., Output], calls: Calls, name: str
) -> None:
    folder = GOLDEN / "tiny_bf16"
    assert command("--model", str(folder / name)).code == 0
    assert calls.planned[0][0][0] == read_config(folder)


def test_files_are_written(command: Callable[..., Output], calls: Calls, tmp_path: Path) -> None:
    picture, document = tmp_path / "who.svg", tmp_path / "report.html"
    words = ("--mesh", "2x2", "--slots", "8")
    output = command(*words, "--svg", str(picture), "--html", str(document))
    assert output == command(*words)
    plan = plan_of()
    assert picture.read_text() == report_svg(plan)
    ElementTree.parse(picture)
    assert document.read_text() == page("Layout data+expert", report_html(plan))


def test_several_layouts_side_by_side(command: Callable[..., Output], calls: Calls, tmp_path: Path) -> None:
    document = tmp_path / "layouts.html"
    words = ("--mesh", "2x2", "--slots", "8", "--html", str(document))
    output = command(*words, "--compare", "data+expert, tensor,single")
    plans = [plan_of(layout="single"), plan_of(layout="data+expert")]
    refused = "refused: layout 'tensor': got 64 devices, expected 8; change the mesh\n"
    assert output == Output(0, comparison_text(plans, PIPE_WIDTH) + refused, "")
    assert document.read_text() == page("Layouts", comparison_html(plans))


def test_a_sweep(command: Callable[..., Output], calls: Calls) -> None:
    output = command("--devices", "8", "--sweep", "--slots", "64", "--objective", "latency")
    plans = [plan_of("2x2"), *[plan_of("4", "single")] * 19]
    text, *notes = output.out.rpartition("2 more were tried and are slower.\n")
    assert text == comparison_text(plans, PIPE_WIDTH)
    assert notes[1].startswith(
        "1 more cannot be; --preset NAME --mesh GRID says why, as for layout tensor on"
    )
    arguments = (read_config(RELEASED_FOLDER), 8, 64, 131072, "H200", "latency")
    assert calls.swept == [(*arguments, {"prefill_rows": None})]


@pytest.mark.parametrize("target", ["cpu", "b200"])
def test_compiling_comes_after_the_report(command: Callable[..., Output], calls: Calls, target: str) -> None:
    output = command("--mesh", "2x2", "--slots", "8", "--compile", target)
    plan = plan_of()
    expected = report_text(plan, PIPE_WIDTH) + compiled_text(plan, COMPILED, PIPE_WIDTH)
    assert output == Output(0, expected, "")
    assert calls.compiled == [(plan.config, plan.mesh, plan.layout, 8, plan.context, "decode", target)]
    # Whether it can be compiled at all is known before anything is printed.
    assert calls.required == ([] if target == "cpu" else ["gpu"])


def test_the_released_model_on_64_devices_takes_less_than_two_seconds(
    command: Callable[..., Output], tmp_path: Path
) -> None:
    files = ("--svg", str(tmp_path / "who.svg"), "--html", str(tmp_path / "report.html"))
    started = time.process_time()
    output = command("--mesh", "8x8", *files)
    assert time.process_time() - started < 2
    assert (output.code, output.err) == (0, "")
    for part in ("It fits", "experts over data, model: 64 parts", "expert dispatch", "all-to-all"):
        assert part in output.out
    ElementTree.parse(tmp_path / "who.svg")


def test_layouts_that_cannot_be_stand_below_the_others(command: Callable[..., Output]) -> None:
    output = command("--devices", "64", "--compare", "tensor,data+expert,data", "--slots", "64")
    assert output.code == 0
    assert output.out.index("data+expert ") < output.out.index("data  ")
    refusal = output.out.splitlines()[-1]
    assert refusal.startswith("refused: layout 'tensor' on mesh data=64: ")
    assert "numbers of devices that work: 1, 2, 4, 8" in refusal


PREDICTED: dict[str, tuple[list[str], list[str]]] = {
    "layout": (["--preset", "tensor"], ["layout 'tensor'", "'o_groups'", "8192", "'data'", "1, 2, 4, 8"]),
    "slots": (["--slots", "100"], ["slots", "got 100", "a multiple of 64", "take 128"]),
    "context": (["--context", "2000000"], ["context", "2000000", "1048576", "choose"]),
    "rows": (["--prefill-rows", "100"], ["prefill rows", "got 100", "a multiple of 4096"]),
    "device": (["--device", "H100"], ["device", "'H100'", "'H200'", "choose"]),
    "objective": (["--sweep", "--objective", "cost"], ["objective", "'cost'", "'latency'", "choose"]),
}
"""Words that the prediction itself refuses, and what the refusal must say."""


@pytest.mark.parametrize("name", PREDICTED)
def test_what_the_prediction_refuses(command: Callable[..., Output], name: str) -> None:
    words, parts = PREDICTED[name]
    output = command(*words)
    assert (output.code, output.out) == (EXIT_REFUSED, "")
    assert output.err.startswith("deepinfer_jax layout: ")
    assert output.err.count("\n") == 1 and output.err.endswith("\n")
    assert [part for part in (";", *parts) if part not in output.err] == [], output.err


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "mesh_word": (["--mesh", "two"], ["mesh", "'two'", "2x4"]),
    "mesh_size": (["--mesh", "0x4"], ["mesh", "('data', 0)", "at least 1"]),
    "no_device": (["--devices", "0"], ["--devices", "got 0", "1 or more"]),
    "other_number": (["--devices", "8", "--mesh", "2x2"], ["--devices", "got 8", "its 4", "leave"]),
    "preset": (["--preset", "fast"], ["layout", "'fast'", "'data+expert'", "choose"]),
    "compared": (["--compare", "data,fast"], ["layout", "'fast'", "'data+expert'", "choose"]),
    "nothing_compared": (["--compare", ""], ["layout", "''", "'data+expert'", "choose"]),
    "all_refused": (["--compare", "tensor,tensor"], ["layout 'tensor'", "64 devices", "change the mesh"]),
    "one_refused": (["--preset", "tensor"], ["layout 'tensor'", "64 devices", "change the mesh"]),
    "model": (["--model", "nowhere"], ["model folder", "'nowhere'", "does not exist", "pass"]),
    "picture_of_two": (["--compare", "data", "--svg", "x.svg"], ["--svg", "--compare", "one layout"]),
    "compile_all": (["--sweep", "--compile", "cpu"], ["--compile", "--sweep", "one layout", "--preset"]),
    "no_such_place": (["--html", "/no/where.html"], ["--html", "'/no/where.html'", "folder", "choose"]),
}
"""Words, and what the refusal must say."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(command: Callable[..., Output], calls: Calls, name: str) -> None:
    words, parts = REFUSED[name]
    output = command(*words)
    assert (output.code, output.out) == (EXIT_REFUSED, "")
    assert output.err.startswith("deepinfer_jax layout: ")
    assert output.err.count("\n") == 1 and output.err.endswith("\n")
    missing = [part for part in ("got", "expected", ";", *parts) if part not in output.err]
    assert missing == [], output.err


@pytest.mark.parametrize(
    "words",
    [
        ["--devices", "many"],
        ["--slots", "1.5"],
        ["--compile", "gpu"],
        ["--sweep", "--compare", "data"],
        ["--preset", "data", "--sweep"],
        ["8x8"],
    ],
    ids=lambda words: "_".join(words),
)
def test_words_that_do_not_parse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["layout", *words])
    assert raised.value.code == EXIT_REFUSED
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "--help" in message


def test_help_explains_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["layout", "--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for word in ("device", "mesh", "layout", "slots", "context"):
        assert f"\n  {word} " in text
    for name in PRESETS:
        assert f"\n  {name} " in text
    assert "examples:\n  deepinfer_jax layout --devices 64" in text
    assert max(len(line) for line in text.splitlines()) <= 90


WITHOUT_JAX = """
import sys
from deepinfer_jax.cli import main
try:
    main(["layout", "--help"])
finally:
    assert "jax" not in sys.modules
"""


def test_help_starts_without_jax() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_released_configuration_that_ships_is_the_published_one() -> None:
    shipped = json.loads((RELEASED_FOLDER / "config.json").read_text())
    assert shipped == json.loads((GOLDEN / "released_config.json").read_text())
