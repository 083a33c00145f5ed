"""The embedded model as shipped: its files, its losses, and that it writes English.

Separate because it tests a trained artefact, not code.
Read next: `deepinfer_jax/assets/nano/MODEL_CARD.md`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from deepinfer_jax import (
    LLM,
    EngineConfig,
    Model,
    PrefilledRequest,
    RequestError,
    SamplingParams,
    generate,
    load,
    read_config,
)
from deepinfer_jax.assets import NANO_FOLDER
from deepinfer_jax.cli import main
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL
from deepinfer_jax.testing.golden import ChunkRunner

MAX_FILE_BYTES = 15 * 2**20
CAPACITY, CHUNK = 512, 64
START = "Once upon a time"

STORY = """Once upon a time there was a poor woodcutter who lived with his wife and his two children at the \
edge of a great forest. One winter the snow lay so deep that no one could go to the village, and there was \
very little bread left in the house. In the night the little girl heard a voice at the window. She opened \
it, and there sat a small grey bird, shivering with cold. "Let me in," said the bird, "and I will show you \
where the gold is hidden." So the girl took the bird in her hands and warmed it by the fire. In the morning \
they went together into the forest, and under an old oak tree they found a chest full of gold and silver."""
"""Written for this test."""


@pytest.fixture(scope="module")
def nano() -> Model:
    return load()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def test_every_file_is_small_enough_for_git() -> None:
    sizes = {path.name: path.stat().st_size for path in NANO_FOLDER.iterdir()}
    assert any(name.endswith(".safetensors") for name in sizes)
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(sizes)
    assert {name: size for name, size in sizes.items() if size >= MAX_FILE_BYTES} == {}


def test_it_is_in_the_official_mixed_layout_with_draft_stages() -> None:
    config = read_config(NANO_FOLDER)
    assert config.is_quantized
    document = json.loads((NANO_FOLDER / "config.json").read_text(encoding="utf-8"))
    assert document["text_config"]["num_nextn_predict_layers"] == config.draft.num_stages == 3


def test_it_comes_with_a_model_card() -> None:
    card = (NANO_FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
    for word in ("licen", "bits per byte", "limit"):
        assert word in card.lower()


def test_held_out_losses_are_within_the_bound() -> None:
    evaluation = json.loads((NANO_FOLDER / "evaluation.json").read_text(encoding="utf-8"))
    assert 2.0 < evaluation["quantized"]["stories"]["nats"] <= 3.6


def test_greedy_text_is_english_and_repeats(nano: Model) -> None:
    first = generate(START, greedy(60), nano)
    assert generate(START, greedy(30), nano).token_ids == first.token_ids[:30]
    assert len(first.token_ids) == 60 or first.finish_reason == "stop"
    assert first.text.replace("\n", " ").isprintable()
    words = re.findall(r"\S+", first.text)
    assert len(words) >= 15
    alphabetic = [word for word in words if re.fullmatch(r"\W*[A-Za-z]+(['\u2019-][A-Za-z]+)*\W*", word)]
    assert len(alphabetic) >= 0.9 * len(words), first.text
    common = {"the", "and", "a", "to", "of", "was", "in", "he", "she", "it", "that", "had", "with"}
    assert len(common & {word.lower().strip(".,;") for word in words}) >= 3, first.text


def test_seeds_give_different_stories(nano: Model) -> None:
    params = [SamplingParams(max_tokens=12, temperature=0.8, seed=seed) for seed in (1, 2, 1, 3)]
    texts = [generate(START, one, nano).text for one in params]
    assert texts[0] == texts[2]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("prompts", ["", ["hello", ""], ["", "hello"]])
def test_bc17_empty_text_is_refused(nano: Model, prompts) -> None:
    with pytest.raises(RequestError, match="prompt: got '', expected text; give a non-empty prompt"):
        generate(prompts, greedy(4), nano)


def test_the_default_model_is_this_one(nano: Model) -> None:
    assert generate(START, greedy(8)) == generate(START, greedy(8), nano)


def test_the_command_line_streams_its_text_after_the_prompt(
    nano: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here and not with the other commands, as the shapes are compiled."""
    assert main(["generate", START, "--max-tokens", "24", "--temperature", "0"]) == 0
    output = capsys.readouterr()
    assert output.out == START + generate(START, greedy(24), nano).text + "\n"
    assert output.err == ""


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_text_ends_the_output(nano: Model, capsys: pytest.CaptureFixture[str], include: bool) -> None:
    text = generate(START, greedy(24), nano).text
    # Across words, so that no token is the text.
    place = text.index(" ", 20)
    stop = text[place - 2 : place + 2]
    end = text.index(stop) + len(stop) * include
    params = replace(greedy(24), stop=(stop, "never said"), include_stop=include)
    stopped = generate(START, params, nano)
    assert stopped.text == text[:end]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert len(stopped.token_ids) < 24
    words = ["generate", START, "--max-tokens", "24", "--temperature", "0", "--stop", stop]
    assert main([*words, *["--include-stop"] * include]) == 0
    assert capsys.readouterr().out == START + text[:end] + "\n"


def nats_a_token(model: Model, text: str) -> float:
    """Mean loss of a text under the backbone, in chunks of one compiled shape."""
    ids = np.array(model.encode(text))
    runner = ChunkRunner(model.weights, model.config, model.numerics, slots=1, capacity=CAPACITY, chunk=CHUNK)
    logits = runner.feed_all([ids], (CHUNK,))[0][:-1].astype(np.float64)
    log_total = np.log(np.exp(logits).sum(axis=1))
    return float((log_total - logits[np.arange(len(logits)), ids[1:]]).mean())


@pytest.fixture(scope="module")
def losses(nano: Model) -> dict[str, float]:
    """Loss of the story, and of its words in another order."""
    words = STORY.split()
    shuffled = " ".join(words[i] for i in np.random.default_rng(0).permutation(len(words)))
    return {
        "official": nats_a_token(nano, STORY),
        "shuffled": nats_a_token(nano, shuffled),
    }


@pytest.mark.slow
def test_plain_english_is_expected(losses: dict[str, float]) -> None:
    assert losses["official"] < 5.0
    assert losses["shuffled"] > losses["official"] + 1.0


@pytest.mark.slow
def test_both_numerics_agree_on_the_loss(nano: Model, losses: dict[str, float]) -> None:
    exact = load(numerics="float32")
    assert (nano.numerics, exact.numerics) == (OFFICIAL, FLOAT32)
    assert abs(losses["official"] - nats_a_token(exact, STORY)) < 0.1


def test_weights_are_finite(nano: Model) -> None:
    for leaf in jax.tree.leaves(nano.weights):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.mark.slow
def test_prefill_in_one_process_and_decoding_in_another(nano: Model, tmp_path: Path) -> None:
    program = f"""
from deepinfer_jax import LLM, EngineConfig, SamplingParams
params = SamplingParams(max_tokens=24, seed=5, repetition_penalty=1.1, stop="king", logprobs=2)
with LLM(options=EngineConfig(num_slots=1, max_context=256)) as llm:
    llm.prefill([{STORY[:500]!r}], params)[0].save({str(tmp_path / "request.safetensors")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    params = SamplingParams(max_tokens=24, seed=5, repetition_penalty=1.1, stop="king", logprobs=2)
    with LLM(nano, options=EngineConfig(num_slots=1, max_context=256)) as llm:
        found = llm.resume([PrefilledRequest.load(tmp_path / "request.safetensors")])[0]
        assert found == llm.generate([STORY[:500]], params)[0]
        assert found.text
