"""The training loop on a made-up corpus: stop, resume, export.

Separate because it runs the trainer itself, at a size that compiles in seconds.
Read next: `deepinfer_jax/training/lm.py`.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.checkpoint import load_weights, read_token_map
from deepinfer_jax.config_json import parse_config, read_config
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.training import lm
from deepinfer_jax.training.export import EVALUATION_FILE
from deepinfer_jax.training.forward import TrainingMode
from deepinfer_jax.training.nano_config import nano_config_document
from deepinfer_jax.training.state_files import StateError

pytestmark = pytest.mark.slow  # compiling the optimizer takes 40 s

STEPS, STOP = 3, 2

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "compress_ratios": [0, 1],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "candidate_source_layer_id": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "index_n_heads": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "engram_layer_ids": [1],
    "hc_mult": 2,
}
"""Changes to the nano model's document: its vocabulary, two narrow layers."""

STORY = "The miller had three sons, and the youngest of them loved the river more than the mill. " * 12


class Setting(NamedTuple):
    """A run with what it reads and writes."""

    run: lm.Run
    document: dict[str, Any]
    corpus: Path
    folder: Path


def write_corpus(folder: Path) -> None:
    turn = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The Elbe."}]
    stories, turns = [{"text": STORY}] * 4, [{"messages": turn}] * 4
    files = {
        **{f"{name}_{part}": stories for name in ("stories", "stories2") for part in ("train", "valid")},
        **{f"{name}_{part}": turns for name in ("chat", "json") for part in ("train", "valid")},
    }
    for name, records in files.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    document = nano_config_document(with_draft=False)
    text = document["text_config"]
    text.update(SMALL)
    text["engram_num_embeddings"] = text["engram_num_embeddings"][:1]
    corpus = tmp_path_factory.mktemp("corpus")
    write_corpus(corpus)
    run = lm.Run(parse_config(document), STEPS, batch_rows=2, seed=41)
    return Setting(run, document, corpus, tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module", autouse=True)
def one_phase():
    """Train in the last phase's mode throughout, so that one step function is compiled."""
    mode = TrainingMode(OFFICIAL, is_sparse=True)
    phases = tuple(lm.Phase(name, 0.0, mode, is_quantized=True) for name in ("never", "quantized"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lm, "PHASES", phases)
        # One program each, where the trainer runs hundreds of small ones: compiling them takes longer.
        patched.setattr(lm, "initial_weights", jax.jit(lm.initial_weights, static_argnums=(0, 1)))
        patched.setattr(lm, "compute_weights", jax.jit(lm.compute_weights, static_argnums=(1, 2, 3)))
        yield


@pytest.fixture(scope="module", autouse=True)
def optax_promotion():
    """Optax mixes integers and floats; the setting is global as steps are compiled in threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def train(setting: Setting, until: int, log: list[str]) -> lm.TrainState:
    run, document, corpus, folder = setting
    return lm.train(run, document, corpus, folder, until, time_limit=600.0, log=log.append)


class Stages(NamedTuple):
    """States of one run: stopped, as restored from its files, continued; and the second command's log."""

    stopped: lm.TrainState
    restored: lm.TrainState
    finished: lm.TrainState
    log: list[str]


@pytest.fixture(scope="module")
def stages(setting: Setting) -> Stages:
    stopped = train(setting, STOP, [])
    restored = lm.TrainState(setting.run, read_token_map(NANO_FOLDER, setting.run.config))
    restored.restore(setting.folder, setting.document)
    log: list[str] = []
    return Stages(stopped, restored, train(setting, STEPS, log), log)


def test_a_run_stops_where_it_is_told(stages: Stages) -> None:
    assert stages.stopped.step == STOP
    assert [step for step, _ in stages.stopped.history["train"]] == [0, 1]


def test_the_state_files_give_the_state_back_up_to_their_rounding(stages: Stages) -> None:
    assert stages.restored.step == STOP
    assert stages.restored.history == stages.stopped.history
    trees = [(state.weights, state.moments) for state in (stages.restored, stages.stopped)]
    for found, expected in zip(*map(jax.tree.leaves, trees), strict=True):
        assert found.dtype == expected.dtype
        found, expected = np.asarray(found), np.asarray(expected)
        if not np.issubdtype(expected.dtype, np.floating):
            np.testing.assert_array_equal(found, expected)
            continue
        # Parameters keep 8 bits of mantissa, first moments 4 bits relative to their row's largest.
        scale = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(found, expected, rtol=2**-4, atol=float(scale) * 2**-9)


def test_weights_keep_more_bits_than_moments(stages: Stages) -> None:
    for found, expected in zip(
        jax.tree.leaves(stages.restored.weights), jax.tree.leaves(stages.stopped.weights), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-30)


def test_a_second_command_continues(stages: Stages) -> None:
    assert f"continuing from step {STOP}" in stages.log
    assert stages.finished.step == STEPS
    assert [step for step, _ in stages.finished.history["train"]] == [0, 1, 2]
    assert stages.finished.history["train"][:STOP] == stages.stopped.history["train"]
    for kind in ("stories", "chat", "json"):
        assert [step for step, _ in stages.finished.history[kind]] == [STOP, STEPS]
    # A new vocabulary of 4096 starts near ln 4096 = 8.3 nats.
    assert all(5 < nats < 9 for _, nats in stages.finished.history["train"])
    before, after = (np.asarray(state.weights.embed) for state in (stages.restored, stages.finished))
    assert 0 < np.abs(after - before).max() < 0.1


def test_another_configuration_does_not_resume(setting: Setting, stages: Stages) -> None:
    other = {**setting.document, "pad_token_id": 5}
    state = lm.TrainState(setting.run, np.asarray(stages.stopped.token_map))
    with pytest.raises(StateError, match="expected"):
        state.restore(setting.folder, other)


def test_curves_are_drawn(setting: Setting, stages: Stages) -> None:
    assert (setting.folder / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_the_export_is_a_checkpoint_with_its_evaluation(
    setting: Setting, stages: Stages, tmp_path: Path
) -> None:
    lm.finish(stages.finished, setting.document, setting.corpus, tmp_path)
    config = read_config(tmp_path)
    assert config == setting.run.config
    weights = load_weights(tmp_path, config, np.dtype("float32"))
    np.testing.assert_array_equal(weights.token_map, stages.finished.token_map)
    np.testing.assert_allclose(weights.embed, stages.finished.weights.embed, rtol=2**-8, atol=1e-30)
    evaluation = json.loads((tmp_path / EVALUATION_FILE).read_text())
    assert (evaluation["steps"], evaluation["batch_rows"], evaluation["seed"]) == (STEPS, 2, 41)
    for kind, losses in evaluation["quantized"].items():
        assert losses["nats"] == pytest.approx(stages.finished.history[kind][-1][1], rel=1e-5)
        assert losses["bits_per_byte"] > 0


def test_phases_follow_the_fraction_of_steps(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = TrainingMode(OFFICIAL, is_sparse=True)
    phases = tuple(lm.Phase(f"from_{start}", start, mode, False) for start in (0.0, 0.5, 0.8))
    monkeypatch.setattr(lm, "PHASES", phases)
    run = lm.Run(setting.run.config, num_steps=10, batch_rows=2, seed=0)
    names = [run.phase(step).name for step in range(10)]
    assert names == ["from_0.0"] * 5 + ["from_0.5"] * 3 + ["from_0.8"] * 2
