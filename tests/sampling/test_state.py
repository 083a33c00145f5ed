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
from deepinfer_jax.engine import reading
from deepinfer_jax.sampling.state import (
    LENGTH,
    RUNNING,
    STOPPED,
    SamplerState,
    admit_parameters,
    empty_sampler,
    finish_reasons,
    note_tokens,
    record_rows,
    record_token,
)
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.slot_parameters import SlotParameters, slot_parameters
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
    own = {"prompt_lengths", "num_generated", "counts", "in_prompt"}
    assert {*SlotParameters._fields, *own} == set(vars(sampler))
    assert not any(np.asarray(getattr(sampler, name)).any() for name in own)
    assert (np.asarray(sampler.bias_ids) == NOTHING).all()
    assert (np.asarray(sampler.stop_ids) == NOTHING).all()


def test_admission_replaces_its_slots_and_no_other() -> None:
    old = SamplingParams(temperature=0.5, seed=2**64 - 1, bad_token_ids=(3,), min_tokens=1)
    sampler = sampler_of([Row(old, (4, 5), (6, 6))] * 3, VOCAB, EOS)
    new = SamplingParams(top_k=7, logit_bias={2: 1.5}, stop_token_ids=(9,), max_tokens=5)
    parameters = slot_parameters([None, new, None], EOS)
    is_new = jnp.array([False, True, False])
    admitted = admit_parameters(sampler, is_new, parameters, tokens_of(9, 0, 9), tokens_of(9, 0, 9))
    expected = sampler_of([Row(old, (4, 5), (6, 6)), Row(new, ()), Row(old, (4, 5), (6, 6))], VOCAB, EOS)
    jax.tree.map(np.testing.assert_array_equal, admitted, expected)
    assert np.asarray(admitted.num_generated).tolist() == [2, 0, 2]
    assert not np.asarray(admitted.counts)[1].any()
    # A sequence that comes from elsewhere has its lengths at once, and its tokens by `note_tokens`.
    moved = admit_parameters(sampler, is_new, parameters, tokens_of(9, 7, 9), tokens_of(9, 4, 9))
    lengths = {"prompt_lengths": tokens_of(2, 7, 2), "num_generated": tokens_of(2, 4, 2)}
    jax.tree.map(np.testing.assert_array_equal, moved, expected.replace(**lengths))


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


def with_prompts(*lengths: int) -> SamplerState:
    return empty_sampler(len(lengths), VOCAB).replace(prompt_lengths=tokens_of(*lengths))


def test_prompt_rows_are_noted_where_valid() -> None:
    slots = tokens_of(0, 0, 2, 2, 1, 0)
    positions = tokens_of(0, 1, 5, 6, 0, 2)
    token_ids = tokens_of(3, 3, 15, 0, 7, 8)
    is_valid = jnp.array([True, True, True, True, False, False])
    empty = with_prompts(3, 3, 9)
    sampler = jax.jit(record_rows)(empty, slots, positions, token_ids, is_valid)
    assert np.argwhere(np.asarray(sampler.in_prompt)).tolist() == [[0, 3], [2, 0], [2, 15]]
    # Nothing but that changed.
    jax.tree.map(np.testing.assert_array_equal, sampler.replace(in_prompt=empty.in_prompt), empty)
    again = record_rows(sampler, slots, positions, token_ids, jnp.zeros(6, bool))
    jax.tree.map(np.testing.assert_array_equal, again, sampler)


SEQUENCES = ((2, (5, 6, 6, 7, 6, 5)), (3, (8, 8, 9)), (1, (4, 4, 4, 4)))
"""Length of the prompt and all tokens, of a slot each; the second has no output."""


def by_decoding() -> SamplerState:
    """The state after prompts were read as rows and outputs sampled one by one."""
    rows = [Row(SamplingParams(), ids[:length], ids[length:]) for length, ids in SEQUENCES]
    return sampler_of(rows, VOCAB, EOS)


def rows_of_sequences() -> list[jax.Array]:
    rows = [(slot, *place) for slot, (_, ids) in enumerate(SEQUENCES) for place in enumerate(ids)]
    return [jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True)]


def test_an_output_that_comes_as_rows_counts_as_if_it_were_sampled() -> None:
    started = with_prompts(*(length for length, _ in SEQUENCES))
    slots, positions, token_ids = rows_of_sequences()
    found = record_rows(started, slots, positions, token_ids, everywhere(len(slots)))
    expected = by_decoding()
    for name in ("prompt_lengths", "num_generated", "counts", "in_prompt"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert found.num_generated.tolist() == [4, 0, 3]


def test_noted_tokens_count_for_the_penalties_alone() -> None:
    generated = tokens_of(4, 0, 3)
    started = with_prompts(*(length for length, _ in SEQUENCES)).replace(num_generated=generated)
    slots, positions, token_ids = rows_of_sequences()
    # On other devices a slot's tokens are noted nowhere.
    is_valid = slots != 2
    found, expected = note_tokens(started, slots, positions, token_ids, is_valid), by_decoding()
    np.testing.assert_array_equal(found.num_generated, generated)
    for name in ("counts", "in_prompt"):
        array = np.asarray(getattr(found, name))
        np.testing.assert_array_equal(array[:2], np.asarray(getattr(expected, name))[:2])
        assert not array[2].any()


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


def test_the_host_reads_finish_reasons_as_the_devices_write_them() -> None:
    assert (reading.STOPPED, reading.LENGTH) == (STOPPED, LENGTH)


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
