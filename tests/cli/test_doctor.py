"""The `doctor` verb: every part is reported, a part that fails is a line, answers follow what is there.

Separate because what is installed and attached is mostly replaced here.
Read next: `deepinfer_jax/cli/doctor.py`.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from deepinfer_jax import EngineConfig
from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.cli import doctor, main
from deepinfer_jax.config_json import read_config
from deepinfer_jax.engine import load as loading
from deepinfer_jax.engine.measure import identify
from deepinfer_jax.kernels.dispatch import Unavailable
from deepinfer_jax.kernels.pallas.hyper_connection import api as hyper_connection
from deepinfer_jax.kernels.pallas.sparse_attention import api as sparse_attention
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.spec_decode.costs import CostTable, default_path
from deepinfer_jax.testing.presets import SMALLEST

ROOT = Path(__file__).parents[2]

type Found = Callable[[], dict[str, dict[str, Any]]]


@pytest.fixture
def found(capsys: pytest.CaptureFixture[str]) -> Found:
    """Run `doctor --json` and read it."""

    def run() -> dict[str, dict[str, Any]]:
        assert main(["doctor", "--json"]) == 0
        output = capsys.readouterr()
        assert output.err == ""
        return json.loads(output.out)

    return run


def device(kind: str, platform: str = "gpu", **memory: int) -> SimpleNamespace:
    """Make a device that JAX could see."""
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: memory or None)


def text_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Run `doctor` and give what it prints."""
    assert main(["doctor"]) == 0
    return capsys.readouterr().out


def test_text_and_json_report_the_same_names(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    sections, text = found(), text_of(capsys)
    assert list(sections) == list(doctor.SECTIONS)
    lines = text.splitlines()
    for title, values in sections.items():
        start = lines.index(title) + 1
        printed = lines[start : start + len(values)]
        assert all(
            line.startswith(f"  {name}  ") or line.split("  ")[1] == name
            for line, name in zip(printed, values, strict=True)
        )
        assert "failed" not in values


def test_the_versions_are_those_of_the_modules(found: Found) -> None:
    versions = found()["versions"]
    assert versions["jax"] == jax.__version__
    assert versions["Python"] == ".".join(str(part) for part in sys.version_info[:3])


def test_the_embedded_model_is_what_its_card_says(found: Found) -> None:
    model, card = found()["embedded model"], (NANO_FOLDER / "MODEL_CARD.md").read_text()
    for name in ("parameters", "draft parameters"):
        assert f" {model[name] / 1e6:.1f} M" in card, name
    assert model["weights"] > model["parameters"] // 2


def test_a_package_that_is_missing_is_said_so(
    found: Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-distribution",))
    assert found()["versions"]["no-such-distribution"] is None
    assert "no-such-distribution     not installed" in text_of(capsys)


def test_a_probe_that_fails_is_a_line_and_the_others_go_on(
    found: Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[Any]:
        raise RuntimeError("Unable to initialize\n backend 'cuda'")

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setattr(jax, "devices", fail)
    sections = found()
    words = "RuntimeError: Unable to initialize backend 'cuda'"
    assert sections["devices"] == {"failed": {"error": words}}
    assert sections["features"]["GPU"] == {"on": False, "reason": f"could not be asked: {words}"}
    assert sections["versions"]["jax"] == jax.__version__
    assert f"failed                   {words}" in text_of(capsys)


def test_devices_are_counted_by_kind_with_their_memory(
    found: Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [device("NVIDIA H200", bytes_in_use=2**30, bytes_limit=100 * 2**30) for _ in range(2)]
    monkeypatch.setattr(jax, "local_devices", lambda: [*seen, device("cpu", "cpu")])
    monkeypatch.setattr(jax, "devices", jax.local_devices)
    sections = found()
    memory = {"bytes_in_use": 2**30, "bytes_limit": 100 * 2**30}
    assert sections["devices"]["NVIDIA H200 (gpu)"] == {
        "platform": "gpu",
        "kind": "NVIDIA H200",
        "count": 2,
        "memory": [memory, memory],
    }
    assert sections["devices"]["cpu"]["memory"] == [None]
    assert sections["features"]["GPU"] == {"on": True}
    assert "2, memory in use of what JAX may take: 1.0 GiB of 100.0 GiB" in text_of(capsys)


@pytest.mark.parametrize(
    ("installed", "platforms", "expected"),
    [
        ({}, None, "pip install 'jax[cuda13]'"),
        (
            {"jax-cuda13-plugin": "0.11.2"},
            None,
            "jax-cuda13-plugin 0.11.2 is installed, but JAX finds no GPU",
        ),
        ({"jax-cuda12-plugin": "0.11.2"}, "cpu", "JAX_PLATFORMS=cpu; unset it"),
    ],
)
def test_no_gpu_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], platforms: str | None, expected: str
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [device("cpu", "cpu")])
    monkeypatch.setattr(doctor, "_version", installed.get)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    features = {line.name: line.value for line in doctor.report()["features"]}
    assert expected in features["GPU"]["reason"]


def test_the_cache_is_measured_and_not_made(
    found: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    absent = tmp_path / "not" / "yet"
    monkeypatch.setattr(loading, "use_compilation_cache", lambda: absent)
    cache = found()["compiled programs"]
    assert cache == {"folder": str(absent), "programs": {"count": 0, "bytes": 0}, "writable": True}
    assert not absent.exists()
    (tmp_path / "jit_step-1-cache").write_bytes(b"x" * 100)
    (tmp_path / "jit_step-1-atime").write_bytes(b"x" * 8)
    monkeypatch.setattr(loading, "use_compilation_cache", lambda: tmp_path)
    assert found()["compiled programs"]["programs"] == {"count": 1, "bytes": 108}


def test_a_cache_that_cannot_be_written_is_said_so(
    found: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(loading, "use_compilation_cache", lambda: file / "folder")
    assert found()["compiled programs"]["writable"] is False
    assert "set JAX_COMPILATION_CACHE_DIR" in text_of(capsys)


def test_a_kernel_is_on_once_something_else_than_the_reference_runs(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "kernel sparse_attention"
    reference = sparse_attention.IMPLEMENTATIONS["reference"]
    tables = {
        "the reference runs (nothing else is written yet)": {"reference": reference},
        "the reference runs (gpu: needs a GPU)": {"gpu": Unavailable("needs a GPU"), "reference": reference},
        "nothing can run (gpu: needs a GPU)": {"gpu": Unavailable("needs a GPU")},
    }
    for reason, table in tables.items():
        monkeypatch.setattr(sparse_attention, "IMPLEMENTATIONS", table)
        assert found()["features"][name] == {"on": False, "reason": reason}
    monkeypatch.setattr(sparse_attention, "IMPLEMENTATIONS", {"gpu": reference, "reference": reference})
    assert found()["features"][name] == {"on": True}


def test_functions_of_one_operation_are_told_apart(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = hyper_connection.ENTER_IMPLEMENTATIONS["reference"]
    table = {"gpu": reference, "reference": reference}
    monkeypatch.setattr(hyper_connection, "ENTER_IMPLEMENTATIONS", table)
    reason = found()["features"]["kernel hyper_connection"]["reason"]
    assert reason == "leave: the reference runs (nothing else is written yet)"


@pytest.fixture
def drafting_nano(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Put a model with draft stages in the place of the embedded one, and keep its step times apart."""
    monkeypatch.setattr("deepinfer_jax.assets.NANO_FOLDER", ROOT / "tests" / "golden" / "tiny_fp8fp4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("drafting_nano")
def test_drafts_are_on_and_want_step_times(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "no step times were measured for this engine; measure them once"
    line = found()["features"]["speculative drafts"]
    assert line == {"on": True, "costs": None, "reason": reason}
    words = f"on   drafts='dynamic' verifies all drafts: {reason} (run: deepinfer_jax costs)"
    assert words in text_of(capsys)


@pytest.mark.usefixtures("drafting_nano")
def test_step_times_of_the_default_engine_are_dated(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    folder, nothing = ROOT / "tests" / "golden" / "tiny_fp8fp4", None
    model: Any = loading.Model(read_config(folder), nothing, OFFICIAL, None, name=folder.name)
    engine, today = identify(model, EngineConfig()), datetime.date.today().isoformat()
    CostTable(engine, today, {64: 1.0}, {1: 0.1}, 1.5).save(default_path(engine))
    assert found()["features"]["speculative drafts"] == {"on": True, "costs": today}
    assert f"step times of the default engine were measured on {today}" in text_of(capsys)


def test_a_model_without_draft_stages_drafts_nothing(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer_jax.config_json.read_config", lambda _: SMALLEST)
    line = found()["features"]["speculative drafts"]
    assert line["on"] is False and "no draft stages" in line["reason"]


def test_every_operation_with_a_table_is_asked(found: Found) -> None:
    folders = (ROOT / "deepinfer_jax" / "kernels" / "pallas").glob("*/api.py")
    expected = {f"kernel {path.parent.name}" for path in folders}
    assert expected == {name for name in found()["features"] if name.startswith("kernel ")}


def test_a_missing_module_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    features = {line.name: line.words for line in doctor.report()["features"]}
    assert features["plots"] == "off  no matplotlib; pip install 'deepinfer-jax[train]'"


def test_a_process_without_any_device_still_reports() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    command = [sys.executable, "-m", "deepinfer_jax", "doctor"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "no_such_platform" in done.stdout and "structured output" in done.stdout
