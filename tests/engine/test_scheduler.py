"""The scheduler on fake devices: whatever it decides, every request gets the tokens of its own sequence.

Separate from `test_same_tokens.py`, which says the same of real devices with few examples: here thousands
of steps take a second, so that crowding, preemption, reuse and aborts meet in every combination.
Read next: `deepinfer_jax/testing/fake_device.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax import EngineConfig, RequestError, SamplingParams
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.request import Request
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.testing.fake_device import plain_token, with_drafts
from deepinfer_jax.testing.presets import SMALLEST

CONFIG = with_drafts(replace(SMALLEST, max_position_embeddings=2048))
BLOCKS = np.random.default_rng(3).integers(3, CONFIG.vocab_size, (3, 128)).tolist()
SEED = 11


pytestmark = pytest.mark.usefixtures("fake_devices")


def engine_of(**options: Any) -> Engine:
    options = {"num_slots": 8, "max_context": 1024, **options}
    return Engine(None, CONFIG, FLOAT32, EngineConfig(**options))  # pyright: ignore[reportArgumentType]


def plain_output(prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """The tokens of a request, from the definition of the fake devices alone."""
    tokens: list[int] = []
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (CONFIG.eos_token_id,))}
    while len(tokens) < params.max_tokens:
        token = plain_token([*prompt, *tokens], params.seed, CONFIG.vocab_size)
        if token in stops:
            return tokens, "stop"
        tokens.append(token)
    return tokens, "length"


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Request]:
    submitted = [engine.submit(prompt, params) for prompt, params in requests]
    while engine.has_work:
        engine.step()
    return submitted


def assert_plain(request: Request) -> None:
    expected = plain_output(request.prompt.tolist(), request.params)
    assert (request.token_ids, request.finish_reason) == expected


def assert_all_given_back(engine: Engine) -> None:
    """Nobody owns a slot, and only the prefix cache owns pages, each once."""
    places = engine.scheduler.places
    assert not places.running and (places.page_table == -1).all()
    for pool, cache in zip(places.pools, places.caches, strict=True):
        cache.drop()
        assert pool.num_free == pool.num_pages


@dataclass(frozen=True)
class Case:
    """A prompt of whole blocks and a rest, so that prompts share prefixes; when it comes, when it goes."""

    blocks: tuple[int, ...]
    rest: int
    max_tokens: int
    arrival: int
    abort_after: int | None
    has_penalty: bool
    seed: int

    @property
    def prompt(self) -> list[int]:
        return [token for block in self.blocks for token in BLOCKS[block]] + BLOCKS[self.seed % 3][
            : self.rest
        ]

    @property
    def params(self) -> SamplingParams:
        penalty = 0.5 if self.has_penalty else 0.0
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed, presence_penalty=penalty)


CASES = st.builds(
    Case,
    blocks=st.sampled_from([(), (0,), (1,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 0)]),
    rest=st.sampled_from([1, 2, 7, 8, 17, 127]),
    max_tokens=st.sampled_from([0, 1, 2, 9, 130]),
    arrival=st.integers(0, 30),
    abort_after=st.sampled_from([None, None, None, 0, 3, 20]),
    has_penalty=st.booleans(),
    seed=st.integers(0, 5),
)
OPTIONS = st.fixed_dictionaries(
    {
        "num_slots": st.sampled_from([1, 8]),
        "num_pages": st.sampled_from([None, 8, 10]),
        "max_chunk": st.sampled_from([None, 5, 100]),
        "token_budget": st.sampled_from([None, 16, 50]),
        "max_rows": st.sampled_from([64, 256]),
        "overlap": st.sampled_from([0, 1]),
        "prefix_cache": st.booleans(),
        "num_snapshots": st.sampled_from([None, 1, 3]),
        "prefill": st.sampled_from(["exact", "bounded"]),
        "drafts": st.sampled_from(["off", "fixed"]),
        "max_drafts": st.sampled_from([None, 1, 3]),
    }
)


@settings(max_examples=200)
@given(
    cases=st.lists(CASES, min_size=1, max_size=14), options=OPTIONS, fails_at=st.sampled_from([None, None, 9])
)
def test_every_request_gets_the_tokens_of_its_own_sequence(
    cases: list[Case], options: dict[str, Any], fails_at: int | None
) -> None:
    engine = engine_of(**options)
    submitted: dict[int, Request] = {}
    number, age = 0, dict.fromkeys(range(len(cases)), 0)
    while number <= 30 or engine.has_work:
        for index, case in enumerate(cases):
            if case.arrival == number:
                submitted[index] = engine.submit(case.prompt, case.params)
        if number == fails_at:
            fail_once(engine)
        engine.step()
        for index, request in submitted.items():
            age[index] += 1
            if age[index] == cases[index].abort_after:
                engine.abort(request, "aborted")
        number += 1
        assert number < 20000
    for request in submitted.values():
        if request.finish_reason == "aborted":
            expected, _ = plain_output(request.prompt.tolist(), request.params)
            assert request.token_ids == expected[: len(request.token_ids)]
        else:
            assert_plain(request)
    assert_all_given_back(engine)


def fail_once(engine: Engine) -> None:
    """Let a step fail on the way; all goes on from what the host knows."""
    real = engine.runner.run

    def fail(plan: Any) -> NoReturn:
        engine.runner.run = real
        raise RuntimeError("the device is gone")

    engine.runner.run = fail
    # Where steps overlap, a later one finds out.
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            assert not engine.scheduler.places.running
            break
    engine.runner.run = real


@pytest.mark.parametrize("drafts", ["off", "fixed"])
def test_the_latest_request_gives_way_and_comes_back(drafts: str) -> None:
    engine = engine_of(num_pages=8, prefix_cache=False, drafts=drafts)
    requests = run(
        engine, [(BLOCKS[0][:100], SamplingParams(max_tokens=500, seed=i, ignore_eos=True)) for i in range(3)]
    )
    assert engine.stats.preemptions > 0
    assert [request.num_preemptions > 0 for request in requests] == [False, True, True]
    for request in requests:
        assert_plain(request)


@pytest.mark.parametrize("overlap", [0, 1])
def test_running_sequences_and_prompts_share_a_step(overlap: int) -> None:
    engine = engine_of(overlap=overlap, token_budget=50)
    first = engine.submit(BLOCKS[0][:20], SamplingParams(max_tokens=60, seed=SEED, ignore_eos=True))
    while not first.token_ids:
        engine.step()
    second = engine.submit([*BLOCKS[1], *BLOCKS[2]], SamplingParams(max_tokens=2, seed=SEED))
    before, steps = len(first.token_ids), 0
    while not second.token_ids:
        engine.step()
        steps += 1
    # 50 rows less the running one, in whole blocks: chunks of 48, of which one ends at a page.
    assert steps - overlap == -(-128 // 48) * 2
    assert len(first.token_ids) - before == steps


@pytest.mark.parametrize("drafts", ["off", "fixed"])
def test_bc14_windows_are_recycled_and_two_sequences_fill_the_pool(drafts: str) -> None:
    """Two sequences of 200 tokens fit exactly into the pages that the sizes promise, window 8."""
    engine = engine_of(num_pages=4, max_context=256, drafts=drafts)
    assert CONFIG.sliding_window == 8
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    requests = run(engine, [(BLOCKS[i][:56], replace(params, seed=i)) for i in range(2)])
    assert [len(request.token_ids) for request in requests] == [200, 200]
    assert engine.stats.preemptions == 0
    for request in requests:
        assert_plain(request)


@pytest.mark.parametrize("drafts", ["off", "fixed"])
@pytest.mark.parametrize("length", [128, 130, 256, 300])
def test_bc12_the_same_prompt_twice_hits_and_answers_the_same(length: int, drafts: str) -> None:
    engine = engine_of(drafts=drafts)
    prompt, params = (BLOCKS[0] + BLOCKS[1] + BLOCKS[2])[:length], SamplingParams(max_tokens=5, seed=SEED)
    first, second = (run(engine, [(prompt, params)])[0] for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.num_cached == (length - 1) // 128 * 128
    assert engine.stats.prefix.hits == (length > 128)
    assert engine.stats.prompt_tokens == 2 * length


def test_samples_of_one_prompt_wait_for_its_prefix() -> None:
    engine = engine_of()
    prompt = BLOCKS[0] + BLOCKS[1] + [5]
    requests = run(engine, [(prompt, SamplingParams(max_tokens=3, seed=seed)) for seed in range(6)])
    assert [request.num_cached for request in requests] == [0, *[256] * 5]
    assert engine.stats.encoder_rows < 257 + 6 * 4
    for request in requests:
        assert_plain(request)


def test_where_prompts_part_a_window_is_kept_for_the_third() -> None:
    engine = engine_of()
    prompts = [BLOCKS[0] + BLOCKS[i] + [4, 5] for i in (1, 2, 0)]
    cached = [run(engine, [(prompt, SamplingParams(max_tokens=1))])[0].num_cached for prompt in prompts]
    # The first leaves its window at 256 only; the second finds the page but no window there.
    assert cached == [0, 0, 128]
    assert engine.stats.prefix.misses == {"new": 1, "no_snapshot": 1}


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("drafts", ["off", "fixed"])
def test_an_answer_is_a_prefix_of_the_next_turn(drafts: str, overlap: int) -> None:
    """Also where no step of several tokens ends at the boundary."""
    engine = engine_of(drafts=drafts, overlap=overlap)
    for length in range(100, 112):
        prompt = BLOCKS[length % 3][:length]
        params = SamplingParams(max_tokens=180, seed=length, ignore_eos=True)
        first = run(engine, [(prompt, params)])[0]
        turn = [*first.prompt.tolist(), *first.token_ids, 9]
        second = run(engine, [(turn, SamplingParams(max_tokens=4))])[0]
        assert second.num_cached == 256
        assert_plain(second)


def test_a_request_that_no_slot_can_hold_is_refused_with_the_number() -> None:
    engine = engine_of(max_context=256)
    with pytest.raises(
        RequestError, match=r"prompt 3: got 250 prompt tokens \+ max_tokens 7 = 257, expected at mo"
    ):
        engine.submit([5] * 250, SamplingParams(max_tokens=7), "prompt 3")
    few = engine_of(num_pages=1)
    with pytest.raises(RequestError, match="expected at most 128"):
        few.submit([5] * 120, SamplingParams(max_tokens=9))


def test_several_outputs_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"prompt: n: got 2, expected 1"):
        engine_of().submit([5], SamplingParams(n=2))


@pytest.mark.parametrize("drafts", ["off", "fixed"])
def test_plans_are_a_function_of_the_queue(drafts: str) -> None:
    """Two engines that get the same requests plan the same steps, to the last number."""

    def plans() -> list[str]:
        engine, seen = engine_of(num_pages=8, max_chunk=33, drafts=drafts), []
        engine.on_dispatch = lambda _, outputs: seen.append(repr(outputs))
        run(engine, [(BLOCKS[i % 3][: 40 + i], SamplingParams(max_tokens=90, seed=i)) for i in range(9)])
        return seen

    assert plans() == plans()
