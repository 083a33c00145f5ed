"""What a slot remembers: admission, prompt tokens, counts, and when its output ends.

Separate because these change at other moments than a token is chosen.
Read next: `test_sample.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import MASKED_SCORE, NOTHING
from deepinfer_jax.sampling.state import (
    LENGTH,
    RUNNING,
    STOPPED,
    SamplerState,
    admit_parameters,
    empty_sampler,
    finish_reasons,
    record_prompt,
    record_token,
)
from deepinfer_jax.sampling_params import SamplingParams, SlotParameters, slot_parameters
from deepinfer_jax.testing.samplers import Row, sampler_of

VOCAB = 16
EOS = 1

record = jax.jit(record_token)
reasons = jax.jit(finish_reasons)


def tokens_of(*tokens: int) -> jax.Array:
    return jnp.asarray(tokens, jnp.int32)


def everywhere(count: int) -> jax.Array:
    return jnp.ones(count, bool)


def test_the_state_holds_every_parameter_of_a_slot() -> None:
    sampler = empty_sampler(3, VOCAB)
    for name, expected in slot_parameters([None] * 3, EOS)._asdict().items():
        found = np.asarray(getattr(sampler, name))
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert {*SlotParameters._fields, "num_generated", "counts", "in_prompt"} == set(vars(sampler))
    assert (np.asarray(sampler.bias_ids) == NOTHING).all()
    assert (np.asarray(sampler.stop_ids) == NOTHING).all()


def test_admission_replaces_its_slots_and_no_other() -> None:
    old = SamplingParams(temperature=0.5, seed=2**64 - 1, bad_token_ids=(3,), min_tokens=1)
    sampler = sampler_of([Row(old, (4, 5), (6, 6))] * 3, VOCAB, EOS)
    new = SamplingParams(top_k=7, logit_bias={2: 1.5}, stop_token_ids=(9,), max_tokens=5)
    admitted = admit_parameters(
        sampler, jnp.array([False, True, False]), slot_parameters([None, new, None], EOS)
    )
    expected = sampler_of([Row(old, (4, 5), (6, 6)), Row(new, ()), Row(old, (4, 5), (6, 6))], VOCAB, EOS)
    jax.tree.map(np.testing.assert_array_equal, admitted, expected)
    assert np.asarray(admitted.num_generated).tolist() == [2, 0, 2]
    assert not np.asarray(admitted.counts)[1].any()


def test_parameters_arrive_in_their_arrays() -> None:
    one = SamplingParams(
        **{"max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "seed": 7 << 32 | 8, "min_tokens": 2},
        **{"top_k": -1, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1.0},
        **{"frequency_penalty": 0.75, "logit_bias": {5: 2.0, 3: -1.0}, "bad_token_ids": (5, 4)},
        stop_token_ids=(6, EOS),
    )
    sampler = sampler_of([Row(one, ())], VOCAB, EOS)
    found = {name: np.asarray(getattr(sampler, name))[0].tolist() for name in SlotParameters._fields}
    biases = dict(zip(found.pop("bias_ids"), found.pop("bias_values"), strict=True))
    assert biases == {3: -1.0, 5: MASKED_SCORE, 4: MASKED_SCORE, NOTHING: 0.0}
    assert sorted(set(found.pop("stop_ids"))) == [NOTHING, EOS, 6]
    assert found == {
        **{"seeds": [7, 8], "temperature": 0.5, "top_k": 0, "top_p": 0.25, "min_p": 0.125},
        **{"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.75},
        **{"min_tokens": 2, "max_tokens": 9},
    }


def test_prompt_rows_are_noted_where_valid() -> None:
    slots = tokens_of(0, 0, 2, 2, 1, 0)
    token_ids = tokens_of(3, 3, 15, 0, 7, 8)
    is_valid = jnp.array([True, True, True, True, False, False])
    sampler = jax.jit(record_prompt)(empty_sampler(3, VOCAB), slots, token_ids, is_valid)
    assert np.argwhere(np.asarray(sampler.in_prompt)).tolist() == [[0, 3], [2, 0], [2, 15]]
    again = record_prompt(sampler, slots, token_ids, jnp.zeros(6, bool))
    jax.tree.map(np.testing.assert_array_equal, again, sampler)


def test_generated_tokens_are_counted_where_sampled() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (20, 3)).astype(np.int32)
    is_sampled = random.random((20, 3)) < 0.7
    sampler = empty_sampler(3, VOCAB)
    for step in range(20):
        sampler = record(sampler, jnp.asarray(tokens[step]), jnp.asarray(is_sampled[step]))
    for slot in range(3):
        mine = tokens[is_sampled[:, slot], slot]
        np.testing.assert_array_equal(sampler.counts[slot], np.bincount(mine, minlength=VOCAB))
        assert int(sampler.num_generated[slot]) == len(mine)


def finished(sampler: SamplerState, *tokens: int) -> list[int]:
    recorded = record(sampler, tokens_of(*tokens), everywhere(len(tokens)))
    return np.asarray(reasons(recorded, tokens_of(*tokens), everywhere(len(tokens)))).tolist()


def test_an_output_ends_with_a_stop_token_or_at_max_tokens() -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=(9,))
    deaf = SamplingParams(max_tokens=3, ignore_eos=True)
    rows = [Row(params, (), (5,)), Row(deaf, (), (5,)), Row(params, (), (5, 5)), Row(deaf, (), (5, 5))]
    sampler = sampler_of(rows, VOCAB, EOS)
    assert finished(sampler, EOS, EOS, EOS, EOS) == [STOPPED, RUNNING, STOPPED, LENGTH]
    assert finished(sampler, 9, 9, 9, 9) == [STOPPED, RUNNING, STOPPED, LENGTH]
    assert finished(sampler, 2, 2, 2, 2) == [RUNNING, RUNNING, LENGTH, LENGTH]


def test_bc19_one_token_is_one_token() -> None:
    sampler = sampler_of([Row(SamplingParams(max_tokens=1)), Row(SamplingParams(max_tokens=2))], VOCAB, EOS)
    assert finished(sampler, 2, 2) == [LENGTH, RUNNING]


def test_a_slot_that_sampled_nothing_does_not_end() -> None:
    sampler = sampler_of([Row(SamplingParams(max_tokens=0))], VOCAB, EOS)
    assert np.asarray(reasons(sampler, tokens_of(EOS), jnp.zeros(1, bool))).tolist() == [RUNNING]


@pytest.mark.parametrize("token", [0, EOS, VOCAB - 1, NOTHING])
def test_an_empty_slot_has_no_stop_token(token: int) -> None:
    sampler = empty_sampler(1, VOCAB).replace(max_tokens=tokens_of(5))
    found = reasons(sampler, tokens_of(token), everywhere(1))
    # Unused places of the table hold NOTHING, which is no token.
    assert np.asarray(found).tolist() == [STOPPED if token == NOTHING else RUNNING]
