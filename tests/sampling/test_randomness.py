"""A draw is a function of seed, position and purpose, of nothing else, and is what the formula says.

Separate because the whole reproducibility of sampling rests on this one function.
Read next: `test_sample.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.randomness import SAMPLE_TOKEN, gumbel
from deepinfer_jax.slot_parameters import seed_words
from deepinfer_jax.testing.samplers import plain_gumbel, threefry
from deepinfer_jax.testing.tolerances import assert_close

SIZE = 16
LAST_POSITION = 2**20 - 1

draw = jax.jit(gumbel, static_argnums=(2, 3))


def draws(requests: list[tuple[int, int]], purpose: int = SAMPLE_TOKEN) -> np.ndarray:
    """Draw one row for each (seed, position)."""
    words = np.stack([seed_words(seed) for seed, _ in requests])
    positions = np.array([position for _, position in requests], np.int32)
    return np.asarray(draw(jnp.asarray(words), jnp.asarray(positions), purpose, SIZE))


def test_bc28_a_draw_does_not_depend_on_the_row_or_on_the_other_rows() -> None:
    alone = draws([(7, 3)])[0]
    for batch in ([(7, 3), (1, 2)], [(1, 2), (7, 3)], [(1, 2), (1, 2), (1, 2), (7, 3)]):
        np.testing.assert_array_equal(draws(batch)[batch.index((7, 3))], alone)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_plain_generator_gives_the_published_answers(
    key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert threefry(key, counter) == expected


@pytest.mark.parametrize("purpose", [SAMPLE_TOKEN, 1, 255])
def test_noise_is_the_plain_generators(purpose: int) -> None:
    requests = [
        (seed, position)
        for seed in (0, 7, 7 + 2**32, 2**63, 2**64 - 1)
        for position in (0, 3, LAST_POSITION, 2**24 - 1)
    ]
    expected = [[plain_gumbel(*request, purpose, index) for index in range(SIZE)] for request in requests]
    assert_close(draws(requests, purpose), expected, "formula_float32")


def test_the_largest_of_a_million_draws_use_all_64_bits() -> None:
    # Their first word is nearly zero, so the second one decides.
    noise = np.asarray(draw(jnp.asarray(seed_words(5)[None]), jnp.zeros(1, jnp.int32), SAMPLE_TOKEN, 2**20))[
        0
    ]
    largest = np.argsort(-noise)[:16]
    assert noise[largest[0]] > 12
    assert_close(
        noise[largest], [plain_gumbel(5, 0, SAMPLE_TOKEN, int(index)) for index in largest], "formula_float32"
    )


@pytest.mark.parametrize(
    "other",
    [8, 7 + 2**32, 7 + 2**63, 7 << 32],
    ids=["low_word", "high_word", "top_bit", "exchanged_words"],
)
def test_seeds_that_differ_in_either_half_draw_differently(other: int) -> None:
    first, second = draws([(7, 3), (other, 3)])
    assert (first != second).all()


def test_positions_and_purposes_draw_differently() -> None:
    requests = [(7, 3), (7, 4), (7, LAST_POSITION)]
    rows = np.concatenate([draws(requests), draws(requests, purpose=1)])
    assert len(np.unique(rows)) == rows.size


def test_draws_are_standard_gumbel() -> None:
    values = np.concatenate([draws([(11, first + row) for row in range(512)]) for first in (0, 2**20 - 512)])
    assert abs(values.mean() - np.euler_gamma) < 0.035  # 3.5 standard errors of 16384 draws
    assert abs(values.std() - np.pi / np.sqrt(6)) < 0.05
    # The whole curve: largest distance of the distribution functions, one in a thousand.
    ordered = np.sort(values.ravel())
    steps = np.arange(1, ordered.size + 1) / ordered.size
    assert np.abs(np.exp(-np.exp(-ordered)) - steps).max() < 1.95 / np.sqrt(ordered.size)
