"""Generation from ids: exactness of the loop, stopping, seeds, neighbours, refusals.

Separate because everything here is observable by a caller of `generate_ids` and `generate`.
Read next: `test_nano.py`, the same with a trained model and text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import Completion, Model, RequestError, SamplingParams, generate, load
from deepinfer_jax.engine.generate import Timing, generate_ids
from deepinfer_jax.model.numerics import FLOAT32, Numerics
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.plans import SLOT_BUCKETS
from deepinfer_jax.step import decode_step, initial_state, prefill_step
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import SMALLEST, random_weights

GOLDEN = Path(__file__).parents[1] / "golden"
END = SMALLEST.eos_token_id
TOKENS = np.random.default_rng(5).integers(3, SMALLEST.vocab_size, 512).tolist()
PROMPT = TOKENS[:12]
NEIGHBOUR = TOKENS[300:307]


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> Iterator[None]:
    """Groups of 1 or 4 prompts in chunks of 16: every path of the loop, few compilations."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("deepinfer_jax.engine.generate.SLOT_BUCKETS", (1, 4))
        patched.setattr("deepinfer_jax.plans.CHUNK_BUCKETS", (16,))
        yield


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(SMALLEST, jax.random.key(1))


@pytest.fixture(scope="module")
def model(weights: Weights) -> Model:
    return Model(SMALLEST, weights, FLOAT32, tokenizer=None)


def greedy(max_tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)


def sampled(seed: int, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True)


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


ONE_SHOT = 32


def one_shot_logits(weights: Weights, token_ids: list[int]) -> np.ndarray:
    runner = ChunkRunner(weights, SMALLEST, FLOAT32, slots=1, capacity=ONE_SHOT, chunk=ONE_SHOT)
    return runner.feed([token_ids])[0]


def test_greedy_tokens_are_the_best_of_the_one_shot_forward(model: Model) -> None:
    generated = generate([PROMPT], greedy(20), model)[0].token_ids
    assert len(generated) == 20
    logits = one_shot_logits(model.weights, PROMPT + generated)
    expected = logits[len(PROMPT) - 1 : -1].argmax(axis=-1)
    assert generated == expected.tolist()


def test_a_batch_of_mixed_lengths_equals_each_prompt_alone(model: Model) -> None:
    prompts = [TOKENS[start : start + length] for start, length in ((0, 1), (9, 16), (40, 17), (60, 35))]
    # Prompts of three, two and one chunks: those that are done wait for the others.
    together = ids_of(generate(prompts, greedy(10), model))
    assert together == [ids_of(generate([prompt], greedy(10), model))[0] for prompt in prompts]


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_bc19_exactly_max_tokens_come(model: Model, max_tokens: int) -> None:
    streamed = []
    completion = generate(
        [PROMPT], greedy(max_tokens), model, on_token=lambda prompt, token: streamed.append((prompt, token))
    )[0]
    expected = generate([PROMPT], greedy(20), model)[0].token_ids[:max_tokens]
    assert completion.token_ids == expected
    assert completion.finish_reason == "length"
    assert completion.prompt_ids == PROMPT
    assert streamed == [(0, token) for token in expected]


def test_bc19_no_step_runs_for_zero_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_steps(monkeypatch)
    assert ids_of(generate([PROMPT, NEIGHBOUR], greedy(0), model)) == [[], []]


def test_each_prompt_has_its_own_parameters(model: Model) -> None:
    each = [greedy(5), greedy(0), sampled(3, 2), greedy(1)]
    completions = generate([PROMPT] * 4, each, model)
    expected = generate([PROMPT], greedy(5), model)[0].token_ids
    assert [len(tokens) for tokens in ids_of(completions)] == [5, 0, 2, 1]
    assert completions[0].token_ids == expected
    assert completions[3].token_ids == expected[:1]


def relabelled(weights: Weights, first: int, second: int) -> Weights:
    """Exchange two token ids: the same model that calls one what the other was called."""
    order = np.arange(SMALLEST.vocab_size)
    order[[first, second]] = second, first
    return weights.replace(
        embed=weights.embed[order], head=weights.head[order], token_map=weights.token_map[order]
    )


@pytest.fixture(scope="module")
def ending(model: Model) -> tuple[Model, list[int], int]:
    """A model whose greedy continuation of PROMPT has its first end token at the returned place."""
    tokens = generate([PROMPT], greedy(12), model)[0].token_ids
    kept = {*PROMPT, END, SMALLEST.engram_pad_token_id}
    place = next(i for i, token in enumerate(tokens) if i and token not in {*tokens[:i], *kept})
    end = tokens[place]
    named = [END if token == end else end if token == END else token for token in tokens]
    return Model(SMALLEST, relabelled(model.weights, END, end), FLOAT32, None), named, place


def test_the_end_token_stops_and_is_not_returned(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    streamed = []
    completion = generate(
        [PROMPT], greedy(12, ignore_eos=False), model, on_token=lambda _, token: streamed.append(token)
    )[0]
    assert completion.token_ids == streamed == tokens[:place]
    assert completion.finish_reason == "stop"


def test_the_end_token_can_be_ignored(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    completion = generate([PROMPT], greedy(12), model)[0]
    assert completion.token_ids == tokens
    assert completion.token_ids[place] == END
    assert completion.finish_reason == "length"


def test_the_last_allowed_token_may_be_followed_by_nothing(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    completion = generate([PROMPT], greedy(place, ignore_eos=False), model)[0]
    assert (completion.token_ids, completion.finish_reason) == (tokens[:place], "length")


def test_one_sequence_ends_and_its_neighbour_goes_on(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    each = [greedy(12, ignore_eos=False), greedy(12)]
    stopped, other = generate([PROMPT, NEIGHBOUR], each, model)
    assert stopped.token_ids == tokens[:place]
    assert other.token_ids == generate([NEIGHBOUR], greedy(12), model)[0].token_ids
    assert len(other.token_ids) == 12


def test_more_prompts_than_slots(model: Model) -> None:
    prompts = [[3 + i % 100, 4 + i % 7] for i in range(9)]
    order = []
    found = ids_of(
        generate(prompts, greedy(3), model, on_token=lambda prompt, token: order.append((prompt, token)))
    )
    assert found == [ids_of(generate([prompt], greedy(3), model))[0] for prompt in prompts]
    assert [[token for prompt, token in order if prompt == number] for number in range(9)] == found


def test_more_than_64_prompts_run_in_groups(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the real group size, with steps that only count: each slot's token is the next integer."""
    monkeypatch.setattr("deepinfer_jax.engine.generate.SLOT_BUCKETS", SLOT_BUCKETS)
    monkeypatch.setattr("deepinfer_jax.engine.generate._compiled", set())
    sizes = []

    def start(seeds: jax.Array, *_: Any, **__: Any) -> None:
        sizes.append(len(seeds))

    def prefill(_weights: Weights, _state: Any, token_ids: jax.Array, *_: Any, **__: Any) -> Any:
        return token_ids[:, 0] + 1, token_ids[:, 0] + 1

    def decode(_weights: Weights, tokens: jax.Array, is_active: jax.Array, **_: Any) -> Any:
        tokens = tokens + is_active.astype(jnp.int32)
        return tokens, tokens

    for name, fake in (("initial_state", start), ("prefill_step", prefill), ("decode_step", decode)):
        monkeypatch.setattr(f"deepinfer_jax.engine.generate.{name}", fake)
    found = ids_of(generate([[number % 90] for number in range(131)], greedy(3), model))
    assert found == [[number % 90 + 1 + step for step in range(3)] for number in range(131)]
    assert sizes == [64, 64, 4]


def test_seeds_repeat_and_differ(model: Model) -> None:
    seeds = (7, 8, 7 + 2**32, 7, 2**64 - 1)
    found = ids_of(generate([PROMPT] * 5, [sampled(seed) for seed in seeds], model))
    assert found[0] == found[3]
    assert len({tuple(tokens) for tokens in found}) == 4
    assert found == ids_of(generate([PROMPT] * 5, [sampled(seed) for seed in seeds], model))


def test_bc28_a_seeded_row_does_not_depend_on_its_neighbours(model: Model) -> None:
    mine, other = sampled(7), sampled(0)
    alone = ids_of(generate([PROMPT], mine, model))[0]
    assert ids_of(generate([PROMPT, NEIGHBOUR], [mine, other], model))[0] == alone
    assert ids_of(generate([NEIGHBOUR, PROMPT], [other, mine], model))[1] == alone
    crowd = generate([NEIGHBOUR] * 3 + [PROMPT], [other] * 3 + [mine], model)
    assert ids_of(crowd)[3] == alone


def test_a_longer_request_begins_like_a_shorter_one(model: Model) -> None:
    short, long = generate([PROMPT] * 2, [sampled(7, 5), sampled(7, 12)], model)
    assert long.token_ids[:5] == short.token_ids


def test_timing_counts_what_was_decoded(model: Model) -> None:
    timing = Timing()
    generate([PROMPT, NEIGHBOUR], [greedy(5), greedy(3)], model, timing=timing)
    assert timing.num_decoded == 6  # all but the two tokens of the prefill
    assert timing.first_token > 0
    assert timing.decoding > 0


def forbid_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every device step an error, to show that nothing runs."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a step ran")

    for name in (initial_state.__name__, prefill_step.__name__, decode_step.__name__):
        monkeypatch.setattr(f"deepinfer_jax.engine.generate.{name}", forbidden)


@pytest.mark.parametrize("prompts", [[[]], [PROMPT, []], [[], PROMPT]], ids=["alone", "second", "first"])
def test_bc17_an_empty_prompt_is_refused_before_anything_runs(
    model: Model, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    with monkeypatch.context() as patched:
        forbid_steps(patched)
        with pytest.raises(RequestError, match=rf"prompt {prompts.index([])}: got no tokens, expected at"):
            generate(prompts, greedy(4), model)
    neighbours = [prompt for prompt in prompts if prompt]
    assert all(ids_of(generate(neighbours, greedy(4), model)))


@pytest.mark.parametrize(
    ("prompts", "params", "part"),
    [
        ([PROMPT, [5, 128]], greedy(1), "prompt 1: got token id 128, expected ids in 0..127"),
        ([[-1]], greedy(1), "prompt 0: got token id -1"),
        ([[5] * 1024], greedy(1), "prompt 0: got 1024 prompt tokens + max_tokens 1 = 1025"),
        ([PROMPT] * 2, [greedy(1)], "params: got 1, expected one for each of 2 prompts"),
        (["hello"], greedy(1), "prompt: got text, expected token ids"),
    ],
)
def test_refused_requests_run_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch, prompts: Any, params: Any, part: str
) -> None:
    forbid_steps(monkeypatch)
    with pytest.raises(RequestError) as raised:
        generate(prompts, params, model)
    assert part in str(raised.value)


def test_numpy_ids_are_ids(model: Model) -> None:
    found = generate_ids(model.weights, SMALLEST, FLOAT32, [np.array(PROMPT)], greedy(3))
    assert found[0].prompt_ids == PROMPT
    assert found[0].token_ids == generate([PROMPT], greedy(3), model)[0].token_ids


def test_nothing_comes_of_no_prompts(model: Model) -> None:
    assert generate([], greedy(3), model) == []


@pytest.mark.parametrize("name", ["tiny_bf16", "tiny_fp8fp4"])
def test_loading_a_folder(name: str) -> None:
    model = load(GOLDEN / name, "float32")
    assert model.tokenizer is None
    assert model.config.is_quantized == (name == "tiny_fp8fp4")
    assert isinstance(model.numerics, Numerics)
    assert model.weights.embed.shape == (model.config.vocab_size, model.config.hidden_size)


def test_unknown_numerics_are_refused_before_the_folder_is_read() -> None:
    with pytest.raises(RequestError, match=r"numerics: got 'float16', expected one of \['float32', 'offi"):
        load("nowhere", "float16")


def test_a_flat_list_of_ids_is_refused_with_the_remedy() -> None:
    model = Model(SMALLEST, weights=None, numerics=FLOAT32, tokenizer=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match=r"got 1 as one of them.*list of their own"):
        generate([1, 2, 3], SamplingParams(), model)  # pyright: ignore
