"""All controls together: alone, in pairs and at random against the plain sampler, and bitwise by place.

Separate because here the order of the controls and the independence of rows are decided.
Read next: `deepinfer_jax/testing/samplers.py`, the plain sampler; `test_distributions.py`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.model.numerics import SAMPLING_TILE
from deepinfer_jax.sampling.logits import scale_by_temperature
from deepinfer_jax.sampling.randomness import SAMPLE_TOKEN, gumbel
from deepinfer_jax.sampling.sample import Sampled, control_logits, keep_filtered, sample
from deepinfer_jax.sampling.state import SamplerState
from deepinfer_jax.sampling_params import SamplingParams, stop_ids_of
from deepinfer_jax.testing.samplers import Row, plain_logprobs, plain_sample, sampler_of
from deepinfer_jax.testing.tolerances import assert_close

VOCAB = 32
EOS = 1
NUM_LOGPROBS = 3
FORBIDDEN = (30, 31)
IS_FORBIDDEN = np.isin(np.arange(VOCAB), FORBIDDEN)
CLEAR = 1e-5  # A decision nearer to its edge may fall either way in float32.

choose = jax.jit(sample, static_argnames=("num_logprobs", "tile"))
draw = jax.jit(gumbel, static_argnums=(2, 3))


@jax.jit
def allowed_tokens(logits: jax.Array, sampler: SamplerState, is_forbidden: jax.Array) -> jax.Array:
    """Which tokens could be drawn: bool [B, V]."""
    adjusted = control_logits(logits, sampler, is_forbidden)
    scores = scale_by_temperature(adjusted, sampler.temperature)
    return keep_filtered(scores, sampler) & (adjusted > -jnp.inf)


def choose_rows(
    logits: np.ndarray, rows: list[Row], positions: np.ndarray
) -> tuple[Sampled, np.ndarray, np.ndarray]:
    """Sample rows; also the tokens that could have been drawn and the noise that decided."""
    sampler = sampler_of(rows, logits.shape[1], EOS)
    arrays = (jnp.asarray(logits), sampler, jnp.asarray(positions, jnp.int32), jnp.asarray(IS_FORBIDDEN))
    sampled = choose(*arrays, num_logprobs=NUM_LOGPROBS, tile=None)
    allowed = allowed_tokens(arrays[0], sampler, arrays[3])
    return sampled, np.asarray(allowed), np.asarray(draw(sampler.seeds, arrays[2], SAMPLE_TOKEN, VOCAB))


CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.25},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "repetition": {"repetition_penalty": 2.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "bias": {"logit_bias": {3: 4.0, 7: -4.0, 31: 1000.0, 12: 2.5}},
    "bad": {"bad_token_ids": (3, 4, 12, 20, 21, 22)},
    "early": {"min_tokens": 6, "stop_token_ids": (2, 5, 8, 9, 12)},
    "seed": {"seed": 2**63 + 5},
}
PAIRS = [
    {**CONTROLS[one], **CONTROLS[other]}
    for one, other in itertools.combinations(CONTROLS, 2)
    if (one, other) != ("greedy", "temperature")
]
SETTINGS = [{}, *CONTROLS.values(), *PAIRS]
GENERATED = (3, 12, 12, 20, 5)


@pytest.mark.parametrize("logits_seed", [0, 1, 2])
def test_every_control_and_every_pair_is_the_plain_samplers(logits_seed: int) -> None:
    random = np.random.default_rng(logits_seed)
    logits = np.tile(random.normal(0, 1.5, VOCAB).astype(np.float32), (len(SETTINGS), 1))
    rows = [Row(SamplingParams(**one), (3, 7, 9, 12), GENERATED) for one in SETTINGS]
    positions = np.arange(len(rows)) % 5 + 100
    sampled, allowed, noise = choose_rows(logits, rows, positions)
    choices = [
        plain_sample(logits[index], row, IS_FORBIDDEN, noise[index], EOS) for index, row in enumerate(rows)
    ]
    for index, choice in enumerate(choices):
        assert choice.margin > CLEAR, f"{SETTINGS[index]}: choose other logits"
        assert set(np.flatnonzero(allowed[index])) == choice.allowed, SETTINGS[index]
        assert int(sampled.tokens[index]) == choice.token, SETTINGS[index]
        chosen_logprob = plain_logprobs(logits[index])[choice.token]
        assert_close(sampled.logprob[index], chosen_logprob, "formula_float32")
    assert not np.asarray(sampled.is_invalid).any()


def test_no_control_is_idle() -> None:
    random = np.random.default_rng(3)
    base = random.normal(0, 1.5, VOCAB).astype(np.float32)
    count, positions = len(CONTROLS) + 1, 40
    noise = draw(jnp.zeros((positions, 2), jnp.uint32), jnp.arange(positions, dtype=jnp.int32), 0, VOCAB)
    other = draw(jnp.ones((positions, 2), jnp.uint32), jnp.arange(positions, dtype=jnp.int32), 0, VOCAB)
    tokens = np.zeros((count, positions), int)
    for index, one in enumerate([{}, *CONTROLS.values()]):
        row = Row(SamplingParams(**one), (3, 7, 9, 12), GENERATED)
        for position in range(positions):
            mine = np.asarray(other if "seed" in one else noise)[position]
            token = plain_sample(base, row, IS_FORBIDDEN, mine, EOS).token
            assert token is not None
            tokens[index, position] = token
    for name, found in zip(CONTROLS, tokens[1:], strict=True):
        assert (found != tokens[0]).any(), name


plain_numbers = st.one_of(st.just(1.0), st.floats(0.25, 4))
token_ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
random_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(0.25, 4)),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 3)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    repetition_penalty=plain_numbers,
    presence_penalty=st.one_of(st.just(0.0), st.floats(-3, 3)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-3, 3)),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-5, 5), max_size=4),
    bad_token_ids=token_ids,
    stop_token_ids=token_ids,
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
random_rows = st.lists(
    st.builds(Row, random_params, token_ids, st.lists(st.integers(0, VOCAB - 1), max_size=4)),
    min_size=4,
    max_size=4,
)


@settings(max_examples=80)
@given(rows=random_rows, logits_seed=st.integers(0, 99), first=st.integers(0, 2**20 - 4))
def test_random_requests_are_the_plain_samplers(rows: list[Row], logits_seed: int, first: int) -> None:
    # Quarters, so that there are ties.
    logits = np.random.default_rng(logits_seed).integers(-16, 17, (4, VOCAB)).astype(np.float32) / 4
    sampled, allowed, noise = choose_rows(logits, rows, np.arange(first, first + 4))
    for index, row in enumerate(rows):
        choice = plain_sample(logits[index], row, IS_FORBIDDEN, noise[index], EOS)
        assert choice.token is not None
        if choice.margin > CLEAR:
            assert set(np.flatnonzero(allowed[index])) == choice.allowed
            assert int(sampled.tokens[index]) == choice.token
        expected = np.argsort(-logits[index], kind="stable")[:NUM_LOGPROBS]
        assert np.asarray(sampled.top_ids)[index].tolist() == expected.tolist()
        assert_close(sampled.top_logprobs[index], plain_logprobs(logits[index])[expected], "formula_float32")


extreme_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 1.0, 1e30]),
    top_k=st.sampled_from([0, 1, 2**31 - 1]),
    top_p=st.sampled_from([1e-300, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 1e-300, 1.0]),
    repetition_penalty=st.sampled_from([0.01, 1.0, 100.0]),
    presence_penalty=st.sampled_from([-100.0, 0.0, 100.0]),
    frequency_penalty=st.sampled_from([-100.0, 0.0, 100.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-1000, 1000]), max_size=4),
    bad_token_ids=st.one_of(token_ids, st.just(range(VOCAB - 3))),
    stop_token_ids=st.one_of(token_ids, st.just(range(3, VOCAB))),
    min_tokens=st.integers(0, 4),
    seed=st.sampled_from([0, 2**64 - 1]),
)
extreme_rows = st.lists(
    st.builds(Row, extreme_params, token_ids, st.lists(st.integers(0, VOCAB - 1), max_size=4)),
    min_size=4,
    max_size=4,
)
floats = st.one_of(st.floats(width=32), st.floats(-1, 1, width=32), st.just(-math.inf))
extreme_logits = st.lists(
    st.lists(floats, min_size=VOCAB, max_size=VOCAB).map(lambda row: np.array(row, np.float32)),
    min_size=4,
    max_size=4,
)


@settings(max_examples=60)
@given(rows=extreme_rows, logits=extreme_logits)
def test_nothing_makes_a_nan_or_a_token_that_is_not_allowed(
    rows: list[Row], logits: list[np.ndarray]
) -> None:
    sampled, _, _ = choose_rows(np.stack(logits), rows, np.arange(4))
    for index, row in enumerate(rows):
        is_open = (logits[index] > -np.inf) & ~IS_FORBIDDEN
        is_open[list(row.params.bad_token_ids)] = False
        if len(row.generated_ids) < row.params.min_tokens:
            is_open[list(stop_ids_of(row.params, EOS))] = False
        is_sound = not (np.isnan(logits[index]).any() or np.isposinf(logits[index]).any())
        is_valid = bool(is_sound and is_open.any())
        assert bool(sampled.is_invalid[index]) != is_valid
        assert bool(np.isfinite(sampled.logprob[index])) == is_valid
        assert is_open[int(sampled.tokens[index])] if is_valid else int(sampled.tokens[index]) == 0
    for logprobs in (sampled.logprob, sampled.top_logprobs):
        assert not np.isnan(np.asarray(logprobs)).any()


ODD_VOCAB = 67
LARGE = 64


def mixed_batch() -> tuple[np.ndarray, SamplerState, np.ndarray]:
    """64 rows with every mix of controls, none and greedy ones included."""
    random = np.random.default_rng(5)
    rows = []
    for index in range(LARGE):
        wanted = [one for one in CONTROLS.values() if random.random() < 0.35 * (index % 3)]
        merged = {"seed": index, **{name: value for one in wanted for name, value in one.items()}}
        generated = random.integers(0, ODD_VOCAB, index % 5).tolist()
        rows.append(Row(SamplingParams(**merged), random.integers(0, ODD_VOCAB, 9).tolist(), generated))
    logits = (2 * random.normal(size=(LARGE, ODD_VOCAB))).astype(np.float32)
    return logits, sampler_of(rows, ODD_VOCAB, EOS), np.arange(LARGE, dtype=np.int32) * 1000


def test_a_row_is_bitwise_the_same_in_every_batch_and_place() -> None:
    logits, sampler, positions = mixed_batch()
    is_forbidden = jnp.arange(ODD_VOCAB) >= ODD_VOCAB - 2

    def bits_of(places: np.ndarray) -> list[np.ndarray]:
        arrays = jax.tree.map(
            lambda array: jnp.asarray(np.asarray(array)[places]), (logits, sampler, positions)
        )
        found = choose(*arrays, is_forbidden, num_logprobs=NUM_LOGPROBS, tile=SAMPLING_TILE)
        return [
            np.ascontiguousarray(leaf).view(np.uint8).reshape(len(places), -1)
            for leaf in jax.tree.leaves(found)
        ]

    whole = bits_of(np.arange(LARGE))
    random = np.random.default_rng(6)
    batches = [np.array([index]) for index in range(12)]
    batches += [random.permutation(LARGE)[:size] for size in (3, 3, 3, 8, 8, 8, LARGE, LARGE)]
    batches.append(np.array([7] * 8))
    for places in batches:
        for found, expected in zip(bits_of(places), whole, strict=True):
            np.testing.assert_array_equal(found, expected[places])


def test_without_batch_invariance_the_tokens_are_the_same_here() -> None:
    logits, sampler, positions = mixed_batch()
    arrays = (jnp.asarray(logits), sampler, jnp.asarray(positions), jnp.zeros(ODD_VOCAB, bool))
    tiled, whole = (choose(*arrays, num_logprobs=NUM_LOGPROBS, tile=tile) for tile in (SAMPLING_TILE, None))
    np.testing.assert_array_equal(tiled.tokens, whole.tokens)
    assert_close(tiled.logprob, whole.logprob, "formula_float32")


def test_equal_logits_give_the_lower_id_and_zeros_are_equal() -> None:
    logits = np.full((4, VOCAB), -1.0, np.float32)
    logits[0, [9, 4, 30]] = 2.0
    logits[1, [9, 4]] = [0.0, -0.0]
    logits[2, [9, 4]] = [1e-40, -1e-40]
    logits[3, [9, 4]] = [-1e-40, 0.0]
    sampled, _, _ = choose_rows(logits, [Row(SamplingParams(temperature=0))] * 4, np.arange(4))
    assert np.asarray(sampled.tokens).tolist() == [4] * 4
    # Log-probabilities are the model's own, forbidden tokens included.
    assert np.asarray(sampled.top_ids).tolist() == [[4, 9, 30], *[[4, 9, 0]] * 3]


def test_greedy_sees_differences_that_scaling_would_round_away() -> None:
    logits = np.full((4, VOCAB), -3e38, np.float32)
    logits[:, 4], logits[:, 9] = 1e-37, 1.5e-37
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1)
    sampled, _, _ = choose_rows(logits, [Row(params)] * 4, np.zeros(4))
    assert np.asarray(sampled.tokens).tolist() == [9] * 4


def test_seeds_that_differ_in_the_high_word_give_other_tokens() -> None:
    seeds = [7, 7 + 2**32, 7 + 2**63, 7]
    rows = [Row(SamplingParams(seed=seed, temperature=4.0)) for seed in seeds]
    logits = np.zeros((4, VOCAB), np.float32)
    found = [np.asarray(choose_rows(logits, rows, np.full(4, place))[0].tokens) for place in range(12)]
    first, high, top, again = np.stack(found, axis=1).tolist()
    assert first == again
    assert first != high != top != first
