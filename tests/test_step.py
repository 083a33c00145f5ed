"""The jitted steps: one trace per shape, donated state, slots that are left alone or given away.

Separate because these are promises of the device side, whatever the host does with it.
Read next: `engine/test_generate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.config import CacheConfig
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.plans import Admission, PrefillPlan, PromptSpan, prefill_plans
from deepinfer_jax.sampling.state import LENGTH, RUNNING, STOPPED
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.slot_parameters import slot_parameters
from deepinfer_jax.step import (
    EngineState,
    StepOutput,
    admit_step,
    decode_step,
    encode_step,
    initial_state,
    page_step,
    prefill_step,
)
from deepinfer_jax.testing.presets import SMALLEST, random_weights

SLOTS = 2
SIZES = CacheConfig(SLOTS, pages_per_slot=4, num_pages=12, page_tokens=16)
STATIC: dict[str, Any] = {"config": SMALLEST, "numerics": FLOAT32}
IS_FORBIDDEN = np.arange(SMALLEST.vocab_size) == SMALLEST.image_token_id
STEPS = {"prefill": prefill_step, "decode": decode_step, "encode": encode_step}

TOKENS = np.random.default_rng(5).integers(3, 120, 64).tolist()
POISON = 124
"""A token that no prompt holds unless a test puts it there."""

PENALIZED = SamplingParams(
    max_tokens=30,
    seed=3,
    repetition_penalty=1.5,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    ignore_eos=True,
)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


class Request(NamedTuple):
    """A prompt, how its tokens are chosen, and the pages that it gets."""

    prompt: list[int]
    params: SamplingParams = GREEDY
    pages: tuple[int, ...] = ()
    decoder_start: int = 0


FIRST = Request(TOKENS[:5], PENALIZED, (5, 2, 7))
SECOND = Request(TOKENS[10:30], GREEDY, (9, 4, 0))
THIRD = Request(TOKENS[40:57], replace(PENALIZED, seed=8), (5, 2, 7))


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(SMALLEST, jax.random.key(1))


def fresh_state(sizes: CacheConfig = SIZES) -> EngineState:
    return initial_state(jnp.asarray(IS_FORBIDDEN), sizes=sizes, **STATIC)


def page_table(pages: dict[int, tuple[int, ...]]) -> np.ndarray:
    table = np.full((SLOTS, SIZES.pages_per_slot), NOTHING, np.int32)
    for slot, own in pages.items():
        table[slot, : len(own)] = own
    return table


def admission(requests: dict[int, Request], pages: dict[int, tuple[int, ...]] | None = None) -> Admission:
    """Requests that start from nothing; the pages are those of every slot, theirs alone by default."""
    own = {slot: request.pages for slot, request in requests.items()}
    prompts, starts = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
    for slot, request in requests.items():
        prompts[slot], starts[slot] = len(request.prompt), request.decoder_start
    params = [requests[slot].params if slot in requests else None for slot in range(SLOTS)]
    return Admission(
        is_admitted=np.array([slot in requests for slot in range(SLOTS)]),
        page_table=page_table(own if pages is None else pages),
        decoder_starts=starts,
        lengths=np.zeros(SLOTS, np.int32),
        tokens=np.zeros(SLOTS, np.int32),
        is_running=np.zeros(SLOTS, bool),
        prompt_lengths=prompts,
        num_generated=np.zeros(SLOTS, np.int32),
        parameters=slot_parameters(params, SMALLEST.eos_token_id),
    )


def plans_of(spans: dict[int, PromptSpan]) -> list[PrefillPlan]:
    return prefill_plans(list(spans.values()), SLOTS)


def span(slot: int, prompt: list[int], start: int = 0, stop: int | None = None) -> PromptSpan:
    return PromptSpan(slot, np.asarray(prompt, np.int32), start, len(prompt) if stop is None else stop)


@dataclass
class Engine:
    """Two slots; every call is one kind of step, and `tokens` are those of each slot so far."""

    weights: Weights
    state: EngineState = field(default_factory=fresh_state)
    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    pages: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def admit(self, requests: dict[int, Request]) -> None:
        self.pages |= {slot: request.pages for slot, request in requests.items()}
        self.state = admit_step(self.state, admission(requests, self.pages))
        for slot in requests:
            self.tokens[slot] = []

    def give_pages(self, pages: dict[int, tuple[int, ...]]) -> None:
        """Give some slots other pages."""
        self.pages |= pages
        self.state = page_step(self.state, page_table(self.pages))

    def prefill(self, spans: dict[int, PromptSpan]) -> None:
        for plan in plans_of(spans):
            self.state, output = prefill_step(self.weights, self.state, plan, **STATIC)
            self.read(output)

    def encode(self, spans: dict[int, PromptSpan]) -> None:
        for plan in plans_of(spans):
            self.state = encode_step(self.weights, self.state, plan, **STATIC)

    def decode(self, is_active: tuple[bool, bool] = (True, True)) -> StepOutput:
        arguments = self.weights, self.state, jnp.asarray(is_active)
        self.state, output = decode_step(*arguments, **STATIC)
        self.read(output)
        return output

    def start(self, requests: dict[int, Request]) -> None:
        """Admit requests and run their prompts."""
        self.admit(requests)
        self.prefill({slot: span(slot, request.prompt) for slot, request in requests.items()})

    def read(self, output: StepOutput) -> None:
        for slot in np.flatnonzero(output.num_tokens):
            self.tokens[slot].append(int(output.tokens[slot, 0]))


def of_slot(state: EngineState, slot: int, pages: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Everything that belongs to a slot, bit for bit, by its name in the state."""
    by_place = {
        **{"window": 1, "pending_kv": 1, "pending_score": 1},
        **{"engram_ids": 0, "page_table": 0, "decoder_starts": 0},
    }
    found = {
        name: np.take(np.asarray(getattr(state.cache, name)), slot, axis) for name, axis in by_place.items()
    }
    for ratio, stored in state.cache.compressed.items():
        found[f"kv_{ratio}"] = np.asarray(stored.kv)[:, list(pages)]
        found[f"index_keys_{ratio}"] = np.asarray(stored.index_keys)[:, list(pages)]
    sampler = vars(state.sampler)
    own = {"lengths": state.lengths, "tokens": state.tokens, "is_running": state.is_running}
    return found | {name: np.asarray(array)[slot] for name, array in (sampler | own).items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def num_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def step_arguments(name: str, weights: Weights, state: EngineState) -> tuple[Any, ...]:
    plan = plans_of({0: span(0, FIRST.prompt)})[0]
    return weights, state, jnp.ones(SLOTS, bool) if name == "decode" else plan


def test_one_trace_per_shape_whatever_the_requests(weights: Weights) -> None:
    def run(first: Request, second: Request) -> None:
        engine = Engine(weights)
        engine.start({0: first, 1: second})
        engine.decode((True, False))
        engine.decode()
        engine.admit({1: first})
        engine.encode({1: span(1, first.prompt, 0, 2)})
        engine.prefill({1: span(1, first.prompt, 2)})
        engine.give_pages({0: second.pages})
        engine.decode()

    def counts() -> list[int]:
        return [step._cache_size() for step in (initial_state, admit_step, page_step, *STEPS.values())]

    run(FIRST, SECOND)
    before = counts()
    every = SamplingParams(
        **{"max_tokens": 7, "temperature": 0.3, "top_p": 0.5, "seed": 2**63, "min_tokens": 2, "top_k": 9},
        **{"min_p": 0.1, "repetition_penalty": 2.0, "presence_penalty": -1.0, "frequency_penalty": 0.5},
        **{"logit_bias": {3: 1.5, 9: -4.0}, "bad_token_ids": (4, 5), "stop_token_ids": (6, 7)},
        **{"ignore_eos": True, "logprobs": 0},
    )
    for params in (every, SamplingParams(), SamplingParams(max_tokens=0, temperature=1e-7, top_k=-1)):
        run(Request(TOKENS[:1] * 3, params, (1,)), Request(TOKENS[:40], params, (2, 3, 11), decoder_start=4))
    assert counts() == before
    # The count sees a new shape.
    fresh_state(replace(SIZES, num_pages=13))
    assert counts() == [before[0] + 1, *before[1:]]


@pytest.mark.parametrize("name", STEPS)
def test_the_whole_state_is_updated_in_place(weights: Weights, name: str) -> None:
    """The bytes that outputs share with inputs are the cache's and those of the rest of the state."""
    state = fresh_state()
    lowered = STEPS[name].lower(*step_arguments(name, weights, state), **STATIC)
    memory = lowered.compile().memory_analysis()
    cache_bytes = num_bytes(state.cache)
    assert memory.alias_size_in_bytes >= cache_bytes > 0
    assert memory.alias_size_in_bytes - num_bytes(state.replace(cache=None)) == cache_bytes


def test_admission_updates_the_whole_state_in_place() -> None:
    state = fresh_state()
    memory = admit_step.lower(state, admission({0: FIRST})).compile().memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes(state)


def test_new_pages_update_the_whole_state_in_place() -> None:
    state = fresh_state()
    memory = page_step.lower(state, page_table({0: FIRST.pages})).compile().memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes(state)


def test_temporaries_do_not_grow_with_pages(weights: Weights) -> None:
    """Aliased is not yet in place: a copy of the pages on the way would show here."""
    found = []
    for num_pages in (SIZES.num_pages, 100 * SIZES.num_pages):
        state = fresh_state(replace(SIZES, num_pages=num_pages))
        lowered = decode_step.lower(*step_arguments("decode", weights, state), **STATIC)
        found.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert found[1] == found[0]


@pytest.mark.parametrize("row_tile", [1, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STEPS)
def test_temporaries_do_not_grow_with_rings(weights: Weights, name: str, row_tile: int) -> None:
    """One tile of rows or a loop over several: what is read before it is written is not copied."""
    found = []
    for slack in (10, 1000):
        state = fresh_state(replace(SIZES, window_slack=slack))
        static = {**STATIC, "numerics": replace(FLOAT32, row_tile=row_tile)}
        lowered = STEPS[name].lower(*step_arguments(name, weights, state), **static)
        found.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert found[1] == found[0]


def test_steps_consume_the_state(weights: Weights) -> None:
    engine = Engine(weights)
    given = [engine.state]
    for act in (
        partial(engine.admit, {0: FIRST, 1: SECOND}),
        partial(engine.encode, {0: span(0, FIRST.prompt, 0, 2)}),
        partial(engine.prefill, {0: span(0, FIRST.prompt, 2), 1: span(1, SECOND.prompt)}),
        partial(engine.give_pages, {0: (*FIRST.pages, 6)}),
        engine.decode,
    ):
        act()
        given.append(engine.state)
    *consumed, last = given
    for state in consumed:
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        with pytest.raises(RuntimeError, match=r"deleted"):
            np.asarray(state.cache.window)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((last, weights)))


def test_a_new_state_holds_nothing() -> None:
    state = fresh_state()
    assert not state.is_running.any() and not state.lengths.any()
    assert (np.asarray(state.cache.page_table) == NOTHING).all()
    np.testing.assert_array_equal(state.is_forbidden, IS_FORBIDDEN)


@pytest.fixture
def engine(weights: Weights) -> Engine:
    """Both slots at work, each with its first token."""
    engine = Engine(weights)
    engine.start({0: FIRST, 1: SECOND})
    return engine


def test_slots_that_wait_do_not_change(engine: Engine) -> None:
    before = of_slot(engine.state, 1, SECOND.pages)
    for _ in range(3):
        output = engine.decode((True, False))
        assert output.num_tokens.tolist() == [1, 0]
    assert engine.state.lengths.tolist() == [8, 20]
    assert [len(tokens) for tokens in engine.tokens] == [4, 1]
    assert_same(of_slot(engine.state, 1, SECOND.pages), before)


def test_a_slot_that_waited_goes_on_as_if_it_had_not(weights: Weights, engine: Engine) -> None:
    for _ in range(4):
        engine.decode()
    waited = Engine(weights)
    waited.start({0: FIRST, 1: SECOND})
    for is_active in [(True, False)] * 3 + [(False, True)] * 4 + [(True, False)]:
        waited.decode(is_active)
    assert waited.tokens == engine.tokens
    for slot, request in enumerate((FIRST, SECOND)):
        assert_same(*(of_slot(one.state, slot, request.pages) for one in (waited, engine)))


def test_slots_without_a_request_do_nothing(weights: Weights) -> None:
    engine = Engine(weights)
    empty = of_slot(engine.state, 1, SECOND.pages)
    engine.start({0: FIRST})
    for _ in range(3):
        assert engine.decode().num_tokens.tolist() == [1, 0]
    assert_same(of_slot(engine.state, 1, SECOND.pages), empty)


def test_tokens_come_only_where_a_prompt_ends(weights: Weights) -> None:
    engine, alone = Engine(weights), Engine(weights)
    engine.admit({0: SECOND, 1: FIRST})
    engine.prefill({0: span(0, SECOND.prompt, 0, 18), 1: span(1, FIRST.prompt)})
    assert engine.state.lengths.tolist() == [18, 5]
    assert engine.state.is_running.tolist() == [False, True]
    alone.start({1: FIRST})
    assert engine.tokens == alone.tokens
    assert [len(tokens) for tokens in engine.tokens] == [0, 1]
    # Without a token to continue from, decoding leaves the slot alone.
    before = of_slot(engine.state, 0, SECOND.pages)
    assert engine.decode().num_tokens.tolist() == [0, 1]
    assert_same(of_slot(engine.state, 0, SECOND.pages), before)
    engine.prefill({0: span(0, SECOND.prompt, 18)})
    straight = Engine(weights)
    straight.start({0: SECOND})
    assert engine.tokens[0] == straight.tokens[0]


def finishing(engine: Engine, how: str) -> tuple[SamplingParams, int]:
    """Parameters that end the engine's first request at its third token, and the finish that is due."""
    for _ in range(2):
        engine.decode()
    third = engine.tokens[0][2]
    assert third not in engine.tokens[0][:2]
    if how == "stopped":
        return replace(PENALIZED, stop_token_ids=(third,)), STOPPED
    return replace(PENALIZED, max_tokens=3), LENGTH


@pytest.mark.parametrize("how", ["length", "stopped"])
def test_a_finished_slot_stays_finished(weights: Weights, engine: Engine, how: str) -> None:
    params, expected = finishing(engine, how)
    ended = Engine(weights)
    ended.start({0: FIRST._replace(params=params), 1: SECOND})
    finishes = [ended.decode().finish.tolist() for _ in range(2)]
    assert finishes == [[RUNNING, RUNNING], [expected, RUNNING]]
    assert ended.state.is_running.tolist() == [False, True]
    before = of_slot(ended.state, 0, FIRST.pages)
    for _ in range(3):
        engine.decode()
        output = ended.decode()
        assert output.num_tokens.tolist() == [0, 1]
        assert output.finish.tolist() == [RUNNING, RUNNING]
    assert_same(of_slot(ended.state, 0, FIRST.pages), before)
    # Its last token was sampled, so that it is not in the cache.
    assert int(ended.state.lengths[0]) == len(FIRST.prompt) + 2
    assert ended.tokens == [engine.tokens[0][:3], engine.tokens[1]]


def test_a_first_token_can_be_the_last(weights: Weights) -> None:
    engine = Engine(weights)
    engine.start({0: FIRST._replace(params=replace(PENALIZED, max_tokens=1)), 1: SECOND})
    assert engine.state.is_running.tolist() == [False, True]
    assert engine.decode().num_tokens.tolist() == [0, 1]


def test_an_invalid_slot_stops_and_leaves_its_neighbour(weights: Weights, engine: Engine) -> None:
    poisoned = Engine(weights.replace(embed=weights.embed.at[POISON].set(jnp.nan)))
    poisoned.admit({0: FIRST, 1: SECOND})
    plan = plans_of({0: span(0, [*FIRST.prompt[:4], POISON]), 1: span(1, SECOND.prompt)})[0]
    poisoned.state, output = prefill_step(poisoned.weights, poisoned.state, plan, **STATIC)
    poisoned.read(output)
    assert output.is_invalid.tolist() == [True, False]
    assert poisoned.state.is_running.tolist() == [False, True]
    for _ in range(3):
        engine.decode()
        output = poisoned.decode()
        assert (output.num_tokens.tolist(), output.is_invalid.tolist()) == ([0, 1], [False, False])
    assert poisoned.tokens[1] == engine.tokens[1]
    assert_same(*(of_slot(one.state, 1, SECOND.pages) for one in (poisoned, engine)))


@pytest.mark.parametrize("pages", [FIRST.pages, (3, 11, 8)], ids=["same_pages", "other_pages"])
def test_a_new_request_takes_a_slot_over(weights: Weights, engine: Engine, pages: tuple[int, ...]) -> None:
    """The neighbour does not notice, and of the old request nothing is left that the new one could see."""
    new = THIRD._replace(pages=pages)
    undisturbed, fresh = Engine(weights), Engine(weights)
    undisturbed.start({0: FIRST, 1: SECOND})
    fresh.start({0: new})
    for one in (engine, undisturbed):
        for _ in range(4):
            one.decode()
    neighbour = of_slot(engine.state, 1, SECOND.pages)
    engine.admit({0: new})
    assert_same(of_slot(engine.state, 1, SECOND.pages), neighbour)
    sampler = engine.state.sampler
    assert not sampler.counts[0].any() and not sampler.in_prompt[0].any()
    assert engine.state.lengths.tolist() == [0, 24]
    assert engine.state.is_running.tolist() == [False, True]
    assert engine.state.cache.page_table[0].tolist() == [*pages, NOTHING]
    engine.prefill({0: span(0, new.prompt)})
    for _ in range(5):
        for one in (engine, undisturbed, fresh):
            one.decode()
    assert engine.tokens[0] == fresh.tokens[0]
    assert engine.tokens[1] == undisturbed.tokens[1]
    assert_same(*(of_slot(one.state, 1, SECOND.pages) for one in (engine, undisturbed)))
    assert_same(*(vars_of_sampler(one.state, 0) for one in (engine, fresh)))


def vars_of_sampler(state: EngineState, slot: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(array)[slot] for name, array in vars(state.sampler).items()}


def test_encoding_counts_a_prompt_and_samples_nothing(weights: Weights, engine: Engine) -> None:
    """What only the encoder half saw still counts: for lengths, and for the repetition penalty."""
    bounded = Request(TOKENS[10:30], PENALIZED, SECOND.pages, decoder_start=12)
    neighbour = of_slot(engine.state, 0, FIRST.pages)
    engine.admit({1: bounded})
    engine.encode({1: span(1, bounded.prompt, 0, 12)})
    assert engine.state.lengths.tolist() == [5, 12]
    assert engine.state.is_running.tolist() == [True, False]
    assert set(np.flatnonzero(engine.state.sampler.in_prompt[1]).tolist()) == set(bounded.prompt[:12])
    engine.prefill({1: span(1, bounded.prompt, 12)})
    assert engine.state.lengths.tolist() == [5, 20]
    assert engine.state.is_running.tolist() == [True, True]
    assert set(np.flatnonzero(engine.state.sampler.in_prompt[1]).tolist()) == set(bounded.prompt)
    assert engine.state.cache.decoder_starts.tolist() == [0, 12]
    assert_same(of_slot(engine.state, 0, FIRST.pages), neighbour)


def test_new_pages_change_nothing_else(engine: Engine) -> None:
    pages = {0: (*FIRST.pages, 6), 1: SECOND.pages}
    before = [of_slot(engine.state, slot, pages[slot]) for slot in range(SLOTS)]
    engine.give_pages(pages)
    for slot in range(SLOTS):
        found = of_slot(engine.state, slot, pages[slot])
        assert found["page_table"].tolist() == page_table(pages)[slot].tolist()
        assert_same(found, before[slot] | {"page_table": found["page_table"]})


def test_a_sequence_may_get_its_pages_as_it_grows(weights: Weights, engine: Engine) -> None:
    """A page that comes before its first position is soon enough."""
    growing, (first, second, third) = Engine(weights), FIRST.pages
    growing.start({0: FIRST._replace(pages=(first,)), 1: SECOND})
    for _ in range(30):
        if int(growing.state.lengths[0]) in (16, 32):
            growing.give_pages({0: (first, second) if growing.pages[0] == (first,) else FIRST.pages})
        growing.decode((True, False))
        engine.decode((True, False))
    assert growing.pages[0] == (first, second, third)
    assert growing.tokens == engine.tokens
    assert_same(*(of_slot(one.state, 0, FIRST.pages) for one in (growing, engine)))


def test_an_output_that_is_computed_again_goes_on_the_same(weights: Weights, engine: Engine) -> None:
    """Rows after the prompt count as output: for the penalties, and for the length."""
    for _ in range(6):
        engine.decode((True, False))
    again = Engine(weights)
    again.admit({0: FIRST})
    known = [*FIRST.prompt, *engine.tokens[0][:4]]
    again.prefill({0: span(0, known, 0, 7)})
    again.prefill({0: span(0, known, 7)})
    assert int(again.state.sampler.num_generated[0]) == 5
    for _ in range(2):
        again.decode((True, False))
    assert again.tokens[0] == engine.tokens[0][4:]
    assert_same(*(of_slot(one.state, 0, FIRST.pages) for one in (again, engine)))


def test_a_sequence_goes_on_from_what_its_slot_holds(weights: Weights, engine: Engine) -> None:
    undisturbed = Engine(weights)
    undisturbed.start({0: FIRST, 1: SECOND})
    for one in (engine, undisturbed):
        for _ in range(3):
            one.decode()
    there = admission({1: SECOND}, engine.pages)
    there.lengths[1], there.tokens[1], there.is_running[1] = 23, engine.tokens[1][-1], True
    there.num_generated[1] = len(engine.tokens[1])
    engine.state = admit_step(engine.state, there)
    assert engine.state.lengths.tolist() == [8, 23]
    assert engine.state.is_running.tolist() == [True, True]
    for one in (engine, undisturbed):
        for _ in range(3):
            one.decode()
    assert engine.tokens == undisturbed.tokens
    found, expected = (of_slot(one.state, 1, SECOND.pages) for one in (engine, undisturbed))
    # What it had generated before is noted apart from this.
    assert found.pop("counts").sum() == 3 and expected.pop("counts").sum() == 7
    assert not found.pop("in_prompt").any() and expected.pop("in_prompt").any()
    assert_same(found, expected)
