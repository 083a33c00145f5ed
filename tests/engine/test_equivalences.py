"""An engine equals one forward: lengths, chunks, window edges, reuse, hand-over, prompt log-probabilities.

Separate from `test_same_tokens.py`, which compares ways of running with each other: here the model's own
one-shot forward is the measure, and every length around the window is tried.
Read next: `../model/test_equivalence.py`, the same below the engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import LLM, EngineConfig, Model, SamplingParams
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.generate import Generation, generate_ids
from deepinfer_jax.engine.handoff import HandoffError, PrefilledRequest
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import SMALLEST, random_weights, shared_prefix_prompts
from deepinfer_jax.testing.tolerances import assert_close

WINDOW = SMALLEST.sliding_window
LENGTHS = range(1, 3 * WINDOW + 4)
"""One to three windows and a remainder."""

PROMPTS = shared_prefix_prompts(tuple(LENGTHS), SMALLEST.vocab_size, seed=5)
SIZES: dict[str, Any] = {"num_slots": 8, "max_context": 512}
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=3)
WIDE = replace(SMALLEST, sliding_window=128)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(SMALLEST, jax.random.key(8))


@pytest.fixture(scope="module")
def model(weights: Weights) -> Model:
    return Model(SMALLEST, weights, FLOAT32, tokenizer=None)


def run(
    weights: Weights,
    prompts: list[list[int]],
    params: SamplingParams = GREEDY,
    config: ModelConfig = SMALLEST,
    **options: Any,
) -> list[Generation]:
    sizes = EngineConfig(**{**SIZES, **options})
    return generate_ids(weights, config, FLOAT32, prompts, params, options=sizes)


def one_shot_logprobs(weights: Weights, config: ModelConfig, token_ids: list[int], chunk: int) -> np.ndarray:
    """Log-probabilities [tokens, V] after each token of one forward over all of them."""
    runner = ChunkRunner(weights, config, FLOAT32, slots=1, capacity=chunk, chunk=chunk)
    logits = runner.feed([token_ids])[0].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def assert_one_forward(
    weights: Weights, generation: Generation, chunk: int, config: ModelConfig = SMALLEST
) -> None:
    """Every token is the best of the one-shot forward over all before it, with its log-probability."""
    prompt, tokens = generation.prompt_ids, generation.token_ids
    expected = one_shot_logprobs(weights, config, prompt + tokens, chunk)[len(prompt) - 1 : -1]
    expected[:, config.image_token_id] = -np.inf
    assert tokens == expected.argmax(axis=1).tolist()
    found = [one.logprob for one in generation.logprobs]
    assert_close(found, expected[np.arange(len(tokens)), tokens], "equivalence_float32")


def test_bc01_bc05_every_prompt_length_and_chunk_equals_one_forward(weights: Weights) -> None:
    whole = run(weights, PROMPTS, prefix_cache=False)
    for generation in whole:
        assert_one_forward(weights, generation, chunk=32)
    for chunk in LENGTHS:
        assert run(weights, PROMPTS, prefix_cache=False, max_chunk=chunk) == whole, f"chunks of {chunk}"


@pytest.mark.slow
def test_bc05_lengths_and_chunks_around_the_released_window(weights: Weights) -> None:
    prompts = shared_prefix_prompts((126, 127, 128, 129, 130, 255, 256, 257), SMALLEST.vocab_size, seed=5)
    whole = run(weights, prompts, config=WIDE, prefix_cache=False)
    for generation in whole:
        assert_one_forward(weights, generation, chunk=264, config=WIDE)
    for chunk in (1, 50, 127, 128, 129, 256):
        found = run(weights, prompts, config=WIDE, prefix_cache=False, max_chunk=chunk)
        assert found == whole, f"chunks of {chunk}"


@pytest.mark.parametrize("prefill", ["exact", "bounded"])
def test_bc12_bc61_a_prefix_hit_is_bitwise_the_cold_run(weights: Weights, model: Model, prefill: str) -> None:
    """Penalties, window, pending halves and n-grams go on from what the first run left."""
    prompts = shared_prefix_prompts((127, 128, 129, 130, 255, 256, 257, 300), SMALLEST.vocab_size)
    params = SamplingParams(
        max_tokens=6, seed=3, repetition_penalty=1.3, presence_penalty=0.4, ignore_eos=True, logprobs=3
    )
    cold = run(weights, prompts, params, prefix_cache=False, prefill=prefill)
    with LLM(model, options=EngineConfig(**SIZES, prefill=prefill)) as llm:
        for _ in range(2):
            for prompt, expected in zip(prompts, cold, strict=True):
                found = llm.generate([prompt], params)[0]
                assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        again = [llm.generate([prompt], params)[0].timing.num_cached for prompt in prompts]
        kept = WINDOW if prefill == "bounded" else 1
        assert again == [(len(prompt) - kept) // 128 * 128 for prompt in prompts]
        assert llm.stats.prefix.hits >= 10


def test_prompt_logprobs_are_those_of_one_forward(weights: Weights, model: Model) -> None:
    prompt = shared_prefix_prompts((300,), SMALLEST.vocab_size)[0]
    params = replace(GREEDY, prompt_logprobs=2, max_tokens=2)
    expected = one_shot_logprobs(weights, SMALLEST, prompt, chunk=320)
    with LLM(model, options=EngineConfig(**SIZES, prefill="bounded")) as llm:
        cases = [params, replace(params, max_tokens=0), replace(params, prompt_logprobs=0)]
        first, nothing, chosen_only = llm.generate([prompt] * 3, cases)
        assert llm.stats.prefix.misses == {"prompt_logprobs": 3}
    found = first.prompt_logprobs
    assert len(found) == len(prompt) - 1
    values = [one.logprob for one in found]
    assert_close(values, expected[np.arange(len(prompt) - 1), prompt[1:]], "equivalence_float32")
    for one, row in zip(found, expected, strict=False):
        assert list(one.top) == np.argsort(-row, kind="stable")[:2].tolist()
    # A prompt alone generates nothing and reports the same; all modes of prefill report every row.
    assert (nothing.token_ids, nothing.finish_reason) == ([], "length")
    assert nothing.prompt_logprobs == found
    assert [one.logprob for one in chosen_only.prompt_logprobs] == values
    assert all(one.top == {} for one in chosen_only.prompt_logprobs)
    assert run(weights, [prompt], params)[0].prompt_logprobs == found
    assert run(weights, [prompt], params, max_chunk=33)[0].prompt_logprobs == found
    assert run(weights, [prompt], params)[0].token_ids == first.token_ids


def test_a_prompt_of_one_token_has_no_logprobs(weights: Weights) -> None:
    found = run(weights, [[5]], replace(GREEDY, prompt_logprobs=1))[0]
    assert found.prompt_logprobs == [] and len(found.token_ids) == 3


@pytest.mark.parametrize("length", [1, 127, 128, 129, 260])
def test_a_request_goes_on_in_another_engine(model: Model, tmp_path: Path, length: int) -> None:
    prompt = shared_prefix_prompts((length,), SMALLEST.vocab_size)[0]
    params = SamplingParams(max_tokens=140, seed=3, repetition_penalty=1.3, frequency_penalty=0.1, logprobs=2)
    options = EngineConfig(**SIZES)
    with LLM(model, options=options) as prefilling, LLM(model, options=options) as decoding:
        expected = prefilling.generate([prompt], params)[0]
        neighbour = decoding.submit([9, 8, 7], replace(GREEDY, max_tokens=300))
        decoding.step()
        paths = []
        for number, one in enumerate(prefilling.prefill([prompt, [4]], params)):
            paths.append(tmp_path / f"{number}.safetensors")
            one.save(paths[-1])
        assert prefilling.stats.slots_running == 0
        found = decoding.resume([PrefilledRequest.load(path) for path in paths])
        assert found[0] == expected
        assert found[1] == prefilling.generate([[4]], params)[0]
        # The neighbour did not notice.
        decoding_alone = prefilling.generate([[9, 8, 7]], replace(GREEDY, max_tokens=300))[0]
        while not neighbour.is_done:
            decoding.step()
        assert neighbour.completions[0] == decoding_alone


def test_a_request_that_ends_with_its_first_token_travels_without_arrays(model: Model) -> None:
    with LLM(model, options=EngineConfig(**SIZES)) as llm:
        params = replace(GREEDY, max_tokens=1)
        prefilled = llm.prefill([[5, 6]], params)
        assert prefilled[0].arrays == {}
        assert llm.resume(prefilled)[0] == llm.generate([[5, 6]], params)[0]


def test_what_differs_is_named_before_anything_runs(model: Model, weights: Weights) -> None:
    other = replace(model, weights=random_weights(SMALLEST, jax.random.key(9)))
    with LLM(model, options=EngineConfig(**SIZES)) as llm:
        prefilled = llm.prefill([[5, 6]], GREEDY)
    with LLM(other, options=EngineConfig(**SIZES, prefill="bounded")) as llm:
        with pytest.raises(HandoffError, match=r"prefill: got 'exact', expected 'bounded'"):
            llm.resume(prefilled)
    with LLM(model, options=EngineConfig(**SIZES)) as llm:
        arrays = {**prefilled[0].arrays, "window": np.zeros(3, np.float32)}
        broken = PrefilledRequest(prefilled[0].header, arrays)
        with pytest.raises(HandoffError, match=r"window: got float32 \[3\], expected float32"):
            llm.resume([broken])
        assert not llm.has_work


def test_closing_gives_all_device_memory_back(weights: Weights) -> None:
    before = {id(array) for array in jax.live_arrays()}
    copies = jax.tree.map(lambda array: array + 0 if array.dtype != bool else array | False, weights)
    with LLM(Model(SMALLEST, copies, FLOAT32, None), options=EngineConfig(**SIZES)) as llm:
        llm.generate([[5, 6]] * 3, GREEDY)
        stream = llm.stream([7], replace(GREEDY, max_tokens=50))
        next(stream)
        assert llm.memory["state"] > 0 and llm.memory["weights"] > 0
    del copies
    left = [array for array in jax.live_arrays() if id(array) not in before]
    # A model that was loaded elsewhere stays; all else is gone.
    kept = {id(leaf) for leaf in jax.tree.leaves(llm.model.weights)}
    assert [array for array in left if id(array) not in kept] == []
    assert llm.memory == {"weights": 0, "state": 0}
