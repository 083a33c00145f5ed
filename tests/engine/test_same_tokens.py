"""The tokens of a request are bitwise the same in any company, slot, order, chunking and bucket.

Separate because it is the promise users rely on when they rerun one request of a batch: Hypothesis mixes
requests and ways of running them, and every result is compared with the request run alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import RequestError, SamplingParams
from deepinfer_jax.engine.driver import DriverOptions, Generation
from deepinfer_jax.engine.generate import generate_ids
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.presets import SMALLEST, random_weights

RANDOM = np.random.default_rng(17)
PROMPTS = [RANDOM.integers(0, SMALLEST.vocab_size, length).tolist() for length in (1, 7, 16, 17, 64, 65, 130)]
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
    SamplingParams(max_tokens=1, temperature=0.0),
]
# All ask for log-probabilities, so that those are compared too and every way has one shape of output.
PARAMS = [replace(one, logprobs=3) for one in PARAMS]
REQUESTS = range(len(PROMPTS))

WAYS = {
    "own size": DriverOptions(),
    "large steps": DriverOptions(num_slots=8, pages_per_slot=2),
    "small steps": DriverOptions(num_slots=8, pages_per_slot=2, max_rows=64),
    "more pages": DriverOptions(num_slots=8, pages_per_slot=4, max_rows=64),
    "chunks of 5": DriverOptions(num_slots=8, pages_per_slot=2, max_rows=64, max_chunk=5),
    "chunks of 33": DriverOptions(num_slots=8, pages_per_slot=4, max_rows=64, max_chunk=33),
}


@cache
def weights():
    return random_weights(SMALLEST, jax.random.key(8))


def run(numbers: list[int], options: DriverOptions) -> list[Generation]:
    prompts, params = [PROMPTS[i] for i in numbers], [PARAMS[i] for i in numbers]
    return generate_ids(weights(), SMALLEST, FLOAT32, prompts, params, options=options)


@cache
def alone(number: int) -> Generation:
    return run([number], DriverOptions(num_slots=1, pages_per_slot=2, max_rows=64))[0]


@settings(max_examples=25)
@given(numbers=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=8), way=st.sampled_from(sorted(WAYS)))
def test_tokens_do_not_depend_on_how_a_request_is_run(numbers: list[int], way: str) -> None:
    options = WAYS[way] if len(numbers) > 1 else DriverOptions(num_slots=8, pages_per_slot=2, max_rows=64)
    for number, found in zip(numbers, run(numbers, options), strict=True):
        assert found == alone(number), f"request {number} among {numbers}, {way}"


def test_the_requests_tell_ways_apart() -> None:
    """Sampled requests draw different tokens, some end by a stop token and some by length."""
    results = [alone(number) for number in REQUESTS]
    assert len({tuple(result.token_ids) for result in results}) == len(results)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    for result in results:
        assert len(result.logprobs) == len(result.token_ids)
        assert all(len(one.top) == 3 and one.logprob <= max(one.top.values()) for one in result.logprobs)


def test_bounded_prefill_is_as_independent() -> None:
    options = DriverOptions(prefill="bounded", num_slots=8, pages_per_slot=2, max_rows=64)
    expected = {number: run([number], options)[0] for number in (3, 6)}
    found = run([0, 6, 5, 3], options)
    assert (found[1], found[3]) == (expected[6], expected[3])
    # A prompt that fits into what is kept is exact; a longer one is not the same computation.
    assert found[0] == alone(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": "mask"}, r"prefill: got 'mask', expected one of \['exact', 'bounded'\]"),
        ({"num_slots": 3}, "num_slots: got 3, expected one of"),
        ({"pages_per_slot": 3}, "pages_per_slot: got 3, expected one of"),
        ({"max_rows": 100}, "max_rows: got 100, expected one of"),
        ({"max_chunk": 0}, "max_chunk: got 0, expected 1 or more"),
    ],
)
def test_options_that_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        DriverOptions(**changes)


def test_too_few_pages_are_refused_before_anything_runs() -> None:
    with pytest.raises(RequestError, match="got 1 slots of 2 pages, expected at least 1 of 3"):
        generate_ids(
            *(weights(), SMALLEST, FLOAT32, [[1] * 300], SamplingParams(max_tokens=1)),
            options=DriverOptions(num_slots=1, pages_per_slot=2),
        )
