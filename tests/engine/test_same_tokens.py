"""The tokens of a request are bitwise the same in any company, slot, order, chunking, overlap and crowd.

Separate because it is the promise users rely on when they rerun one request of a batch: Hypothesis mixes
requests and ways of running them, and every result is compared with the request run alone.
Read next: `test_scheduler.py`, the same with fake devices and many more mixtures.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import EngineConfig, RequestError, SamplingParams, slot_steps, step
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.generate import Generation, generate_ids, generation_of
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.testing.presets import SMALLEST, random_weights, shared_prefix_prompts

PROMPTS = shared_prefix_prompts((1, 7, 16, 17, 64, 65, 130, 131, 260), SMALLEST.vocab_size)
"""Of the longer ones each begins as the next longer one does."""

PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=1.0, seed=2**63 + 5, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=0.8, top_p=0.7, top_k=20, seed=1),
    SamplingParams(
        max_tokens=14, temperature=1.3, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.5, seed=7
    ),
    SamplingParams(
        max_tokens=11, temperature=1.0, min_tokens=4, stop_token_ids=(3, 5, 9), presence_penalty=0.7, seed=9
    ),
    SamplingParams(max_tokens=8, temperature=0.9, bad_token_ids=(1, 2), logit_bias={7: 3.0}, seed=0),
    SamplingParams(max_tokens=130, temperature=1.0, repetition_penalty=1.2, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=140, temperature=0.0, presence_penalty=0.3, ignore_eos=True),
]
# All ask for log-probabilities, so that those are compared too and every way has one shape of output.
PARAMS = [replace(one, logprobs=3) for one in PARAMS]
REQUESTS = range(len(PROMPTS))

SIZES: dict[str, Any] = {"num_slots": 8, "max_context": 512}
CROWDED = {"num_pages": 5}
"""Less than two of the longest requests need: they take turns. Another shape, so compiled once more."""

WAYS = st.fixed_dictionaries(
    {
        "max_chunk": st.sampled_from([None, 5, 33, 100]),
        "token_budget": st.sampled_from([None, 16, 70]),
        "overlap": st.sampled_from([0, 1]),
        "prefix_cache": st.booleans(),
        "num_pages": st.sampled_from([None, CROWDED["num_pages"]]),
    }
)


@cache
def weights() -> Weights:
    return random_weights(SMALLEST, jax.random.key(8))


def run(numbers: list[int], **options: Any) -> list[Generation]:
    prompts, params = [PROMPTS[i] for i in numbers], [PARAMS[i] for i in numbers]
    sizes = EngineConfig(**{**SIZES, **options})
    return generate_ids(weights(), SMALLEST, FLOAT32, prompts, params, options=sizes)


@cache
def alone(number: int) -> Generation:
    return run([number], overlap=0, prefix_cache=False)[0]


@settings(max_examples=25)
@given(
    numbers=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=10),
    gaps=st.lists(st.integers(0, 6), min_size=10, max_size=10),
    way=WAYS,
)
def test_tokens_do_not_depend_on_how_a_request_is_run(
    numbers: list[int], gaps: list[int], way: dict[str, Any]
) -> None:
    """Requests arrive in this order, some steps apart, among each other."""
    engine = Engine(weights(), SMALLEST, FLOAT32, EngineConfig(**{**SIZES, **way}))
    requests = []
    for number, gap in zip(numbers, gaps, strict=False):
        requests.append(engine.submit(PROMPTS[number], PARAMS[number]))
        for _ in range(gap):
            engine.step()
    while engine.has_work:
        engine.step()
    engine.close()
    for number, request in zip(numbers, requests, strict=True):
        assert generation_of(request) == alone(number), f"request {number} among {numbers}, {way}"


def test_preempted_requests_are_computed_again_with_the_same_bits() -> None:
    numbers = [8, 6, 8]
    engine = Engine(weights(), SMALLEST, FLOAT32, EngineConfig(**SIZES, **CROWDED, prefix_cache=False))
    requests = [engine.submit(PROMPTS[number], PARAMS[number]) for number in numbers]
    while engine.has_work:
        engine.step()
    engine.close()
    assert engine.stats.preemptions > 0
    assert [request.num_preemptions > 0 for request in requests] != [False] * 3
    for number, request in zip(numbers, requests, strict=True):
        assert generation_of(request) == alone(number)


def test_a_request_comes_through_a_lost_step() -> None:
    engine = Engine(weights(), SMALLEST, FLOAT32, EngineConfig(**SIZES))
    request = engine.submit(PROMPTS[6], PARAMS[6])
    while len(request.token_ids) < 20:
        engine.step()
    engine.runner.state.tokens.delete()
    with pytest.raises(Exception, match="deleted"):
        # The devices are given work from another thread: the error comes when it is read.
        for _ in range(3):
            engine.step()
    while engine.has_work:
        engine.step()
    engine.close()
    assert generation_of(request) == alone(6)


def test_one_slot_and_small_steps_give_the_same() -> None:
    numbers = [6, 3, 5]
    found = run(numbers, num_slots=1, max_rows=64)
    assert found == [alone(number) for number in numbers]


def test_the_requests_tell_ways_apart() -> None:
    """Sampled requests draw different tokens, some end by a stop token and some by length."""
    results = [alone(number) for number in REQUESTS]
    assert len({tuple(result.token_ids) for result in results}) == len(results)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    for result in results:
        assert len(result.logprobs) == len(result.token_ids)
        assert all(len(one.top) == 3 and one.logprob <= max(one.top.values()) for one in result.logprobs)


def test_bounded_prefill_is_as_independent() -> None:
    expected = {number: run([number], prefill="bounded", prefix_cache=False)[0] for number in (3, 6, 8)}
    found = run([0, 6, 5, 8, 3, 8, 6], prefill="bounded")
    assert found[1] == found[6] == expected[6]
    assert found[3] == found[5] == expected[8]
    assert found[4] == expected[3]
    # A prompt that fits into what is kept is exact.
    assert found[0] == alone(0)


def test_bc16_mixed_lengths_in_all_orders() -> None:
    params = replace(PARAMS[1], max_tokens=3)
    prompts = [PROMPTS[8][:length] for length in (1, 7, 8, 9, 129)]
    sizes = EngineConfig(**SIZES)
    single = [
        generate_ids(weights(), SMALLEST, FLOAT32, [prompt], params, options=sizes)[0] for prompt in prompts
    ]
    for turn in range(len(prompts)):
        for stride in (1, -1):
            order = [(turn + stride * place) % len(prompts) for place in range(len(prompts))]
            found = generate_ids(
                weights(), SMALLEST, FLOAT32, [prompts[i] for i in order], params, options=sizes
            )
            assert found == [single[i] for i in order]


STEPS = (
    *(step.initial_state, step.admit_step, step.page_step, step.encode_step, step.prefill_step),
    *(step.decode_step, slot_steps.save_step, slot_steps.restore_step, slot_steps.note_step),
)


def test_200_mixed_requests_trace_nothing_after_the_warm_up() -> None:
    """With and without log-probabilities and penalties, with hits, preemption and aborts on the way."""
    engine = Engine(weights(), SMALLEST, FLOAT32, EngineConfig(**SIZES, **CROWDED))
    engine.warmup(logprobs=True)
    before = [jitted._cache_size() for jitted in STEPS]
    random = np.random.default_rng(1)
    requests = []
    for number in range(200):
        prompt, params = PROMPTS[random.integers(len(PROMPTS))], PARAMS[random.integers(len(PARAMS))]
        tokens = int(random.integers(1, 14)) if number % 10 else 140
        logprobs = 3 if number % 3 else None
        params = replace(params, max_tokens=tokens, min_tokens=0, seed=number, logprobs=logprobs)
        requests.append(engine.submit(prompt, params))
        for _ in range(number % 3):
            engine.step()
        if number % 17 == 16:
            engine.abort(requests[-3], "aborted")
    while engine.has_work:
        engine.step()
    engine.close()
    stats = engine.stats
    assert stats.preemptions > 0 and stats.prefix.hits > 0
    assert {request.finish_reason for request in requests} == {"stop", "length", "aborted"}
    assert [jitted._cache_size() for jitted in STEPS] == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": "mask"}, r"prefill: got 'mask', expected one of \['exact', 'bounded'\]"),
        ({"num_slots": 3}, "num_slots: got 3, expected one of"),
        ({"max_rows": 100}, "max_rows: got 100, expected one of"),
        ({"max_chunk": 0}, "max_chunk: got 0, expected 1 or more"),
        ({"max_context": 2**21}, "max_context: got 2097152, expected an int in 1..1048576"),
        ({"num_pages": 0}, "num_pages: got 0, expected 1 or more"),
        ({"token_budget": 15}, "token_budget: got 15, expected 16 or more"),
        ({"num_snapshots": -1}, "num_snapshots: got -1, expected 0 or more"),
        ({"overlap": 2}, r"overlap: got 2, expected one of \[0, 1\]"),
        ({"max_chunk": True}, "max_chunk: got True"),
    ],
)
def test_options_that_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig(**changes)


def test_too_few_pages_are_refused_before_anything_runs() -> None:
    sizes = EngineConfig(num_slots=1, max_context=256)
    with pytest.raises(RequestError, match=r"300 prompt tokens \+ max_tokens 1 = 301, expected at most 256"):
        generate_ids(weights(), SMALLEST, FLOAT32, [[1] * 300], SamplingParams(max_tokens=1), options=sizes)


def test_more_context_than_positions_is_refused() -> None:
    with pytest.raises(RequestError, match="max_context: got 2000, expected at most the model's 1024"):
        generate_ids(
            *(weights(), SMALLEST, FLOAT32, [[1]], SamplingParams(max_tokens=1)),
            options=EngineConfig(max_context=2000),
        )
