"""From logits to a token: greedy, temperature and top-p against a sampler in plain NumPy.

Separate because the rules are tested on logits alone, without a model.
Read next: `test_randomness.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.sampling.logits import keep_top_p, sample_tokens, scale_by_temperature
from deepinfer_jax.sampling.randomness import SAMPLE_TOKEN, gumbel

VOCAB = 8
ROWS = 4
NEVER = -np.inf

sample = jax.jit(sample_tokens)
keep = jax.jit(keep_top_p)

# Whole quarters: many ties, and no two different probabilities that rounding could exchange.
logit_rows = st.lists(
    st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
    min_size=ROWS,
    max_size=ROWS,
)


def plain_top_p(logits: np.ndarray, top_p: float) -> tuple[set[int], float]:
    """Keep tokens by falling probability until they hold top_p; also the distance of the decision.

    Returns:
        The kept ids, how near a running total came to top_p.
    """
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = weights / weights.sum()
    kept, total, nearest = set(), 0.0, 1.0
    for token in sorted(range(len(logits)), key=lambda token: (-probabilities[token], token)):
        nearest = min(nearest, abs(total - top_p))
        if kept and total >= top_p:
            break
        kept.add(token)
        total += probabilities[token]
    return kept, nearest


def test_greedy_takes_the_best_and_the_lower_id_of_equals() -> None:
    logits = jnp.array([[0, 3, 3, 1, 3, 0, 0, 0], [2, 2, 2, 2, 2, 2, 2, 2], [-9, -8, -7, -6, -5, -4, -3, -2]])
    noise = 100.0 * jax.random.normal(jax.random.key(0), logits.shape)
    tokens = sample(logits.astype(jnp.float32), jnp.zeros(3), jnp.full(3, 0.5), noise)
    assert tokens.tolist() == [1, 0, 7]
    assert tokens.dtype == jnp.int32


@given(logits=logit_rows, top_p=st.floats(0.01, 0.99))
def test_top_p_keeps_what_the_plain_sampler_keeps(logits: list[list[float]], top_p: float) -> None:
    array = np.array(logits, np.float32)
    found = np.asarray(keep(array, np.full(ROWS, top_p, np.float32)))
    for row in range(ROWS):
        kept, nearest = plain_top_p(array[row], float(np.float32(top_p)))
        if nearest > 1e-6:
            assert set(np.flatnonzero(found[row] > NEVER).tolist()) == kept
        np.testing.assert_array_equal(found[row][found[row] > NEVER], array[row][found[row] > NEVER])


@given(logits=logit_rows)
def test_top_p_always_keeps_the_best_token(logits: list[list[float]]) -> None:
    array = np.array(logits, np.float32)
    found = np.asarray(keep(array, np.full(ROWS, 1e-30, np.float32)))
    assert (np.isfinite(found).sum(axis=1) == 1).all()
    np.testing.assert_array_equal(found.argmax(axis=1), array.argmax(axis=1))


def test_top_p_of_one_keeps_every_token_however_unlikely() -> None:
    logits = np.array([[0.0, -60.0, -80.0, -90.0]], np.float32)
    np.testing.assert_array_equal(keep(logits, np.ones(1, np.float32)), logits)


def test_each_row_has_its_own_top_p_and_temperature() -> None:
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)), (3, 1))
    kept = np.isfinite(np.asarray(keep(logits, np.array([0.4, 0.79, 0.9], np.float32))))
    assert kept.sum(axis=1).tolist() == [1, 2, 3]
    scaled = scale_by_temperature(jnp.asarray(logits), jnp.array([0.5, 1.0, 0.0]))
    np.testing.assert_allclose(scaled, logits * np.array([[2.0], [1.0], [1.0]], np.float32), rtol=1e-6)


def draws_of(logits: np.ndarray, temperature: float, top_p: float, count: int = 4000) -> np.ndarray:
    """Sample one token at each of many positions of one seed."""
    seeds = np.tile(np.array([3, 5], np.uint32), (count, 1))
    noise = gumbel(jnp.asarray(seeds), jnp.arange(count, dtype=jnp.int32), SAMPLE_TOKEN, len(logits))
    rows = np.tile(logits, (count, 1)).astype(np.float32)
    full = (np.full(count, temperature, np.float32), np.full(count, top_p, np.float32))
    return np.asarray(sample(rows, *full, noise))


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    return float((np.square(counts - expected) / expected).sum())


PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.2, 0.02, 0.08, 0.1, 0.05])
CHI_SQUARE_LIMIT = 24.3  # 7 degrees of freedom, one in a thousand


def test_tokens_follow_the_probabilities() -> None:
    tokens = draws_of(np.log(PROBABILITIES), temperature=1.0, top_p=1.0)
    assert chi_square(tokens, PROBABILITIES) < CHI_SQUARE_LIMIT
    # The same draws do not pass for another distribution.
    assert chi_square(tokens, np.full(VOCAB, 1 / VOCAB)) > 10 * CHI_SQUARE_LIMIT


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        wanted = PROBABILITIES ** (1 / temperature)
        tokens = draws_of(np.log(PROBABILITIES), temperature, top_p=1.0)
        assert chi_square(tokens, wanted / wanted.sum()) < CHI_SQUARE_LIMIT


def test_top_p_renormalises_what_it_keeps() -> None:
    tokens = draws_of(np.log(PROBABILITIES), temperature=1.0, top_p=0.65)
    assert set(tokens.tolist()) == {1, 2, 3}
    wanted = np.array([0.4, 0.1, 0.2]) / 0.7
    renumbered = np.searchsorted([1, 2, 3], tokens)
    assert chi_square(renumbered, wanted) < 13.8  # 2 degrees of freedom, one in a thousand
