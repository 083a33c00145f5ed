"""Requests checked and cut into steps, on the host alone.

Read next: `test_step.py`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.plans import (
    CAPACITY_BUCKETS,
    CHUNK_BUCKETS,
    SLOT_BUCKETS,
    RequestError,
    SamplingParams,
    bucket_for,
    check_prompt,
    prefill_plans,
)
from deepinfer_jax.testing.presets import TINY

LIMIT = TINY.max_position_embeddings

prompt_lists = st.lists(
    st.integers(1, 700).flatmap(
        lambda n: st.integers(0, 99).map(lambda start: [start + i for i in range(n)])
    ),
    min_size=1,
    max_size=4,
)


@given(prompts=prompt_lists)
def test_plans_hold_every_prompt_once_and_in_order(prompts: list[list[int]]) -> None:
    plans = prefill_plans(prompts, num_slots=4)
    assert {plan.token_ids.shape for plan in plans} == {(4, plans[0].token_ids.shape[1])}
    assert plans[0].token_ids.shape[1] in CHUNK_BUCKETS
    for slot, prompt in enumerate(prompts):
        parts = [plan.token_ids[slot, : plan.num_tokens[slot]] for plan in plans]
        assert np.concatenate(parts).tolist() == prompt
        ends = [bool(plan.is_last[slot]) for plan in plans]
        assert sum(ends) == 1
        assert sum(int(plan.num_tokens[slot]) for plan in plans[: ends.index(True) + 1]) == len(prompt)


@given(prompts=prompt_lists)
def test_slots_without_a_prompt_do_nothing(prompts: list[list[int]]) -> None:
    for plan in prefill_plans(prompts, num_slots=4):
        unused = slice(len(prompts), None)
        assert not plan.num_tokens[unused].any()
        assert not plan.is_last[unused].any()


@pytest.mark.parametrize(
    ("length", "chunk", "count"),
    [(1, 16, 1), (16, 16, 1), (17, 64, 1), (64, 64, 1), (65, 256, 1), (256, 256, 1), (257, 256, 2)],
)
def test_chunks_are_the_smallest_bucket_that_fits(length: int, chunk: int, count: int) -> None:
    plans = prefill_plans([[1] * length, [2]], num_slots=2)
    assert [plan.token_ids.shape for plan in plans] == [(2, chunk)] * count


def test_a_prompt_that_fills_its_chunk_ends_there_and_not_in_the_next() -> None:
    plans = prefill_plans([[1] * 256, [2] * 300, [3] * 255], num_slots=4)
    assert [plan.is_last.tolist() for plan in plans] == [
        [True, False, True, False],
        [False, True, False, False],
    ]


@pytest.mark.parametrize("buckets", [SLOT_BUCKETS, CHUNK_BUCKETS, CAPACITY_BUCKETS])
def test_buckets_are_the_smallest_that_hold(buckets: tuple[int, ...]) -> None:
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in itertools.pairwise(buckets):
        assert bucket_for(smaller, buckets, "x") == smaller
        assert bucket_for(smaller + 1, buckets, "x") == larger
    with pytest.raises(RequestError, match=f"x: got {buckets[-1] + 1}, expected at most {buckets[-1]}"):
        bucket_for(buckets[-1] + 1, buckets, "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", value) for value in (-1, 1.5, True, "8", None)],
        *[("temperature", value) for value in (-0.1, math.inf, math.nan, "1", None)],
        *[("top_p", value) for value in (0, 0.0, -0.5, 1.01, math.nan, "1", None)],
        *[("seed", value) for value in (-1, 2**64, 0.5, None)],
    ],
)
def test_sampling_parameters_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name}: got {value!r}, expected ")
    assert message.endswith(f"change the request's {name}")


def test_sampling_parameters_at_the_edges_are_accepted() -> None:
    SamplingParams(max_tokens=0, temperature=0, top_p=1, seed=2**64 - 1)
    SamplingParams(temperature=1e30, top_p=1e-30, seed=0)
    # NumPy's numbers are numbers.
    SamplingParams(np.int64(3), np.float32(0.5), np.float32(0.5), np.uint64(2**64 - 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "parts"),
    [
        ([], 1, ["got no tokens", "expected at least one", "give a non-empty prompt"]),
        ([128], 1, ["got token id 128", "expected ids in 0..127", "tokenizer"]),
        ([5, -1], 1, ["got token id -1", "expected ids in 0..127"]),
        ([5, 1.0], 1, ["got token id 1.0", "expected ids in 0..127"]),
        ([True], 1, ["got token id True", "expected ids in 0..127"]),
        ([5] * LIMIT, 1, [f"got {LIMIT} prompt tokens + max_tokens 1", f"at most {LIMIT}", "shorten"]),
        ([5], LIMIT, [f"max_tokens {LIMIT} = {LIMIT + 1}", "lower max_tokens"]),
    ],
)
def test_prompts_that_cannot_run_are_refused(prompt: list[Any], max_tokens: int, parts: list[str]) -> None:
    with pytest.raises(RequestError) as raised:
        check_prompt(prompt, SamplingParams(max_tokens=max_tokens), TINY, "prompt 3")
    message = str(raised.value)
    assert message.startswith("prompt 3: ")
    assert [part for part in parts if part not in message] == [], message


def test_a_prompt_may_fill_every_position() -> None:
    check_prompt([0, 127] * (LIMIT // 2), SamplingParams(max_tokens=0), TINY, "prompt")
    check_prompt([5], SamplingParams(max_tokens=LIMIT - 1), TINY, "prompt")
