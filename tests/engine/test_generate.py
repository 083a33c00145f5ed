"""Generation from ids: exactness of the loop, stopping, seeds, log-probabilities, refusals.

Separate because everything here is observable by a caller of `generate_ids` and `generate`.
Read next: `test_same_tokens.py`, company and cuts; `test_nano.py`, a trained model and text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import (
    Completion,
    DriverOptions,
    InvalidOutputError,
    Model,
    RequestError,
    SamplingParams,
    generate,
    load,
)
from deepinfer_jax.engine.driver import INVALID_REASON, Timing
from deepinfer_jax.engine.generate import generate_ids
from deepinfer_jax.model.numerics import FLOAT32, Numerics
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.plans import Admission, PrefillPlan
from deepinfer_jax.sampling.state import LENGTH, RUNNING
from deepinfer_jax.step import (
    StepOutput,
    admit_step,
    decode_step,
    encode_step,
    initial_state,
    prefill_step,
)
from deepinfer_jax.testing.golden import ChunkRunner
from deepinfer_jax.testing.presets import SMALLEST, random_weights
from deepinfer_jax.testing.tolerances import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
END = SMALLEST.eos_token_id
TOKENS = np.random.default_rng(5).integers(3, 120, 512).tolist()
PROMPT = TOKENS[:12]
NEIGHBOUR = TOKENS[300:307]
POISON = 124
"""A token that no prompt holds unless a test puts it there."""

LOGPROBS = 3
"""Nearly all requests ask for them: with those of `test_same_tokens.py` they share few compiled shapes."""

STEPS = (initial_state, admit_step, encode_step, prefill_step, decode_step)


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


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


ONE_SHOT = 32


def one_shot_logits(weights: Weights, token_ids: list[int]) -> np.ndarray:
    runner = ChunkRunner(weights, SMALLEST, FLOAT32, slots=1, capacity=ONE_SHOT, chunk=ONE_SHOT)
    return runner.feed([token_ids])[0]


def test_greedy_tokens_are_the_best_of_the_one_shot_forward(model: Model) -> None:
    generated = generate([PROMPT], greedy(20), model)[0].token_ids
    assert len(generated) == 20
    logits = one_shot_logits(model.weights, PROMPT + generated)[len(PROMPT) - 1 : -1].copy()
    # At one place the image token is the best; it never comes.
    assert SMALLEST.image_token_id in logits.argmax(axis=-1)
    logits[:, SMALLEST.image_token_id] = -np.inf
    assert generated == logits.argmax(axis=-1).tolist()


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


def test_stop_tokens_end_like_the_end_token(model: Model) -> None:
    tokens = generate([PROMPT], greedy(12), model)[0].token_ids
    stop = tokens[4]
    assert stop not in tokens[:4]
    params = [
        replace(greedy(12), stop_token_ids=(stop,)),
        replace(greedy(12), stop_token_ids=(stop, 2), min_tokens=5),
    ]
    stopped, later = generate([PROMPT] * 2, params, model)
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[:4], "stop")
    assert len(stopped.logprobs) == 4
    # Before min_tokens a stop token is not stopped at but not chosen.
    assert later.token_ids[:4] == tokens[:4]
    assert len(later.token_ids) >= 5 and stop not in later.token_ids[:5]


def test_bad_and_forbidden_tokens_never_come(model: Model) -> None:
    tokens = generate([PROMPT], greedy(12), model)[0].token_ids
    image = SMALLEST.image_token_id
    each = [replace(greedy(12), bad_token_ids=tuple(tokens)), replace(greedy(12), logit_bias={image: 1000.0})]
    banned, wanted = generate([PROMPT] * 2, each, model)
    assert not set(tokens) & set(banned.token_ids)
    assert wanted.token_ids == tokens
    forbidding = generate_ids(model.weights, SMALLEST, FLOAT32, [PROMPT], greedy(12), forbidden_ids=tokens)
    assert forbidding[0].token_ids == banned.token_ids


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
    order, options = [], DriverOptions(num_slots=8)
    found = ids_of(
        generate(
            prompts, greedy(3), model, lambda prompt, token: order.append((prompt, token)), options=options
        )
    )
    assert found == [ids_of(generate([prompt], greedy(3), model))[0] for prompt in prompts]
    assert [[token for prompt, token in order if prompt == number] for number in range(9)] == found


class CountingSteps:
    """Steps that only count: each slot's token is the integer after its latest one. Records what came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.admissions: list[Admission] = []
        self.encoded: list[PrefillPlan] = []
        self.prefilled: list[PrefillPlan] = []
        for step in STEPS:
            monkeypatch.setattr(f"deepinfer_jax.engine.driver.{step.__name__}", getattr(self, step.__name__))
        monkeypatch.setattr("deepinfer_jax.engine.driver._compiled", set())

    def initial_state(self, is_forbidden: jax.Array, *, sizes: Any, **_: Any) -> np.ndarray:
        self.sizes.append(sizes.num_slots)
        return np.zeros(sizes.num_slots, np.int32)

    def admit_step(self, state: np.ndarray, admission: Admission, **_: Any) -> np.ndarray:
        self.admissions.append(admission)
        self.left = admission.parameters.max_tokens.copy()
        return state

    def encode_step(self, _weights: Any, state: np.ndarray, plan: PrefillPlan, **_: Any) -> np.ndarray:
        self.encoded.append(plan)
        return state

    def prefill_step(
        self, _weights: Any, state: np.ndarray, plan: PrefillPlan, **_: Any
    ) -> tuple[np.ndarray, StepOutput]:
        self.prefilled.append(plan)
        return self.sample(
            np.where(plan.last_rows >= 0, plan.token_ids[plan.last_rows], state), plan.last_rows >= 0
        )

    def decode_step(
        self, _weights: Any, state: np.ndarray, is_active: np.ndarray, **_: Any
    ) -> tuple[np.ndarray, StepOutput]:
        return self.sample(state, is_active)

    def sample(self, state: np.ndarray, is_sampled: np.ndarray) -> tuple[np.ndarray, StepOutput]:
        tokens = state + is_sampled
        self.left = self.left - is_sampled
        nothing = np.zeros((len(state), 0), np.float32)
        output = StepOutput(
            tokens=tokens,
            is_sampled=is_sampled,
            finish=np.where(self.left <= 0, LENGTH, RUNNING),
            is_invalid=np.zeros(len(state), bool),
            logprobs=nothing,
            top_ids=nothing,
            top_logprobs=nothing,
        )
        return tokens, output


def test_more_than_64_prompts_run_in_groups(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = CountingSteps(monkeypatch)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    found = ids_of(generate([[number % 90] for number in range(131)], params, model))
    assert found == [[number % 90 + 1 + step for step in range(3)] for number in range(131)]
    assert steps.sizes == [64, 64, 8]


def test_every_request_has_pages_of_its_own(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = CountingSteps(monkeypatch)
    lengths, max_tokens = (1, 126, 127, 300, 500), 3
    generate([[7] * length for length in lengths], SamplingParams(max_tokens=max_tokens), model)
    table = steps.admissions[0].page_table
    assert table.shape == (8, 4)
    counts = (table >= 0).sum(axis=1).tolist()
    assert counts == [-(-(length + max_tokens) // 128) for length in lengths] + [0] * 3
    pages = table[table >= 0].tolist()
    assert len(set(pages)) == len(pages) and max(pages) < 8 * 4


@pytest.mark.parametrize("prefill", ["exact", "bounded"])
def test_bounded_prefill_runs_the_decoder_on_a_window(
    model: Model, monkeypatch: pytest.MonkeyPatch, prefill: str
) -> None:
    steps, window = CountingSteps(monkeypatch), SMALLEST.sliding_window
    lengths = (1, window, window + 1, 200)
    prompts = [[7] * length for length in lengths]
    params = SamplingParams(max_tokens=2)
    generate(prompts, params, model, options=DriverOptions(prefill=prefill, max_chunk=50))
    starts = [max(0, length - window) if prefill == "bounded" else 0 for length in lengths]
    assert steps.admissions[0].decoder_starts.tolist() == [*starts, *[0] * 4]
    assert positions_of(steps.encoded, 4) == [list(range(start)) for start in starts]
    spans = zip(starts, lengths, strict=True)
    assert positions_of(steps.prefilled, 4) == [list(range(start, length)) for start, length in spans]


def positions_of(plans: list[PrefillPlan], num_slots: int) -> list[list[int]]:
    """Positions that ran in each slot, in order."""
    slots = range(num_slots)
    return [
        [int(at) for plan in plans for at in plan.positions[plan.is_valid & (plan.slots == slot)]]
        for slot in slots
    ]


def test_one_trace_per_bucket_whatever_the_requests(model: Model) -> None:
    def counts() -> list[int]:
        return [step._cache_size() for step in STEPS]

    options = DriverOptions(num_slots=8, max_rows=64)
    generate([PROMPT, NEIGHBOUR], greedy(2), model, options=options)
    before = counts()
    every = SamplingParams(
        **{
            "max_tokens": 6,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 2**64 - 1,
            "min_tokens": 1,
            "top_k": 50,
        },
        **{"min_p": 0.01, "repetition_penalty": 0.9, "presence_penalty": 1.0, "frequency_penalty": -0.5},
        **{"logit_bias": {5: 2.0}, "bad_token_ids": (8,), "stop_token_ids": (11,), "logprobs": 20},
    )
    generate([TOKENS[:100], [np.int64(7)], TOKENS[:65], NEIGHBOUR], every, model, options=options)
    generate([PROMPT] * 8, [every, *[sampled(seed) for seed in range(7)]], model, options=options)
    assert counts() == before


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


def test_logprobs_are_those_of_the_one_shot_forward(model: Model) -> None:
    each = [sampled(5, 8), replace(sampled(6, 8), logprobs=None), replace(sampled(7, 8), logprobs=0)]
    found = generate([PROMPT] * 3, each, model)
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


def test_nan_ends_its_own_request_and_the_others_are_given(model: Model) -> None:
    poisoned = replace(model, weights=model.weights.replace(embed=model.weights.embed.at[POISON].set(np.nan)))
    prompts = [PROMPT, [5, POISON], NEIGHBOUR]
    with pytest.raises(
        InvalidOutputError, match=r"prompts \[1\]: the logits held NaN or no token was left"
    ) as raised:
        generate(prompts, greedy(5), poisoned)
    first, invalid, last = raised.value.generations
    assert (invalid.finish_reason, invalid.token_ids) == (INVALID_REASON, [])
    assert [first.token_ids, last.token_ids] == ids_of(generate([PROMPT, NEIGHBOUR], greedy(5), model))


def test_a_request_with_no_token_left_is_invalid(model: Model) -> None:
    """The request alone leaves token 7, which is forbidden here to all."""
    others = [token for token in range(SMALLEST.vocab_size) if token != 7]
    each = [greedy(2), replace(greedy(2), bad_token_ids=tuple(others))]
    with pytest.raises(InvalidOutputError, match=r"prompts \[1\]") as raised:
        generate_ids(model.weights, SMALLEST, FLOAT32, [PROMPT] * 2, each, forbidden_ids=[7])
    assert [len(one.token_ids) for one in raised.value.generations] == [2, 0]


def forbid_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every device step an error, to show that nothing runs."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a step ran")

    for step in STEPS:
        monkeypatch.setattr(f"deepinfer_jax.engine.driver.{step.__name__}", forbidden)


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
    assert model.numerics.batch_invariant
    assert model.weights.embed.shape == (model.config.vocab_size, model.config.hidden_size)


@pytest.mark.parametrize("changes", [{"batch_invariant": False}, {"cache_format": "fp8"}])
def test_loading_with_other_numerics(changes: dict[str, Any]) -> None:
    assert load(GOLDEN / "tiny_bf16", "float32", **changes).numerics == replace(FLOAT32, **changes)


def test_an_unknown_cache_format_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_format: got 'int8', expected one of"):
        load(GOLDEN / "tiny_bf16", cache_format="int8")


def test_unknown_numerics_are_refused_before_the_folder_is_read() -> None:
    with pytest.raises(RequestError, match=r"numerics: got 'float16', expected one of \['float32', 'offi"):
        load("nowhere", "float16")


def test_a_flat_list_of_ids_is_refused_with_the_remedy() -> None:
    model = Model(SMALLEST, weights=None, numerics=FLOAT32, tokenizer=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match=r"got 1 as one of them.*list of their own"):
        generate([1, 2, 3], SamplingParams(), model)  # pyright: ignore
