"""Loading a folder: numerics, formats, and what is refused.

Separate because nothing is generated here.
Read next: `test_target.py`, loading onto a mesh.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from deepinfer_jax import LLM, EngineConfig, LayoutError, RequestError, load
from deepinfer_jax.config_json import read_config
from deepinfer_jax.engine.load import as_model, read_calibration
from deepinfer_jax.model.numerics import FLOAT32, Numerics
from deepinfer_jax.spec_decode.calibration import (
    CALIBRATION_FILE,
    REGIMES,
    Calibration,
    CalibrationError,
    uncalibrated,
)
from deepinfer_jax.testing.presets import SMALLEST

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["tiny_bf16", "tiny_fp8fp4"])
def test_loading_a_folder(name: str) -> None:
    model = load(GOLDEN / name, "float32")
    assert model.tokenizer is None
    assert model.config.is_quantized == (name == "tiny_fp8fp4")
    assert isinstance(model.numerics, Numerics)
    assert model.numerics.batch_invariant
    assert model.weights.embed.shape == (model.config.vocab_size, model.config.hidden_size)


@pytest.mark.parametrize("changes", [{"batch_invariant": False}, {"cache_format": "fp8"}])
def test_loading_with_other_numerics(changes: dict[str, Any]) -> None:
    assert load(GOLDEN / "tiny_bf16", "float32", **changes).numerics == replace(FLOAT32, **changes)


def test_closing_gives_back_what_was_loaded() -> None:
    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())

    before = live()
    with LLM(GOLDEN / "tiny_bf16", numerics="float32", options=EngineConfig(num_slots=1)) as llm:
        memory = llm.memory
        assert memory["weights"] > 0 and memory["state"] > 0
        assert live() >= before + sum(memory.values())
    assert live() == before


def test_an_unknown_cache_format_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_format: got 'int8', expected one of"):
        load(GOLDEN / "tiny_bf16", cache_format="int8")


def test_unknown_numerics_are_refused_before_the_folder_is_read() -> None:
    with pytest.raises(RequestError, match=r"numerics: got 'float16', expected one of \['float32', 'offi"):
        load("nowhere", "float16")


@pytest.fixture
def drafted_folder(tmp_path: Path) -> Path:
    """The tiny checkpoint, which has draft stages, in a folder that may get a calibration."""
    return Path(shutil.copytree(GOLDEN / "tiny_bf16", tmp_path / "drafted"))


def test_draft_stages_come_with_the_calibration_of_their_folder(drafted_folder: Path) -> None:
    assert load(drafted_folder, "float32").calibration is None
    block_size = read_config(drafted_folder).draft.block_size
    calibration = Calibration({name: (1.5,) * block_size for name in REGIMES}, {"rounds": 7})
    calibration.save(drafted_folder / CALIBRATION_FILE)
    model = load(drafted_folder, "float32")
    assert model.calibration == calibration
    assert model.weights.draft is not None
    assert (model.folder, model.name) == (drafted_folder, "drafted")


def test_draft_stages_and_their_calibration_are_loaded_onto_a_mesh(drafted_folder: Path) -> None:
    block_size = read_config(drafted_folder).draft.block_size
    uncalibrated(block_size).save(drafted_folder / CALIBRATION_FILE)
    model = load(drafted_folder, "float32", mesh="2", layout="data")
    assert model.calibration == uncalibrated(block_size)
    for leaf in jax.tree.leaves(model.weights.draft):
        assert len(leaf.sharding.device_set) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "got no JSON"), ('{"format": "else"}', "got format"), (None, "of 7 positions, expected 3")],
    ids=["cut off", "of something else", "of another draft"],
)
def test_a_damaged_calibration_is_refused_before_the_weights_are_read(
    drafted_folder: Path, content: str | None, message: str
) -> None:
    path = drafted_folder / CALIBRATION_FILE
    uncalibrated(7).save(path) if content is None else path.write_text(content)
    for weights in drafted_folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(CalibrationError, match=message) as refused:
        load(drafted_folder, "float32")
    assert CALIBRATION_FILE in str(refused.value)


def test_without_draft_stages_no_calibration_is_read(drafted_folder: Path) -> None:
    (drafted_folder / CALIBRATION_FILE).write_text("{")
    assert read_calibration(drafted_folder, SMALLEST) is None


def test_a_loaded_model_is_taken_as_it_is() -> None:
    model = load(GOLDEN / "tiny_bf16", "float32")
    assert as_model(model) is model
    with pytest.raises(RequestError, match="got a loaded model and how to load it"):
        as_model(model, mesh="2")
    assert as_model(GOLDEN / "tiny_bf16", "float32").numerics == FLOAT32


@pytest.mark.multi
def test_the_embedded_model_runs_on_a_mesh_that_its_draft_does_not_divide_over() -> None:
    model = load(mesh="8", layout="data+expert")
    assert model.config.draft.n_routed_experts < 8 and model.weights.draft is None
    with pytest.raises(LayoutError, match=r"stages\.ffn\.experts.*which 8 devices"):
        LLM(model, options=EngineConfig(drafts="fixed", num_slots=1, max_context=128))
