"""Thousands of drawn blocks at fixed seeds follow the target's law, whatever was scheduled.

Separate because these judge drawing as well: `test_exact_laws.py` integrates, here tokens are drawn.
Read next: `test_exact_laws.py`.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer_jax.spec_decode import schedule
from deepinfer_jax.spec_decode.block_verify import accept_block
from deepinfer_jax.spec_decode.laws import draw
from deepinfer_jax.spec_decode.verify import accept_rejection, emitted

VOCAB, DRAFTS, BLOCKS = 3, 3, 2**14
OUTCOMES = VOCAB ** (DRAFTS + 1)
LIMIT = 146.0
"""Chi-square at one in a hundred thousand for 80 degrees of freedom: there are several runs."""

CONFIDENCES = np.array([0.9, 0.05, 0.6], np.float32)
"""Of drafts after the first, by the token drafted before."""
COMPETITOR = np.array([0.75, 0.8, 0.7], np.float32)
RISING_MS = jnp.asarray([np.inf, *(1.0 + 0.1 * rows for rows in range(8))], jnp.float32)
STEEP_MS = jnp.asarray([np.inf, 1.0, 2.0, 3.0, 3.9, 4.5, 4.9, 5.3, 5.6], jnp.float32)


def tables(seed: int, sharpness: float) -> list[NDArray[np.float32]]:
    """Random laws [V ** j, V] after every prefix of j = 0 .. K tokens, none of a token below 3 %."""
    generator = np.random.default_rng(seed)
    return [
        (0.1 + 0.7 * generator.dirichlet([sharpness] * VOCAB, VOCAB**place)).astype(np.float32)
        for place in range(DRAFTS + 1)
    ]


TARGET, DRAFT = tables(1, 1.0), tables(2, 1.0)


def lengths_by_path(rule: str) -> NDArray[np.int32]:
    """Lengths [V ** K] of a request on every path, whose confidences depend on its drafts before."""
    paths = np.array(list(itertools.product(range(VOCAB), repeat=DRAFTS)))
    first = np.full((len(paths), 1), 0.8, np.float32)
    mine = np.concatenate([first, CONFIDENCES[paths[:, :-1]]], axis=1)
    every, everyone = jnp.full(len(paths), DRAFTS, jnp.int32), jnp.ones(len(paths), bool)
    if rule == "fixed":
        return np.asarray(every)
    if rule == "threshold":
        return np.asarray(schedule.threshold_lengths(jnp.asarray(mine), 0.5, every, everyone))
    beside = np.stack([mine, np.broadcast_to(COMPETITOR, mine.shape)], axis=1)
    by_rule = {
        "top 4": lambda capped: schedule.top_lengths(capped, jnp.int32(4)),
        "algorithm 1": lambda capped: schedule.early_stop_lengths(capped, jnp.ones(2, bool), RISING_MS),
        "search": lambda capped: schedule.best_lengths(capped, jnp.ones(2, bool), STEEP_MS),
    }
    lengths = jax.jit(jax.vmap(lambda rows: by_rule[rule](schedule.survivals(rows))))(beside)[:, 0]
    assert len(np.unique(lengths)) > 1
    return np.asarray(lengths)


def rows_of(laws: list[NDArray[np.float32]], tokens: jax.Array, place: int) -> jax.Array:
    """Law [BLOCKS, V] of the token at a place, after those before it."""
    return jnp.asarray(laws[place])[code_of(tokens, place)]


def code_of(tokens: jax.Array, count: int) -> jax.Array:
    """Number [BLOCKS] of the first tokens of each row, in the order of `itertools.product`."""
    code = jnp.zeros(BLOCKS, jnp.int32)
    for place in range(count):
        code = code * VOCAB + tokens[:, place]
    return code


@partial(jax.jit, static_argnames="accept")
def outcomes(lengths: jax.Array, key: jax.Array, accept: Any) -> jax.Array:
    """Draft, verify the lengths of each path, decode plainly what is left of K + 1 tokens: codes [BLOCKS]."""
    uniforms = jax.random.uniform(key, (3 * DRAFTS + 2, BLOCKS), jnp.float32)
    drafts = jnp.zeros((BLOCKS, DRAFTS), jnp.int32)
    for place in range(DRAFTS):
        drafts = drafts.at[:, place].set(draw(rows_of(DRAFT, drafts, place), uniforms[place]))
    target = jnp.stack([rows_of(TARGET, drafts, place) for place in range(DRAFTS + 1)], axis=1)
    draft = jnp.stack([rows_of(DRAFT, drafts, place) for place in range(DRAFTS)], axis=1)
    uniform_rows = uniforms[DRAFTS : 2 * DRAFTS].T
    accepted, law = accept(target, draft, drafts, lengths[code_of(drafts, DRAFTS)], uniform_rows)
    tokens = emitted(drafts, accepted, draw(law, uniforms[-1]))
    for place in range(1, DRAFTS + 1):
        plain = draw(rows_of(TARGET, tokens, place), uniforms[2 * DRAFTS + place])
        tokens = tokens.at[:, place].set(jnp.where(place > accepted, plain, tokens[:, place]))
    return code_of(tokens, DRAFTS + 1)


def outcome_counts(accept: Any, rule: str, key: jax.Array) -> NDArray[np.int64]:
    return np.bincount(np.asarray(outcomes(lengths_by_path(rule), key, accept)), minlength=OUTCOMES)


def expected_counts() -> NDArray[np.float64]:
    counts = []
    for output in itertools.product(range(VOCAB), repeat=DRAFTS + 1):
        chance, code = 1.0, 0
        for place, token in enumerate(output):
            chance *= float(TARGET[place][code, token])
            code = code * VOCAB + token
        counts.append(BLOCKS * chance)
    return np.array(counts)


def chi_square(counts: NDArray[np.int64]) -> float:
    expected = expected_counts()
    return float((np.square(counts - expected) / expected).sum())


each_mode = pytest.mark.parametrize("accept", [accept_rejection, accept_block], ids=["rejection", "block"])


@each_mode
@pytest.mark.parametrize("rule", ["fixed", "threshold", "top 4", "algorithm 1"])
def test_drawn_tokens_follow_the_target_s_law(rule: str, accept: Any, key: jax.Array) -> None:
    assert chi_square(outcome_counts(accept, rule, key)) < LIMIT


@each_mode
def test_drawn_tokens_betray_a_schedule_that_looks_ahead(accept: Any, key: jax.Array) -> None:
    assert chi_square(outcome_counts(accept, "search", key)) > 3 * LIMIT


def test_the_count_of_outcomes_is_large_enough_everywhere() -> None:
    assert expected_counts().min() > 1
    assert abs(expected_counts().sum() - BLOCKS) < 1e-2
