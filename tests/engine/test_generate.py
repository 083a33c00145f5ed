"""Generation from ids: exactness of the loop, stopping, seeds, log-probabilities, refusals.

Separate because everything here is observable by a caller of `generate_ids` and `generate`.
Read next: `test_same_tokens.py`, company and cuts; `test_nano.py`, a trained model and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import (
    Completion,
    Completions,
    EngineConfig,
    InvalidOutputError,
    Model,
    RequestError,
    SamplingParams,
    generate,
)
from deepinfer_jax.engine import runner
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.generate import Generation, Timing, generate_ids
from deepinfer_jax.engine.request import INVALID_REASON, TokenLogprobs
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.plans import LOGPROB_BUCKETS
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import SMALLEST, random_weights
from deepinfer_jax.testing.tolerances import assert_close

END = SMALLEST.eos_token_id
TOKENS = np.random.default_rng(5).integers(3, 120, 512).tolist()
PROMPT = TOKENS[:12]
NEIGHBOUR = TOKENS[300:307]
POISON = 124
"""A token that no prompt holds unless a test puts it there."""

LOGPROBS = 3
"""Nearly all requests ask for them: with those of `test_same_tokens.py` they share few compiled shapes."""

OPTIONS = EngineConfig(num_slots=8, max_context=512)
"""Sizes of nearly all calls, and of `test_same_tokens.py`, for the same reason."""

MAKING = ("initial_state", "empty_snapshots")
STEPS = ("admit_step", "page_step", "encode_step", "prefill_step", "decode_step")
MOVING = ("save_step", "restore_step", "note_step")
"""Names in the runner: what makes an engine, what runs rows or says where, what copies."""


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(SMALLEST, jax.random.key(1))


@pytest.fixture(scope="module")
def model(weights: Weights) -> Model:
    return Model(SMALLEST, weights, FLOAT32, tokenizer=None)


def greedy(max_tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, logprobs=LOGPROBS)


def sampled(seed: int, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, logprobs=LOGPROBS)


def complete(prompts: Any, params: Any, model: Model, **changes: Any) -> Completions:
    return generate(prompts, params, model, replace(OPTIONS, **changes))


def streamed(model: Model, prompts: Any, params: Any) -> tuple[list[Generation], list[tuple[int, int]]]:
    """What came, and (prompt number, token) of each token as it came."""
    tokens: list[tuple[int, int]] = []
    found = generate_ids(
        *(model.weights, SMALLEST, FLOAT32, prompts, params, lambda *news: tokens.append(news)),
        options=OPTIONS,
    )
    return found, tokens


def ids_of(completions: Sequence[Completion] | Sequence[Generation]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


ONE_SHOT = 32


def one_shot_logits(weights: Weights, token_ids: list[int]) -> np.ndarray:
    runner = ChunkRunner(weights, SMALLEST, FLOAT32, slots=1, capacity=ONE_SHOT, chunk=ONE_SHOT)
    return runner.feed([token_ids])[0]


def test_greedy_tokens_are_the_best_of_the_one_shot_forward(model: Model) -> None:
    generated = complete([PROMPT], greedy(20), model)[0].token_ids
    assert len(generated) == 20
    logits = one_shot_logits(model.weights, PROMPT + generated)[len(PROMPT) - 1 : -1].copy()
    # At one place the image token is the best; it never comes.
    assert SMALLEST.image_token_id in logits.argmax(axis=-1)
    logits[:, SMALLEST.image_token_id] = -np.inf
    assert generated == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_bc19_exactly_max_tokens_come(model: Model, max_tokens: int) -> None:
    completion = complete([PROMPT], greedy(max_tokens), model)[0]
    expected = complete([PROMPT], greedy(20), model)[0].token_ids[:max_tokens]
    assert completion.token_ids == expected
    assert completion.finish_reason == "length"
    assert completion.prompt_ids == PROMPT
    found, tokens = streamed(model, [PROMPT], greedy(max_tokens))
    assert tokens == [(0, token) for token in expected]
    assert (found[0].token_ids, found[0].finish_reason) == (expected, "length")


def test_bc19_no_step_runs_for_zero_tokens(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, *STEPS, *MOVING)
    assert ids_of(complete([PROMPT, NEIGHBOUR], greedy(0), model)) == [[], []]


def test_each_prompt_has_its_own_parameters(model: Model) -> None:
    each = [greedy(5), greedy(0), sampled(3, 2), greedy(1)]
    completions = complete([PROMPT] * 4, each, model)
    expected = complete([PROMPT], greedy(5), model)[0].token_ids
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
    tokens = complete([PROMPT], greedy(12), model)[0].token_ids
    kept = {*PROMPT, END, SMALLEST.engram_pad_token_id}
    place = next(i for i, token in enumerate(tokens) if i and token not in {*tokens[:i], *kept})
    end = tokens[place]
    named = [END if token == end else end if token == END else token for token in tokens]
    return Model(SMALLEST, relabelled(model.weights, END, end), FLOAT32, None), named, place


def test_stop_tokens_end_like_the_end_token(model: Model) -> None:
    tokens = complete([PROMPT], greedy(12), model)[0].token_ids
    stop = tokens[4]
    assert stop not in tokens[:4]
    params = [
        replace(greedy(12), stop_token_ids=(stop,)),
        replace(greedy(12), stop_token_ids=(stop, 2), min_tokens=5),
    ]
    stopped, later = complete([PROMPT] * 2, params, model)
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[:4], "stop")
    assert stopped.stop_reason == stop
    assert len(stopped.logprobs) == 4
    # Before min_tokens a stop token is not stopped at but not chosen.
    assert later.token_ids[:4] == tokens[:4]
    assert len(later.token_ids) >= 5 and stop not in later.token_ids[:5]


def test_bad_and_forbidden_tokens_never_come(model: Model) -> None:
    tokens = complete([PROMPT], greedy(12), model)[0].token_ids
    image = SMALLEST.image_token_id
    each = [replace(greedy(12), bad_token_ids=tuple(tokens)), replace(greedy(12), logit_bias={image: 1000.0})]
    banned, wanted = complete([PROMPT] * 2, each, model)
    assert not set(tokens) & set(banned.token_ids)
    assert wanted.token_ids == tokens
    forbidding = generate_ids(
        model.weights, SMALLEST, FLOAT32, [PROMPT], greedy(12), options=OPTIONS, forbidden_ids=tokens
    )
    assert forbidding[0].token_ids == banned.token_ids


def test_the_end_token_stops_and_is_not_returned(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    completion = complete([PROMPT], greedy(12, ignore_eos=False), model)[0]
    found, news = streamed(model, [PROMPT], greedy(12, ignore_eos=False))
    assert completion.token_ids == found[0].token_ids == [token for _, token in news] == tokens[:place]
    assert completion.finish_reason == found[0].finish_reason == "stop"
    assert completion.stop_reason is None


def test_the_end_token_can_be_ignored(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    completion = complete([PROMPT], greedy(12), model)[0]
    assert completion.token_ids == tokens
    assert completion.token_ids[place] == END
    assert completion.finish_reason == "length"


def test_the_last_allowed_token_may_be_followed_by_nothing(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    completion = complete([PROMPT], greedy(place, ignore_eos=False), model)[0]
    assert (completion.token_ids, completion.finish_reason) == (tokens[:place], "length")


def test_one_sequence_ends_and_its_neighbour_goes_on(ending: tuple[Model, list[int], int]) -> None:
    model, tokens, place = ending
    each = [greedy(12, ignore_eos=False), greedy(12)]
    stopped, other = complete([PROMPT, NEIGHBOUR], each, model)
    assert stopped.token_ids == tokens[:place]
    assert other.token_ids == complete([NEIGHBOUR], greedy(12), model)[0].token_ids
    assert len(other.token_ids) == 12


def test_more_prompts_than_slots(model: Model) -> None:
    prompts = [[3 + i % 100, 4 + i % 7] for i in range(9)]
    found, order = streamed(model, prompts, greedy(3))
    assert ids_of(found) == [ids_of(complete([prompt], greedy(3), model))[0] for prompt in prompts]
    assert [[token for prompt, token in order if prompt == number] for number in range(9)] == ids_of(found)


def test_a_slot_that_is_free_is_taken_while_others_go_on(model: Model) -> None:
    """Nobody waits for a whole group: the ninth prompt ends long before the first."""
    prompts = [[3 + i] for i in range(9)]
    found, order = streamed(model, prompts, [greedy(30), *[greedy(2)] * 8])
    assert [len(tokens) for tokens in ids_of(found)] == [30, *[2] * 8]
    numbers = [number for number, _ in order]
    assert numbers.count(8) == 2
    assert max(place for place, number in enumerate(numbers) if number == 8) < numbers.index(0) + 8 * 2 + 10


EVERY_PARAMETER = SamplingParams(
    **{"max_tokens": 6, "temperature": 0.5, "top_p": 0.9, "seed": 2**64 - 1, "min_tokens": 1, "top_k": 50},
    **{"min_p": 0.01, "repetition_penalty": 0.9, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    **{"logit_bias": {5: 2.0}, "bad_token_ids": (8,), "stop_token_ids": (11,), "logprobs": 20},
)


def counts() -> dict[str, int]:
    """Traces of everything that runs on devices."""
    return {name: getattr(runner, name)._cache_size() for name in (*MAKING, *STEPS, *MOVING)}


def test_one_trace_per_bucket_whatever_the_requests(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only what reports log-probabilities, as something does in every step here: half as much to compile.
    monkeypatch.setattr("deepinfer_jax.engine.engine.LOGPROB_BUCKETS", LOGPROB_BUCKETS[1:])
    engine = Engine(model.weights, SMALLEST, FLOAT32, OPTIONS)
    engine.warmup()
    before = counts()
    assert [name for name, count in before.items() if not count and name != "encode_step"] == []
    every = EVERY_PARAMETER
    complete([TOKENS[:100], [np.int64(7)], TOKENS[:65], NEIGHBOUR], every, model)
    complete([PROMPT] * 8, [every, *[sampled(seed) for seed in range(7)]], model)
    # Some end before others, one grows into another page, one begins as the one before.
    each = [sampled(1, 60), every, every, every, sampled(2, 5)]
    lengths = (3, 260, 125, 260, 127)
    requests = [engine.submit(TOKENS[:length], one) for length, one in zip(lengths, each, strict=True)]
    while engine.has_work:
        engine.step()
    assert [request.num_cached for request in requests] == [0, 0, 0, 256, 0]
    engine.close()
    assert counts() == before


def test_seeds_repeat_and_differ(model: Model) -> None:
    seeds = (7, 8, 7 + 2**32, 7, 2**64 - 1)
    found = ids_of(complete([PROMPT] * 5, [sampled(seed) for seed in seeds], model))
    assert found[0] == found[3]
    assert len({tuple(tokens) for tokens in found}) == 4
    assert found == ids_of(complete([PROMPT] * 5, [sampled(seed) for seed in seeds], model))


def test_bc28_a_seeded_row_does_not_depend_on_its_neighbours(model: Model) -> None:
    mine, other = sampled(7), sampled(0)
    alone = ids_of(complete([PROMPT], mine, model))[0]
    assert ids_of(complete([PROMPT, NEIGHBOUR], [mine, other], model))[0] == alone
    assert ids_of(complete([NEIGHBOUR, PROMPT], [other, mine], model))[1] == alone
    crowd = complete([NEIGHBOUR] * 3 + [PROMPT], [other] * 3 + [mine], model)
    assert ids_of(crowd)[3] == alone


def test_a_longer_request_begins_like_a_shorter_one(model: Model) -> None:
    short, long = complete([PROMPT] * 2, [sampled(7, 5), sampled(7, 12)], model)
    assert long.token_ids[:5] == short.token_ids


def test_timing_counts_what_was_decoded(model: Model) -> None:
    timing = Timing()
    prompts, params = [PROMPT, NEIGHBOUR], [greedy(5), greedy(3)]
    generate_ids(model.weights, SMALLEST, FLOAT32, prompts, params, timing=timing, options=OPTIONS)
    assert timing.num_decoded == 6  # all but the two tokens of the prefill
    assert timing.first_token > 0
    assert timing.decoding > 0


def test_logprobs_are_those_of_the_one_shot_forward(model: Model) -> None:
    each = [sampled(5, 8), replace(sampled(6, 8), logprobs=None), replace(sampled(7, 8), logprobs=0)]
    found = complete([PROMPT] * 3, each, model)
    assert found[1].logprobs == []
    assert [one.top for one in found[2].logprobs] == [{}] * 8
    for completion in (found[0], found[2]):
        chosen = expected_logprobs(model, completion)[np.arange(8), completion.token_ids]
        assert_close([one.logprob for one in completion.logprobs], chosen, "equivalence_float32")
    for one, row in zip(found[0].logprobs, expected_logprobs(model, found[0]), strict=True):
        best = np.argsort(-row, kind="stable")[:LOGPROBS]
        assert list(one.top) == best.tolist()
        assert_close(list(one.top.values()), row[best], "equivalence_float32")


def expected_logprobs(model: Model, completion: Completion) -> np.ndarray:
    """Log-probabilities [tokens, V] of the model's own distribution at each generated token."""
    logits = one_shot_logits(model.weights, PROMPT + completion.token_ids)[len(PROMPT) - 1 : -1]
    return logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))


def test_prompt_logprobs_are_those_of_the_one_shot_forward(model: Model) -> None:
    each = [replace(greedy(2), prompt_logprobs=count) for count in (LOGPROBS, 0, None)]
    prompts = [PROMPT, NEIGHBOUR, PROMPT]
    found = complete(prompts, each, model)
    assert [len(one.prompt_logprobs) for one in found] == [len(PROMPT) - 1, len(NEIGHBOUR) - 1, 0]
    assert found[0].token_ids == found[2].token_ids
    for completion in found[:2]:
        logits = one_shot_logits(model.weights, completion.prompt_ids)[:-1]
        rows = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
        following = completion.prompt_ids[1:]
        chosen = rows[np.arange(len(following)), following]
        assert_close([one.logprob for one in completion.prompt_logprobs], chosen, "equivalence_float32")
    assert all(one.top == {} for one in found[1].prompt_logprobs)
    for one, token in zip(found[0].prompt_logprobs, PROMPT[1:], strict=True):
        check_top(one, token)


def check_top(one: TokenLogprobs, token: int) -> None:
    """The best come first, and the token's own is among them or below."""
    values = list(one.top.values())
    assert len(values) == LOGPROBS and values == sorted(values, reverse=True)
    assert one.top.get(token, one.logprob) == one.logprob
    assert token in one.top or one.logprob <= values[-1]


def test_prompt_logprobs_are_those_of_generating_it(model: Model) -> None:
    """Up to rounding, as they come from other tiles; bit for bit whatever follows in the prompt."""
    generated = complete([PROMPT], greedy(12), model)[0]
    whole = PROMPT + generated.token_ids
    asking = replace(greedy(0), prompt_logprobs=LOGPROBS)
    # The first one runs in every step, so that all have one shape of output.
    found = complete([NEIGHBOUR, whole, PROMPT], [greedy(12), asking, asking], model, max_chunk=5)
    again = found[1].prompt_logprobs[len(PROMPT) - 1 :]
    assert [list(one.top) for one in again] == [list(one.top) for one in generated.logprobs]
    for one, expected in zip(again, generated.logprobs, strict=True):
        values = [expected.logprob, *expected.top.values()]
        assert_close([one.logprob, *one.top.values()], values, "equivalence_float32")
    assert found[2].prompt_logprobs == found[1].prompt_logprobs[: len(PROMPT) - 1]
    assert [(one.token_ids, one.finish_reason) for one in found[1:]] == [([], "length")] * 2


def test_samples_of_a_prompt_are_requests_of_their_own(model: Model) -> None:
    found = complete([PROMPT, NEIGHBOUR], [replace(sampled(7), n=3), sampled(5)], model)
    assert [one.index for one in found] == [0, 1, 2, 0]
    assert len({tuple(one.token_ids) for one in found}) == 4
    alone = [sampled(7).for_sample(index) for index in range(3)]
    assert ids_of(found) == ids_of(complete([PROMPT] * 3 + [NEIGHBOUR], [*alone, sampled(5)], model))


def test_nan_ends_its_own_request_and_the_others_are_given(model: Model) -> None:
    poisoned = replace(model, weights=model.weights.replace(embed=model.weights.embed.at[POISON].set(np.nan)))
    prompts = [PROMPT, [5, POISON], NEIGHBOUR]
    with pytest.raises(
        InvalidOutputError, match=r"prompts \[1\]: the logits held NaN or no token was left"
    ) as raised:
        complete(prompts, greedy(5), poisoned)
    first, invalid, last = raised.value.generations
    assert (invalid.finish_reason, invalid.token_ids) == (INVALID_REASON, [])
    assert [first.token_ids, last.token_ids] == ids_of(complete([PROMPT, NEIGHBOUR], greedy(5), model))


def test_a_request_with_no_token_left_is_invalid(model: Model) -> None:
    """The request alone leaves token 7, which is forbidden here to all."""
    others = [token for token in range(SMALLEST.vocab_size) if token != 7]
    each = [greedy(2), replace(greedy(2), bad_token_ids=tuple(others))]
    with pytest.raises(InvalidOutputError, match=r"prompts \[1\]") as raised:
        generate_ids(model.weights, SMALLEST, FLOAT32, [PROMPT] * 2, each, options=OPTIONS, forbidden_ids=[7])
    assert [len(one.token_ids) for one in raised.value.generations] == [2, 0]


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make some of what runs on devices an error, to show that it does not run."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a step ran")

    for name in names:
        monkeypatch.setattr(runner, name, forbidden)


@pytest.mark.parametrize("prompts", [[[]], [PROMPT, []], [[], PROMPT]], ids=["alone", "second", "first"])
def test_bc17_an_empty_prompt_is_refused_before_anything_runs(
    model: Model, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    with monkeypatch.context() as patched:
        forbid(patched, *MAKING, *STEPS, *MOVING)
        with pytest.raises(RequestError, match=rf"prompt {prompts.index([])}: got no tokens, expected at"):
            complete(prompts, greedy(4), model)
    neighbours = [prompt for prompt in prompts if prompt]
    assert all(ids_of(complete(neighbours, greedy(4), model)))


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
    forbid(monkeypatch, *MAKING, *STEPS, *MOVING)
    with pytest.raises(RequestError) as raised:
        complete(prompts, params, model)
    assert part in str(raised.value)


def test_several_outputs_are_refused_for_ids(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, *STEPS, *MOVING)
    each = [greedy(2), replace(greedy(2), n=2)]
    with pytest.raises(RequestError, match="prompt 1: n: got 2, expected 1, as a request of an engine is"):
        generate_ids(model.weights, SMALLEST, FLOAT32, [PROMPT] * 2, each, options=OPTIONS)


def test_stop_strings_without_a_tokenizer_are_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, *STEPS, *MOVING)
    with pytest.raises(RequestError, match=r"prompt 1: stop: got \['x'\], expected none .* no tokenizer"):
        complete([PROMPT] * 2, [greedy(2), replace(greedy(2), stop="x")], model)


def test_a_request_beyond_the_sizes_of_the_engine_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, *STEPS, *MOVING)
    with pytest.raises(RequestError, match=r"prompt 1: got 500 prompt tokens \+ max_tokens 13 = 513"):
        complete([PROMPT, TOKENS[:500]], greedy(13), model)


def test_numpy_ids_are_ids(model: Model) -> None:
    found = generate_ids(model.weights, SMALLEST, FLOAT32, [np.array(PROMPT)], greedy(3), options=OPTIONS)
    assert found[0].prompt_ids == PROMPT
    assert found[0].token_ids == complete([PROMPT], greedy(3), model)[0].token_ids


def test_nothing_comes_of_no_prompts(model: Model) -> None:
    assert generate([], greedy(3), model) == []
    assert generate_ids(model.weights, SMALLEST, FLOAT32, [], greedy(3)) == []


def test_a_flat_list_of_ids_is_refused_with_the_remedy() -> None:
    model = Model(SMALLEST, weights=None, numerics=FLOAT32, tokenizer=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match=r"got 1 as one of them.*list of their own"):
        complete([1, 2, 3], SamplingParams(), model)  # pyright: ignore
