"""A draw is a function of seed, position and purpose, of nothing else.

Separate because the whole reproducibility of sampling rests on this one function.
Read next: `test_logits.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.sampling.randomness import SAMPLE_TOKEN, gumbel, seed_words

SIZE = 16

draw = jax.jit(gumbel, static_argnums=(2, 3))


def draws(requests: list[tuple[int, int]], purpose: int = SAMPLE_TOKEN) -> np.ndarray:
    """Draw one row for each (seed, position)."""
    words = np.stack([seed_words(seed) for seed, _ in requests])
    positions = np.array([position for _, position in requests], np.int32)
    return np.asarray(draw(jnp.asarray(words), jnp.asarray(positions), purpose, SIZE))


@given(seed=st.integers(0, 2**64 - 1))
def test_seed_words_hold_all_64_bits(seed: int) -> None:
    high, low = seed_words(seed).tolist()
    assert high << 32 | low == seed


def test_bc28_a_draw_does_not_depend_on_the_row_or_on_the_other_rows() -> None:
    alone = draws([(7, 3)])[0]
    for batch in ([(7, 3), (1, 2)], [(1, 2), (7, 3)], [(1, 2), (1, 2), (1, 2), (7, 3)]):
        np.testing.assert_array_equal(draws(batch)[batch.index((7, 3))], alone)


@pytest.mark.parametrize(
    "other",
    [8, 7 + 2**32, 7 + 2**63, 7 << 32],
    ids=["low_word", "high_word", "top_bit", "exchanged_words"],
)
def test_seeds_that_differ_in_either_half_draw_differently(other: int) -> None:
    first, second = draws([(7, 3), (other, 3)])
    assert (first != second).all()


def test_positions_and_purposes_draw_differently() -> None:
    rows = np.concatenate([draws([(7, 3), (7, 4)]), draws([(7, 3), (7, 4)], purpose=1)])
    assert len(np.unique(rows)) == rows.size


def test_draws_are_standard_gumbel() -> None:
    values = draws([(11, position) for position in range(512)])
    assert abs(values.mean() - np.euler_gamma) < 0.05  # 3.5 standard errors of 8192 draws
    assert abs(values.std() - np.pi / np.sqrt(6)) < 0.05
