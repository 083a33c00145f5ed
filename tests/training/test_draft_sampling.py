"""Slots that go from prompt to prompt write what the model writes of each prompt alone.

Separate because it runs the model.
Read next: `deepinfer_jax/training/draft_sampling.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import SMALLEST, random_weights
from deepinfer_jax.training import draft_sampling
from deepinfer_jax.training.draft_data import Prompts, make_prompts, read_samples
from deepinfer_jax.training.draft_sampling import (
    SamplingRun,
    Written,
    initial_writing,
    sample_answers,
    write_tokens,
)

NUMERICS = replace(FLOAT32, batch_invariant=False)
SLOTS, STEPS, MAX_TOKENS = 3, 28, 20
EOS = SMALLEST.eos_token_id


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(SMALLEST, jax.random.key(4))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Of 2 to 9 tokens, all greedy, so that a run says what each answer must be."""
    random = np.random.default_rng(1)
    listed = [random.integers(3, SMALLEST.vocab_size, 2 + number) for number in range(8)]
    return make_prompts(listed)._replace(temperatures=np.zeros(8, np.float32))


def write(weights: Weights, prompts: Prompts, seed: int, config: ModelConfig = SMALLEST) -> Written:
    options = {"config": config, "max_tokens": MAX_TOKENS, "numerics": NUMERICS}
    state = initial_writing(config, prompts, SLOTS, MAX_TOKENS, NUMERICS)
    parts = []
    for chunk in range(2):
        key = jax.random.key(seed + chunk)
        state, written = write_tokens(weights, state, prompts, key, num_steps=STEPS, **options)
        parts.append(written)
    return Written(*(np.concatenate(pieces) for pieces in zip(*parts, strict=True)))


@pytest.fixture(scope="module")
def written(weights: Weights, prompts: Prompts) -> Written:
    return write(weights, prompts, seed=0)


def sequences(written: Written) -> list[tuple[int, np.ndarray]]:
    """List (prompt, tokens) of all sequences."""
    found = []
    for slot in range(SLOTS):
        starts = np.flatnonzero(written.positions[:, slot] == 0)
        for start, stop in zip(starts, [*starts[1:], 2 * STEPS], strict=True):
            assert written.positions[start:stop, slot].tolist() == list(range(stop - start))
            found.append((int(written.prompt_ids[start, slot]), written.tokens[start:stop, slot]))
    return found


def test_slots_go_on_with_the_next_prompt(written: Written, prompts: Prompts) -> None:
    starts = written.positions == 0
    for slot in range(SLOTS):
        ids = written.prompt_ids[starts[:, slot], slot].tolist()
        assert ids == [(slot + SLOTS * turn) % 8 for turn in range(len(ids))]
        assert len(ids) >= 2
    for prompt, tokens in sequences(written):
        length = prompts.lengths[prompt]
        np.testing.assert_array_equal(tokens[:length], prompts.tokens[prompt, :length][: len(tokens)])


def test_sequences_end_where_they_must(written: Written, prompts: Prompts) -> None:
    lengths = [len(tokens) for _, tokens in sequences(written)]
    assert max(lengths) == MAX_TOKENS
    for prompt, tokens in sequences(written):
        assert EOS not in tokens[prompts.lengths[prompt] : -1]


def test_greedy_answers_are_those_of_each_prompt_alone(weights, written: Written, prompts: Prompts) -> None:
    """A slot's second and third sequence begin on a cache full of the one before."""
    runner_options = {"slots": 1, "capacity": MAX_TOKENS, "chunk": MAX_TOKENS}
    checked = 0
    for prompt, tokens in sequences(written):
        runner = ChunkRunner(weights, SMALLEST, FLOAT32, **runner_options)
        best = np.argmax(runner.feed([tokens])[0], axis=-1)
        length = prompts.lengths[prompt]
        np.testing.assert_array_equal(tokens[length:], best[length - 1 : -1])
        checked += max(len(tokens) - length, 0)
    assert checked > 2 * STEPS


def test_an_end_of_sequence_that_is_written_ends_it_and_one_of_the_prompt_does_not(weights, prompts) -> None:
    """A head of zeros gives token 0, here the end, of which the prompts are made too."""
    ends = prompts._replace(tokens=np.zeros_like(prompts.tokens))
    config = replace(SMALLEST, eos_token_id=0)
    found = sequences(write(weights.replace(head=jnp.zeros_like(weights.head)), ends, 0, config))
    whole = [(prompt, tokens) for prompt, tokens in found if len(tokens) > prompts.lengths[prompt]]
    assert len(whole) > 2 * SLOTS
    assert all(len(tokens) == prompts.lengths[prompt] + 1 for prompt, tokens in whole)


def test_temperature_draws_by_key_and_greedy_does_not(weights: Weights, prompts: Prompts) -> None:
    hot = prompts._replace(temperatures=np.array([0.0, 2.0] * 4, np.float32))
    first, again, other = (write(weights, hot, seed) for seed in (5, 5, 9))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens[:, 1], other.tokens[:, 1])
    np.testing.assert_array_equal(first.tokens[:MAX_TOKENS, 0], other.tokens[:MAX_TOKENS, 0])


@pytest.mark.parametrize(("time_limit", "num_chunks"), [(600.0, 2), (0.0, 1)], ids=["whole", "cut short"])
def test_a_run_is_saved_and_stops_in_time(
    weights, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_limit: float, num_chunks
) -> None:
    monkeypatch.setattr(
        draft_sampling,
        "write_tokens",
        lambda *arguments, **options: write_tokens(*arguments, numerics=NUMERICS, **options),
    )
    monkeypatch.setattr(
        draft_sampling,
        "initial_writing",
        lambda *arguments: initial_writing(*arguments, NUMERICS),
    )
    log: list[str] = []
    run = SamplingRun(SLOTS, 2 * STEPS, STEPS, MAX_TOKENS, seed=1)
    sample_answers(run, weights, SMALLEST, prompts, tmp_path, 2, time_limit, log.append)
    rows = read_samples(tmp_path)
    assert sum("ms a step" in line for line in log) == num_chunks
    is_answer = rows.loss_codes > 0
    assert is_answer.any()
    assert not is_answer[rows.segments == 0].any()
