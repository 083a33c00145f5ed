"""The draft's training from its command line, at a size that compiles soon: sample, train, resume, export.

Separate because it runs the trainer itself; the parts have tests of their own.
Read next: `deepinfer_jax/training/draft.py`.
"""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import spec_leaves
from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.checkpoint import load_weights, write_checkpoint
from deepinfer_jax.config_json import parse_config, read_config
from deepinfer_jax.kernels import weight_values
from deepinfer_jax.model.draft_weights import draft_weight_specs
from deepinfer_jax.model.numerics import OFFICIAL
from deepinfer_jax.testing.presets import random_weights
from deepinfer_jax.training import draft
from deepinfer_jax.training.draft_data import read_samples
from deepinfer_jax.training.draft_state import EVALUATION_FILE, DraftState
from deepinfer_jax.training.draft_steps import DraftRun
from deepinfer_jax.training.nano_config import nano_config_document
from deepinfer_jax.training.optimizer import cast_as_stored
from deepinfer_jax.training.state_files import StateError

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
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
    "engram_layer_ids": [0],
    "hc_mult": 2,
}
"""Changes to the nano model's document: its vocabulary, two narrow layers."""

STAGES = {"num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_target_layer_ids": [1]}

STEPS, STOP, CALL = 12, 8, 4

SIZES = ("--batch-rows", "2", "--anchors", "8", "--call-steps", str(CALL), "--steps", str(STEPS))


def small_document(with_draft: bool) -> dict[str, Any]:
    document = nano_config_document(with_draft=with_draft)
    text = document["text_config"]
    text.update(SMALL)
    text["engram_num_embeddings"] = text["engram_num_embeddings"][:1]
    text["compress_ratios"] = [0, 1]
    if with_draft:
        text.update(STAGES)
        text["compress_ratios"] = [0, 1, 0, 0]
    return document


def write_corpus(folder: Path) -> None:
    story = "The miller had three sons. The youngest of them loved the river. He went there."
    turn = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The Elbe."}]
    files = {"stories_train": {"text": story}, "chat_train": {"messages": turn}}
    for name, record in {**files, "json_train": {"messages": turn}}.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for _ in range(12))


class Folders(NamedTuple):
    """What the commands read and write."""

    trunk: Path
    corpus: Path
    samples: Path
    state: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory):
    """A small trunk in place of the embedded one."""
    found = Folders(*(tmp_path_factory.mktemp(name) for name in Folders._fields))
    write_corpus(found.corpus)
    document = small_document(with_draft=False)
    config = parse_config(document)
    weights = random_weights(config, jax.random.key(3)).replace(token_map=None)
    write_checkpoint(found.trunk, document, weights, config)
    shutil.copyfile(NANO_FOLDER / "tokenizer.json", found.trunk / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(draft, "NANO_FOLDER", found.trunk)
        patched.setattr(draft, "nano_config_document", lambda with_draft: small_document(with_draft))
        yield found


@pytest.fixture(scope="module", autouse=True)
def optax_promotion():
    """Optax mixes integers and floats; the setting is global as steps are compiled in threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def command(folders: Folders, *arguments: str) -> None:
    draft.main(["--samples", str(folders.samples), "--state", str(folders.state), *SIZES, *arguments])


def load_state(folders: Folders, **changes: Any) -> DraftState:
    document = small_document(with_draft=True)
    config = parse_config(document)
    sizes = {"batch_rows": 2, "anchors": 8, "seed": 41, **changes}
    state = DraftState(DraftRun(config, OFFICIAL, **sizes), jnp.ones(config.hidden_size), STEPS)
    state.restore(folders.state, document)
    return state


class Stages(NamedTuple):
    """States of one run: stopped, and continued to its end."""

    stopped: DraftState
    finished: DraftState


@pytest.fixture(scope="module")
def sampled(folders: Folders) -> Folders:
    sizes = ("--slots", "4", "--sample-steps", "128", "--chunk-steps", "64", "--max-tokens", "64")
    command(folders, "--sample", "--corpus", str(folders.corpus), "--prompts", "30", *sizes)
    return folders


@pytest.fixture(scope="module")
def stages(sampled: Folders) -> Stages:
    command(sampled, "--train", "--until", str(STOP))
    stopped = load_state(sampled)
    command(sampled, "--train")
    return Stages(stopped, load_state(sampled))


pytestmark = pytest.mark.slow  # compiles the sampler, the trunk and the steps


def test_samples_are_supervised_on_answers(sampled: Folders) -> None:
    rows = read_samples(sampled.samples)
    # Four slots of 128 steps, of which some are prompts.
    assert 200 < (rows.loss_codes > 0).sum() < 4 * 128
    assert (rows.segments > 0).sum() > (rows.loss_codes > 0).sum()


def test_a_run_stops_where_it_is_told_and_continues(stages: Stages) -> None:
    assert (stages.stopped.step, stages.finished.step) == (STOP, STEPS)
    for state in stages:
        assert [step for step, _ in state.history["train"]] == list(range(CALL, state.step + 1, CALL))
    assert stages.finished.history["train"][:2] == stages.stopped.history["train"]
    assert [step for step, _ in stages.finished.history["held_out"]] == [STOP, STEPS]


def test_the_draft_learns(stages: Stages) -> None:
    """Few tokens at a high rate: the loss falls, and what is accepted rises."""
    reports = [found for _, found in stages.finished.history["train"]]
    assert reports[-1]["ce"] < reports[0]["ce"] - 0.1
    assert reports[-1]["l1"] < reports[0]["l1"]
    assert reports[-1]["tau"] > reports[0]["tau"] > 1
    assert len(reports[0]["accept_rates"]) == STAGES["dspark_block_size"]


def test_every_weight_has_moved_and_biases_by_steps_of_their_own(stages: Stages) -> None:
    specs = spec_leaves(draft_weight_specs(stages.finished.run.config))
    initial = DraftState(stages.finished.run, jnp.ones(SMALL["hidden_size"]), STEPS)
    leaves = [jax.tree.leaves(state.weights) for state in (initial, stages.finished)]
    for (name, _), before, after in zip(specs, *leaves, strict=True):
        assert np.any(np.asarray(before) != np.asarray(after)), name
        if name.endswith("ffn.bias"):
            assert np.abs(after).max() <= STEPS * draft.BIAS_STEP * 1.001


def test_another_run_does_not_resume(sampled: Folders, stages: Stages) -> None:
    for changes in ({"anchors": 4}, {"seed": 1}, {"is_quantized": False}):
        with pytest.raises(StateError, match="expected"):
            load_state(sampled, **changes)


@pytest.fixture(scope="module")
def exported(sampled: Folders, stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "checkpoint"
    command(sampled, "--export", str(folder))
    return folder


def test_the_exported_trunk_is_the_loaded_one_bit_for_bit(exported: Path, folders: Folders) -> None:
    config = read_config(exported)
    assert config == parse_config(small_document(with_draft=True))
    found = load_weights(exported, config, jnp.bfloat16).replace(draft=None)
    expected = load_weights(folders.trunk, read_config(folders.trunk), jnp.bfloat16)
    leaves = [jax.tree.leaves(tree) for tree in (found, expected)]
    assert len(leaves[0]) > 50
    for left, right in zip(*leaves, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8))


def test_the_exported_draft_is_what_training_computed_with(exported: Path, stages: Stages) -> None:
    config = read_config(exported)
    found = load_weights(exported, config, jnp.bfloat16).draft
    specs = draft_weight_specs(config)
    expected = cast_as_stored(specs, stages.finished.weights, jnp.bfloat16, is_quantized=True)
    for (name, spec), wanted in zip(spec_leaves(specs), jax.tree.leaves(expected), strict=True):
        value = found
        for part in name.split("."):
            value = getattr(value, part)
        if spec.storage.is_quantized:
            value = weight_values(value, jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(value), np.asarray(wanted), err_msg=name)


def test_the_export_says_how_it_was_trained(exported: Path, stages: Stages) -> None:
    evaluation = json.loads((exported / EVALUATION_FILE).read_text())
    assert (evaluation["step"], evaluation["steps"], evaluation["seed"]) == (STEPS, STEPS, 41)
    assert evaluation["held_out"] == stages.finished.history["held_out"][-1][1]
    tokenizer = (exported / "tokenizer.json").read_bytes()
    assert tokenizer == (NANO_FOLDER / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("seconds", "expected"), [(1e6, 12), (5.0, 8), (0.0, 8)])
def test_a_run_is_fitted_to_its_time(stages: Stages, seconds: float, expected: int) -> None:
    """A step takes a second, a call has four; a run that looked too long may grow again."""
    state = DraftState(stages.finished.run, jnp.ones(SMALL["hidden_size"]), STEPS)
    state.step = 4
    for num_steps in (STEPS, 8):
        state.num_steps = num_steps
        state.fit(STEPS, seconds, 1.0, CALL, draft.DECAY_START)
        assert state.num_steps == expected


def test_a_run_whose_rate_falls_keeps_its_length(stages: Stages) -> None:
    state = DraftState(stages.finished.run, jnp.ones(SMALL["hidden_size"]), STEPS)
    state.step = 8
    state.fit(STEPS, 0.0, 1.0, CALL, draft.DECAY_START)
    assert state.num_steps == STEPS


@pytest.mark.parametrize("arguments", [(), ("--sample",)], ids=["nothing", "no corpus"])
def test_a_command_without_its_options_is_refused(folders: Folders, arguments, capsys) -> None:
    with pytest.raises(SystemExit):
        command(folders, *arguments)
    assert "expected" in capsys.readouterr().err or not arguments
