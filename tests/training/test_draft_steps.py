"""Anchors, supervised rows and the schedule are what the recipe says.

Separate because these are rules of their own, tested without a model.
Read next: `test_draft.py`, which runs whole steps.
"""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.draft_steps import (
    LAST_RATE,
    PEAK_RATE,
    choose_anchors,
    learning_rate,
    supervised_rows,
)

SEGMENTS = jnp.asarray([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 12])
IS_ANSWER = jnp.asarray([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0], [0] * 8 + [1] * 4]) > 0


def test_anchors_are_answer_tokens_that_an_answer_token_follows(key: jax.Array) -> None:
    places, is_anchor = choose_anchors(IS_ANSWER, SEGMENTS, key, 8)
    for row, expected in enumerate(({2, 3, 4, 7, 8}, {8, 9, 10})):
        chosen = np.asarray(places[row])[np.asarray(is_anchor[row])]
        assert len(chosen) == len(set(chosen))
        assert set(chosen) == expected


def test_anchors_of_few_are_drawn_evenly(key: jax.Array) -> None:
    """Two of five candidates in each of 500 draws: about 200 each."""
    draw = jax.jit(jax.vmap(lambda key: choose_anchors(IS_ANSWER[:1], SEGMENTS[:1], key, 2)))
    places, is_anchor = draw(jax.random.split(key, 500))
    assert is_anchor.all()
    counts = np.bincount(np.asarray(places).reshape(-1), minlength=12)
    assert counts.sum() == 1000
    assert (np.flatnonzero(counts) == [2, 3, 4, 7, 8]).all()
    assert counts[counts > 0].min() > 150


@pytest.mark.parametrize(
    ("anchor", "expected"),
    [(2, [1, 1, 1, 0]), (4, [1, 0, 0, 0]), (5, [0, 0, 0, 0]), (7, [1, 1, 0, 0]), (0, [0, 0, 0, 0])],
)
def test_a_block_is_supervised_up_to_the_end_of_its_answer(anchor: int, expected: list[int]) -> None:
    places = jnp.asarray([[np.arange(anchor, anchor + 4)]], jnp.int32)
    found = supervised_rows(IS_ANSWER[:1], SEGMENTS[:1], places)
    assert found[0, 0].astype(jnp.int32).tolist() == expected


def test_the_end_of_a_row_ends_a_block() -> None:
    places = jnp.asarray([[np.arange(9, 13)]], jnp.int32)
    found = supervised_rows(IS_ANSWER[1:], SEGMENTS[1:], places)
    assert found[0, 0].tolist() == [True, True, False, False]


def test_the_rate_rises_stays_and_falls() -> None:
    rates = [learning_rate(step, 100) for step in range(100)]
    assert rates[:4] == pytest.approx([PEAK_RATE * part for part in (0.25, 0.5, 0.75, 1.0)])
    assert rates[4:61] == [PEAK_RATE] * 57
    assert all(later < earlier for earlier, later in pairwise(rates[60:]))
    assert rates[80] == pytest.approx(PEAK_RATE * (1 + LAST_RATE) / 2)
    assert LAST_RATE * PEAK_RATE < rates[99] < 2.5 * LAST_RATE * PEAK_RATE
