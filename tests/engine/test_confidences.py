"""Rounds that calibration learns from: fully verified, of every regime, and nothing that an end cut short.

Separate because an engine is run here for what it leaves out, not for its tokens.
Read next: `../spec_decode/test_calibrate.py`.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, Model, RequestError, SamplingParams
from deepinfer_jax.engine.confidences import (
    Rounds,
    chance_errors,
    collect_rounds,
    cross_fitted,
    fit_rounds,
    in_every_regime,
)
from deepinfer_jax.model.numerics import FLOAT32
from deepinfer_jax.spec_decode.calibrate import confidences_of, survival_errors
from deepinfer_jax.spec_decode.calibration import (
    FILTERED,
    GREEDY,
    REGIMES,
    SAMPLED,
    Calibration,
)
from deepinfer_jax.testing.presets import SMALLEST, SMALLEST_DRAFTED, random_weights

SIZE = SMALLEST_DRAFTED.draft.block_size
OPTIONS = EngineConfig(num_slots=8, max_context=512)
LIKELY = {7: 9.0, 30: 8.5, 55: 8.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALLEST_DRAFTED, random_weights(SMALLEST_DRAFTED, jax.random.key(4)), FLOAT32, None)


def test_rounds_of_all_regimes_are_whole(model: Model) -> None:
    base = SamplingParams(max_tokens=30, logit_bias=LIKELY, ignore_eos=True, logprobs=3)
    params = [one for _ in range(4) for one in in_every_regime(base)]
    prompts = [[3 + number, 9, 11] for number in range(len(params))]
    rounds = collect_rounds(model, prompts, params, OPTIONS)
    assert set(rounds.regimes.tolist()) == {0, 1, 2}
    assert (rounds.num_verified == SIZE).all() and rounds.logits.shape == (len(rounds.regimes), SIZE)
    assert 0 < rounds.num_accepted.mean() < SIZE and rounds.num_accepted.max() <= SIZE
    # A request is of one regime, and the three regimes take turns.
    assert set(rounds.requests.tolist()) == set(range(len(params)))
    assert (rounds.requests % 3 == rounds.regimes).all()
    # What is left out: rounds near max_tokens, at most SIZE tokens of each answer.
    tokens = (1 + rounds.num_accepted).sum()
    assert len(params) * (30 - 1 - 2 * SIZE) <= tokens <= len(params) * 30


def test_a_stop_token_that_was_drafted_leaves_its_round_out(model: Model) -> None:
    """Whether the drafts behind it were right nobody knows."""
    params = SamplingParams(max_tokens=40, temperature=0.0, logit_bias={7: 50.0}, stop_token_ids=(7,))
    free = collect_rounds(
        model, [[5, 6]], [SamplingParams(max_tokens=40, temperature=0.0, logit_bias={7: 50.0})], OPTIONS
    )
    assert (free.num_accepted == SIZE).all()
    with pytest.raises(RequestError, match="got no round whose drafts were all verified"):
        collect_rounds(model, [[5, 6]], [params], OPTIONS)


def test_a_model_without_drafts_is_refused() -> None:
    plain = Model(SMALLEST, random_weights(SMALLEST, jax.random.key(4)), FLOAT32, None)
    with pytest.raises(RequestError, match="drafts: got 'fixed'"):
        collect_rounds(plain, [[5, 6]], [SamplingParams()], OPTIONS)


def test_regimes_keep_the_rest_of_the_parameters() -> None:
    base = SamplingParams(max_tokens=9, top_k=5, presence_penalty=0.5, seed=3)
    assert [one.presence_penalty for one in in_every_regime(base)] == [0.5] * 3
    assert [(one.temperature, one.top_k, one.top_p) for one in in_every_regime(base)] == [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (1.0, 0, 0.9),
    ]
    assert np.unique([one.max_tokens for one in in_every_regime(base)]).tolist() == [9]


def test_rounds_know_their_request(model: Model) -> None:
    """Requests that share their parameters, and wait for a slot, are told apart by what they accept."""
    certain = SamplingParams(max_tokens=30, temperature=0.0, logit_bias={7: 50.0}, ignore_eos=True)
    params = [certain if number % 3 else replace(certain, max_tokens=60) for number in range(24)]
    rounds = collect_rounds(model, [[5, 6]] * 24, params, OPTIONS)
    assert (rounds.num_accepted == SIZE).all()
    by_request = np.bincount(rounds.requests, minlength=24)
    long = by_request[::3]
    short = np.delete(by_request, slice(None, None, 3))
    # Every round gives a token more than it has drafts, and the first token has none.
    assert set(short.tolist()) == {29 // (SIZE + 1)} and set(long.tolist()) == {59 // (SIZE + 1)}


def answers(seed: int, num_answers: int, each: int, repeats: int) -> tuple[np.ndarray, ...]:
    """Draw rounds whose survivals are exact; an answer has each of its rounds several times over."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.0, 1.5, (num_answers * each, 3))
    confidences = confidences_of(logits, np.ones(3))
    accepted = np.cumprod(random.random(logits.shape) < confidences, axis=1).sum(axis=1)
    requests = np.repeat(np.arange(num_answers), each * repeats)
    return np.repeat(logits, repeats, axis=0), np.repeat(accepted, repeats), requests


@pytest.mark.parametrize("repeats", [1, 8])
def test_errors_by_chance_are_those_of_exact_survivals(repeats: int) -> None:
    measured, floors = [], []
    for seed in range(20):
        logits, accepted, requests = answers(seed, num_answers=100, each=10, repeats=repeats)
        survivals = np.cumprod(confidences_of(logits, np.ones(3)), axis=1)
        measured.append(survival_errors(survivals, accepted))
        floors.append(chance_errors(survivals, accepted, requests).mean(axis=0))
    ratio = np.mean(floors, axis=0) / np.mean(measured, axis=0)
    assert (0.85 < ratio).all() and (ratio < 1.1).all()


def test_errors_by_chance_do_not_grow_with_what_is_truly_off() -> None:
    logits, accepted, requests = answers(3, num_answers=400, each=10, repeats=1)
    survivals = np.cumprod(confidences_of(logits, np.full(3, 3.0)), axis=1)
    by_chance = np.quantile(chance_errors(survivals, accepted, requests), 0.95, axis=0)
    assert (survival_errors(survivals, accepted) > 2 * by_chance).all()


def test_rounds_are_calibrated_as_their_regime() -> None:
    logits = np.asarray([[2.0], [2.0], [0.0]], np.float32)
    ones = np.ones(3, np.int64)
    rounds = Rounds(logits, ones, ones, np.asarray([GREEDY, SAMPLED, FILTERED]), np.arange(3))
    temperatures = {name: (2.0 if name == "greedy" else 1.0,) for name in REGIMES}
    shifts = {name: (-2.0 if name == "sampled" else 0.0,) for name in REGIMES}
    bases = {name: (1.0 if name == "filtered" else 0.0,) for name in REGIMES}
    found = Calibration(temperatures, {}, shifts, bases).survivals(rounds.logits, rounds.regimes)
    assert found[:, 0] == pytest.approx([1 / (1 + np.exp(-1)), 0.5, 2 / 3])


def test_cross_fitted_survivals_do_not_know_their_own_outcome() -> None:
    logits, accepted, requests = answers(1, num_answers=500, each=10, repeats=1)
    own = requests % 5 == 2
    verified, regimes = np.full(len(accepted), 3), np.full(len(accepted), SAMPLED)
    rounds = Rounds(logits, accepted, verified, regimes, requests)
    found = cross_fitted(rounds, folds=5)
    # Other outcomes of one fold change the survivals of all others, and none of its own.
    changed = cross_fitted(rounds._replace(num_accepted=np.where(own, 3, accepted)), folds=5)
    assert (changed[own] == found[own]).all() and (changed[~own] != found[~own]).any(axis=1).all()
    others = Rounds(*(part[~own] for part in rounds))
    assert (found[own] == fit_rounds(others).survivals(rounds.logits, rounds.regimes)[own]).all()
    assert survival_errors(found, accepted).max() < 0.03
