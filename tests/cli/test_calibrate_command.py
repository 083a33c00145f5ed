"""The `calibrate` verb: prompts in, temperatures out; what cannot be calibrated is refused in a line.

Separate because what is fitted has tests of its own; here words, files and messages arrive.
Read next: `deepinfer_jax/cli/calibrate.py`, `../engine/test_confidences.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from deepinfer_jax import Model
from deepinfer_jax.cli import EXIT_REFUSED, main
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.spec_decode.calibration import CALIBRATION_FILE, REGIMES, Calibration
from deepinfer_jax.testing.presets import SMALLEST, SMALLEST_DRAFTED, random_weights

SIZE = SMALLEST_DRAFTED.draft.block_size


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": [5 + n, 7, 9]}) + "\n" for n in range(3)))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Load the smallest model and fit nothing; what was asked for will be here."""
    found: dict[str, Any] = {"config": SMALLEST_DRAFTED}

    def fake_load(*_: Any) -> Model:
        return Model(found["config"], random_weights(SMALLEST, jax.random.key(1)), FLOAT32, None)

    def fake_calibrate(
        _model: Model, prompts: Any, params: Any, verification: str, source: Any
    ) -> Calibration:
        found.update(prompts=prompts, params=params, verification=verification)
        facts = {name: {"rounds": 7, "fitted": False} for name in REGIMES}
        facts["greedy"] = {"rounds": 900, "fitted": True, "error_before": [0.08], "error_after": [0.012]}
        return Calibration({name: (1.5,) * SIZE for name in REGIMES}, {**source, "regimes": facts})

    monkeypatch.setattr("deepinfer_jax.engine.load.load", fake_load)
    monkeypatch.setattr("deepinfer_jax.engine.confidences.calibrate", fake_calibrate)
    return found


def test_every_prompt_is_answered_in_every_regime_and_the_result_lies_with_the_model(
    prompts: Path, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(prompts), "--model", str(tmp_path), "--max-tokens", "9"]) == 0
    assert asked["prompts"] == [[5 + n, 7, 9] for n in range(3) for _ in REGIMES]
    assert [one.temperature for one in asked["params"][:3]] == [0.0, 1.0, 1.0]
    assert {one.max_tokens for one in asked["params"]} == {9}
    found = Calibration.load(tmp_path / CALIBRATION_FILE, SIZE)
    assert found.temperatures["greedy"] == (1.5,) * SIZE and found.source["prompts"] == 3
    out = capsys.readouterr().out
    assert "greedy: 900 rounds; calibration error by position 8.0% -> 1.2%" in out
    assert "sampled: 7 rounds are too few; left as it is" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["PROMPTS"], "output: got none for the embedded model"),
        (["nowhere.jsonl", "--output", "x.json"], "got 'nowhere.jsonl', which is no file"),
        (["EMPTY", "--output", "x.json"], "got no line in"),
        (["PROMPTS", "--output", "x.json", "--verification", "hope"], "invalid choice: 'hope'"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is_loaded(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    paths = {"PROMPTS": str(prompts), "EMPTY": str(tmp_path / "empty.jsonl")}
    try:
        code: Any = main(["calibrate", *(paths.get(word, word) for word in words)])
    except SystemExit as error:
        code = error.code
    assert code == EXIT_REFUSED
    assert message in capsys.readouterr().err


def test_a_model_without_drafts_is_refused(
    prompts: Path, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked["config"] = SMALLEST
    assert main(["calibrate", str(prompts), "--output", str(tmp_path / "x.json")]) == EXIT_REFUSED
    assert "which has no draft stages" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
