"""How many drafts of each request are verified: top-K, fixed, threshold, the paper's Algorithm 1.

With rejection or block verification a rule is lossless if it decides about a draft before it could
have seen it. `best_lengths`, which looks at what comes after, is for research and tests, and for
verification whose output no schedule changes. Separate from `budgets.py`: here rows inside a budget
are given to requests, there the budget is chosen.
Read next: `budgets.py`, then `pack.py`, which lays the chosen rows out.

Everywhere: R requests (or slots, idle ones included), K drafts of each, c confidences,
a = c_1 .. c_k survivals; a "capped" survival is 0 where a draft must not be verified.
"""

from __future__ import annotations

from itertools import accumulate

import jax.numpy as jnp

from ..arrays import Array


def survivals(confidences: Array) -> Array:
    """Multiply confidences up: the chance that a draft and all before it are accepted.

        a[r, k] = c[r, 1] ... c[r, k]

    Args:
        confidences: float32 [R, K], in 0..1.

    Returns:
        float32 [R, K]; never rising along K, in rounded numbers too.

    Source: spec/dspark.md section 5.1.
    """
    # One product after the other: a parallel scan may round a later survival above an earlier one.
    return jnp.stack(list(accumulate(jnp.unstack(confidences, axis=1), jnp.multiply)), axis=1)


def cap_survivals(survivals: Array, caps: Array, is_active: Array) -> Array:
    """Set to 0 the survivals of drafts that must not be verified: a = 0 is never a candidate.

    Args:
        survivals: float32 [R, K].
        caps: int32 [R], most drafts of each request, known before they were drawn.
        is_active: bool [R].

    Returns:
        float32 [R, K]; a survival that is not a number is 0 as well.

    Source: spec/dspark.md sections 4.1 and 5.2.
    """
    is_open = jnp.arange(survivals.shape[1], dtype=jnp.int32)[None, :] < caps[:, None]
    return jnp.where(is_open & is_active[:, None] & (survivals > 0), survivals, 0.0)


def top_lengths(capped: Array, num_drafts: Array) -> Array:
    """Verify the drafts that survive most probably, a given number of them.

    Among equals the smaller position comes first, then the smaller request. Since survivals fall along
    a block, the chosen drafts of a request are its first ones. Lossless while `num_drafts` depends on
    the past only: what comes after a draft never ranks before it.

    Args:
        capped: float32 [R, K].
        num_drafts: int32 [], how many; fewer where fewer survivals are above 0.

    Returns:
        int32 [R], 0..K.

    Source: spec/dspark.md sections 5.1 and 5.4.
    """
    ranked, requests = ranked_survivals(capped)
    is_chosen = (jnp.arange(ranked.shape[0], dtype=jnp.int32) < num_drafts) & (ranked > 0)
    return jnp.zeros(capped.shape[0], jnp.int32).at[requests].add(is_chosen.astype(jnp.int32))


def full_lengths(caps: Array, is_active: Array) -> Array:
    """Verify every draft that may be: int32 [R] of caps int32 [R] and bool [R]."""
    return jnp.where(is_active, caps, 0)


def threshold_lengths(confidences: Array, threshold: Array | float, caps: Array, is_active: Array) -> Array:
    """Stop at the first confidence below a threshold; lossless, since c_k knows drafts before k only.

    Args:
        confidences: float32 [R, K].
        threshold: float32 [].
        caps: int32 [R].
        is_active: bool [R].

    Returns:
        int32 [R], 0..K.

    Source: spec/dspark.md section 5.4.
    """
    return jnp.minimum(leading_count(confidences >= threshold), full_lengths(caps, is_active))


def early_stop_lengths(capped: Array, is_active: Array, step_ms: Array) -> Array:
    """Add drafts by falling survival while each raises the tokens per time: the paper's Algorithm 1.

    Lossless: what is added depends on drafts before it only. Optimal only where the tokens per time
    have one peak along the way, so not where step times are a staircase.

    Args:
        capped: float32 [R, K].
        is_active: bool [R].
        step_ms: float32 [R (K + 1) + 1], milliseconds of a step with N rows at index N.

    Returns:
        int32 [R], 0..K.

    Source: spec/dspark.md section 5.2.
    """
    thetas = _thetas_by_drafts(capped, is_active, step_ms)
    return top_lengths(capped, leading_count(thetas[1:] > thetas[:-1]))


def best_num_drafts(capped: Array, is_active: Array, step_ms: Array) -> Array:
    """Find the number of drafts with the most tokens per time, the fewest among equals.

    Args:
        capped: float32 [R, K].
        is_active: bool [R].
        step_ms: float32 [R (K + 1) + 1], milliseconds of a step with N rows at index N.

    Returns:
        int32 []; safe for `top_lengths` if `capped` are survivals of earlier steps.

    Source: spec/dspark.md sections 5.1 and 5.5.
    """
    return jnp.argmax(_thetas_by_drafts(capped, is_active, step_ms)).astype(jnp.int32)


def best_lengths(capped: Array, is_active: Array, step_ms: Array) -> Array:
    """Maximise the tokens per time over all lengths: biased, for research and tests only.

    Whether a draft is verified depends here on what was drawn after it, and so on the draft itself.
    Only verification that is greedy or coupled stays lossless.

    Args:
        capped: float32 [R, K].
        is_active: bool [R].
        step_ms: float32 [R (K + 1) + 1], milliseconds of a step with N rows at index N.

    Returns:
        int32 [R], 0..K.

    Source: spec/dspark.md sections 5.1 and 5.4.
    """
    return top_lengths(capped, best_num_drafts(capped, is_active, step_ms))


def ranked_survivals(capped: Array) -> tuple[Array, Array]:
    """Sort all survivals, the largest first; equals by position, then by request.

    Args:
        capped: float32 [R, K].

    Returns:
        The survivals, float32 [R K], and the request of each, int32 [R K].
    """
    flat = capped.T.reshape(-1)
    order = jnp.argsort(flat, descending=True, stable=True).astype(jnp.int32)
    return flat[order], order % capped.shape[0]


def leading_count(is_true: Array) -> Array:
    """Count the true values before the first false one along the last axis: int32."""
    return jnp.cumprod(is_true, axis=-1, dtype=jnp.int32).sum(axis=-1, dtype=jnp.int32)


def _thetas_by_drafts(capped: Array, is_active: Array, step_ms: Array) -> Array:
    """Give the tokens per millisecond with 0, 1, .. R K drafts, minus infinity where there are fewer."""
    ranked, _ = ranked_survivals(capped)
    num_active = is_active.sum(dtype=jnp.int32)
    gains = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(ranked)])
    num_rows = num_active + jnp.arange(gains.shape[0], dtype=jnp.int32)
    thetas = (num_active.astype(jnp.float32) + gains) / step_ms[num_rows]
    return jnp.where(jnp.concatenate([jnp.ones(1, bool), ranked > 0]), thetas, -jnp.inf)
