"""Thousands of tokens at fixed seeds follow the probabilities that the controls leave.

Separate because these judge many draws together, `test_sample.py` each one.
Read next: `test_randomness.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.sample import sample
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.testing.samplers import Row, sampler_of

EOS = 1

choose = jax.jit(sample, static_argnames=("num_logprobs", "tile"))

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.2, 0.02, 0.08, 0.1, 0.05])
LIMITS = {1: 10.8, 2: 13.8, 3: 16.3, 6: 22.5, 7: 24.3}
"""Chi-square at one in a thousand, by degrees of freedom."""
DRAWS = 4096


def tokens_at_many_positions(params: SamplingParams, generated: tuple[int, ...] = ()) -> np.ndarray:
    row = sampler_of([Row(params, (0,), generated)], len(PROBABILITIES), EOS)
    sampler = jax.tree.map(lambda array: jnp.asarray(np.repeat(np.asarray(array), DRAWS, axis=0)), row)
    logits = jnp.asarray(np.tile(np.log(PROBABILITIES).astype(np.float32), (DRAWS, 1)))
    positions = jnp.arange(2**20 - DRAWS, 2**20, dtype=jnp.int32)
    found = choose(
        *(logits, sampler, positions, jnp.zeros(len(PROBABILITIES), bool)),
        num_logprobs=0,
        tile=None,
    )
    return np.asarray(found.tokens)


@pytest.mark.parametrize(
    ("controls", "generated", "weights"),
    [
        ({}, (), PROBABILITIES),
        ({"temperature": 0.5}, (), PROBABILITIES**2),
        ({"temperature": 2.0}, (), PROBABILITIES**0.5),
        ({"top_k": 4}, (), PROBABILITIES * np.isin(np.arange(8), [1, 3, 2, 6])),
        ({"top_p": 0.65}, (), PROBABILITIES * np.isin(np.arange(8), [1, 3, 2])),
        ({"min_p": 0.45}, (), PROBABILITIES * np.isin(np.arange(8), [1, 3])),
        ({"logit_bias": {4: 3.0}, "bad_token_ids": (1,)}, (), PROBABILITIES * [1, 0, 1, 1, np.e**3, 1, 1, 1]),
        ({"frequency_penalty": 0.5}, (1, 1), PROBABILITIES * [1, np.e**-1, 1, 1, 1, 1, 1, 1]),
        (
            {"seed": 2**64 - 1, "top_k": 3, "temperature": 0.5},
            (),
            PROBABILITIES**2 * [0, 1, 1, 1, 0, 0, 0, 0],
        ),
    ],
    ids=str,
)
def test_tokens_follow_the_probabilities(
    controls: dict[str, Any], generated: tuple[int, ...], weights: np.ndarray
) -> None:
    tokens = tokens_at_many_positions(SamplingParams(**controls), generated)
    expected = DRAWS * weights / weights.sum()
    counts = np.bincount(tokens, minlength=len(weights))
    possible = expected > 0
    assert not counts[~possible].any()
    distance = (np.square(counts - expected)[possible] / expected[possible]).sum()
    assert distance < LIMITS[int(possible.sum()) - 1]
    # The same draws do not pass for another distribution.
    uniform = DRAWS / possible.sum()
    assert (np.square(counts - uniform)[possible] / uniform).sum() > 100
