"""The two jitted steps: one trace per shape, donated state, slots that are left alone.

Separate because these are promises of the device side, whatever the host does with it.
Read next: `engine/test_generate.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine.generate import generate_ids
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.plans import PrefillPlan, SamplingParams, prefill_plans
from deepinfer_jax.sampling.randomness import seed_words
from deepinfer_jax.step import EngineState, decode_step, initial_state, prefill_step
from deepinfer_jax.testing.golden import live_state
from deepinfer_jax.testing.presets import SMALLEST, random_weights

SLOTS = 2
CAPACITY = 256
STATIC: dict[str, Any] = {"config": SMALLEST, "numerics": FLOAT32}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]


@pytest.fixture(scope="module")
def weights():
    return random_weights(SMALLEST, jax.random.key(1))


def fresh_state() -> EngineState:
    return initial_state(
        jnp.asarray(np.stack([seed_words(3), seed_words(4)])),
        jnp.zeros(SLOTS),
        jnp.ones(SLOTS),
        num_slots=SLOTS,
        capacity=CAPACITY,
        **STATIC,
    )


def device_plan(plan: PrefillPlan) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.asarray(plan.token_ids), jnp.asarray(plan.num_tokens), jnp.asarray(plan.is_last)


def prefill(weights, state: EngineState, prompts: list[list[int]]) -> tuple[EngineState, jax.Array]:
    tokens = jnp.zeros(SLOTS, jnp.int32)
    for plan in prefill_plans(prompts, SLOTS):
        state, tokens = prefill_step(weights, state, *device_plan(plan), **STATIC)
    return state, tokens


def decode(weights, state: EngineState, is_active: list[bool]) -> tuple[EngineState, jax.Array]:
    return decode_step(weights, state, jnp.asarray(is_active), **STATIC)


def test_one_trace_per_shape_whatever_the_requests(weights) -> None:
    def generate(prompts: list[list[int]], **params: Any) -> None:
        generate_ids(weights, SMALLEST, FLOAT32, prompts, SamplingParams(**params))

    generate(PROMPTS, max_tokens=2)
    before = prefill_step._cache_size(), decode_step._cache_size()
    generate([[1], [2]], max_tokens=9)
    generate([[3] * 16, [4]], max_tokens=1)
    generate([[5, 6], [7]], temperature=0.0, seed=2**63, top_p=0.5, max_tokens=3)
    generate([[8], [9] * 12], max_tokens=40, ignore_eos=True)
    assert (prefill_step._cache_size(), decode_step._cache_size()) == before
    # The count sees a new shape: a chunk of 64.
    generate([[3] * 17, [4]], max_tokens=1)
    assert (prefill_step._cache_size(), decode_step._cache_size()) == (before[0] + 1, before[1])


def cache_bytes(state: EngineState) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))


def test_steps_consume_the_state(weights) -> None:
    given = fresh_state()
    prefilled, _ = prefill(weights, given, PROMPTS)
    decoded, _ = decode(weights, prefilled, [True, True])
    for consumed in (given, prefilled):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(consumed.cache))
        with pytest.raises(RuntimeError, match=r"deleted"):
            np.asarray(consumed.cache.window)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((decoded, weights)))


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_cache_is_updated_in_place(weights, name: str, without_compilation_cache) -> None:
    state = fresh_state()
    if name == "prefill":
        lowered = prefill_step.lower(weights, state, *device_plan(prefill_plans(PROMPTS, SLOTS)[0]), **STATIC)
    else:
        lowered = decode_step.lower(weights, state, jnp.ones(SLOTS, bool), **STATIC)
    assert lowered.compile().memory_analysis().alias_size_in_bytes >= cache_bytes(state)


def test_idle_slots_do_not_change(weights) -> None:
    state, tokens = prefill(weights, fresh_state(), PROMPTS)
    before, idle_token = live_state(state.cache, SMALLEST, 1, 3), int(tokens[1])
    for _ in range(3):
        state, tokens = decode(weights, state, [True, False])
    assert state.lengths.tolist() == [8, 3]
    assert int(tokens[1]) == idle_token
    jax.tree.map(np.testing.assert_array_equal, live_state(state.cache, SMALLEST, 1, 3), before)


def test_an_idle_slot_goes_on_as_if_never_idle(weights) -> None:
    found = {}
    for name, waits in (("waited", 3), ("straight", 0)):
        state, tokens = prefill(weights, fresh_state(), PROMPTS)
        for _ in range(waits):
            state, tokens = decode(weights, state, [True, False])
        found[name] = [int(tokens[1])]
        for _ in range(4):
            state, tokens = decode(weights, state, [False, True])
            found[name].append(int(tokens[1]))
    assert found["waited"] == found["straight"]


def test_tokens_come_only_where_a_prompt_ends(weights) -> None:
    first = prefill_plans([[5] * 17, [11, 12, 13]], SLOTS)[0]
    plan = PrefillPlan(first.token_ids[:, :16], np.minimum(first.num_tokens, 16), np.array([False, True]))
    state, tokens = prefill_step(weights, fresh_state(), *device_plan(plan), **STATIC)
    alone, expected = prefill(weights, fresh_state(), [[], [11, 12, 13]])
    assert tokens.tolist() == [0, int(expected[1])]
    assert state.lengths.tolist() == [16, 3]
    assert alone.lengths.tolist() == [0, 3]
