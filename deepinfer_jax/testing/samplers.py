"""A slow, obvious sampler and its random numbers: loops over tokens, float64, Python integers.

Separate from the tests because the step, speculative decoding and other devices compare with the same.
Read next: `../sampling/sample.py`, which must agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..sampling.state import SamplerState, admit_parameters, empty_sampler, record_rows, record_token
from ..sampling_params import SamplingParams, stop_ids_of
from ..slot_parameters import slot_parameters

_admit, _record_rows, _record_token = (
    jax.jit(function) for function in (admit_parameters, record_rows, record_token)
)


class PlainChoice(NamedTuple):
    """What the plain sampler chose for one row.

    Attributes:
        allowed: ids that may be drawn; empty if none is left.
        token: the id that is drawn; None if none is left.
        margin: least distance of any decision from going the other way. Exact ties do not count: the
            lower id wins them on every side.
    """

    allowed: set[int]
    token: int | None
    margin: float


class Row(NamedTuple):
    """One request in the middle of its output."""

    params: SamplingParams
    prompt_ids: Sequence[int] = (0,)
    generated_ids: Sequence[int] = ()


def plain_sample(
    logits: np.ndarray, row: Row, is_forbidden: np.ndarray, noise: Sequence[float], eos_token_id: int
) -> PlainChoice:
    """Choose the token of one row, every control in its documented order.

    Args:
        logits: [V], finite or minus infinity.
        row: the request.
        is_forbidden: bool [V].
        noise: [V], Gumbel noise.
        eos_token_id: the end of sequence.

    Returns:
        The choice.
    """
    params = row.params
    adjusted = plain_controls(logits, row, is_forbidden, eos_token_id)
    allowed = {token: value for token, value in adjusted.items() if value > -math.inf}
    if not allowed:
        return PlainChoice(set(), None, math.inf)
    if params.temperature < 1e-5:
        token, margin = _best(allowed)
        return PlainChoice(set(allowed), token, margin)
    largest = max(allowed.values())
    scores = {token: (value - largest) / params.temperature for token, value in allowed.items()}
    kept, margin = _filtered(scores, params)
    token, draw_margin = _best({token: scores[token] + float(noise[token]) for token in kept})
    return PlainChoice(set(kept), token, min(margin, draw_margin))


def plain_controls(
    logits: np.ndarray, row: Row, is_forbidden: np.ndarray, eos_token_id: int
) -> dict[int, float]:
    """Penalise, bias and mask the logits of one row: token id -> value."""
    params = row.params
    biases = dict(params.bias_pairs)
    adjusted = {}
    for token in range(len(logits)):
        value = float(logits[token])
        count = list(row.generated_ids).count(token)
        if count or token in row.prompt_ids:
            ratio = params.repetition_penalty
            value = value / ratio if value > 0 else value * ratio
        value -= params.frequency_penalty * count
        if count:
            value -= params.presence_penalty
        value += biases.get(token, 0.0)
        if token in params.bad_token_ids or is_forbidden[token]:
            value = -math.inf
        if len(row.generated_ids) < params.min_tokens and token in stop_ids_of(params, eos_token_id):
            value = -math.inf
        adjusted[token] = value
    return adjusted


def plain_logprobs(logits: np.ndarray) -> np.ndarray:
    """Log-softmax of one row in float64: [V]."""
    values = logits.astype(np.float64) - logits.max()
    return values - np.log(np.exp(values).sum())


def sampler_of(rows: Sequence[Row], vocab_size: int, eos_token_id: int) -> SamplerState:
    """Make the sampler state of rows by the calls that an engine would make."""
    sampler = empty_sampler(len(rows), vocab_size)
    parameters = slot_parameters([row.params for row in rows], eos_token_id)
    lengths = np.array([len(row.prompt_ids) for row in rows], np.int32)
    sampler = _admit(sampler, jnp.ones(len(rows), bool), parameters, lengths, np.zeros_like(lengths))
    prompt = [(slot, *place) for slot, row in enumerate(rows) for place in enumerate(row.prompt_ids)]
    # Padded to few shapes, as a step's rows are.
    padded = np.zeros((-(-len(prompt) // 64) * 64, 3), np.int32)
    padded[: len(prompt)] = np.reshape(prompt, (-1, 3))
    is_valid = jnp.arange(len(padded), dtype=jnp.int32) < len(prompt)
    sampler = _record_rows(sampler, *(jnp.asarray(column) for column in padded.T), is_valid)
    for step in range(max(len(row.generated_ids) for row in rows)):
        is_sampled = np.array([step < len(row.generated_ids) for row in rows])
        tokens = [row.generated_ids[step] if step < len(row.generated_ids) else 0 for row in rows]
        sampler = _record_token(sampler, jnp.asarray(tokens, jnp.int32), jnp.asarray(is_sampled))
    return sampler


def plain_gumbel(seed: int, position: int, purpose: int, index: int) -> float:
    """Draw one Gumbel number as `sampling.randomness` defines it, from Python integers.

    The uniform number is rounded as float32 rounds it; its logarithms are exact to float64.
    """
    counter = (purpose << 24 | position, index)
    high, low = threefry((seed >> 32, seed & 0xFFFFFFFF), counter)
    fraction = np.float32(np.float32(low) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = np.float32(np.float32(high) + fraction) * np.float32(2.0**-32)
    uniform = min(float(uniform), 1 - 2.0**-24)
    return -math.log(-math.log1p(-uniform))


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    left, right = (counter[0] + keys[0]) % 2**32, (counter[1] + keys[1]) % 2**32
    for number in range(20):
        distance = rotations[number % 8]
        left = (left + right) % 2**32
        right = ((right << distance | right >> (32 - distance)) % 2**32) ^ left
        if number % 4 == 3:
            turn = number // 4 + 1
            left = (left + keys[turn % 3]) % 2**32
            right = (right + keys[(turn + 1) % 3] + turn) % 2**32
    return left, right


def _filtered(scores: dict[int, float], params: SamplingParams) -> tuple[list[int], float]:
    """Apply top_k, top_p and min_p to scaled scores; also the margin of the decisions."""
    margins = [math.inf]
    order = sorted(scores, key=lambda token: (-scores[token], token))
    if 0 < params.top_k < len(order):
        margins.append(_distance(scores[order[params.top_k - 1]], scores[order[params.top_k]]))
        order = order[: params.top_k]
    weights = {token: math.exp(scores[token]) for token in order}
    total = sum(weights.values())
    kept, before = [], 0.0
    for token in order:
        if params.top_p < 1:
            margins.append(abs(before - params.top_p))
            if kept and before >= params.top_p:
                # Which of two nearly equal tokens comes first matters where the cut falls between them.
                margins.append(_distance(scores[kept[-1]], scores[token]))
                break
        kept.append(token)
        before += weights[token] / total
    if params.min_p > 0:
        for token in kept:
            if weights[token] != 1:
                margins.append(abs(weights[token] - params.min_p))
        kept = [token for token in kept if weights[token] >= params.min_p]
    return kept, min(margins)


def _best(values: dict[int, float]) -> tuple[int, float]:
    order = sorted(values, key=lambda token: (-values[token], token))
    if len(order) == 1:
        return order[0], math.inf
    return order[0], _distance(values[order[0]], values[order[1]])


def _distance(larger: float, smaller: float) -> float:
    return larger - smaller if larger != smaller else math.inf
