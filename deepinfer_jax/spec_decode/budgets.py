"""How many rows a verify step has: no draft, one of a few budgets, or the uniform full block.

A candidate's worth is the tokens it promises over the time it takes. The promise is made of survivals
of earlier steps, so that the choice knows nothing of the drafts it is about, and it is a sum over
ranks: a mesh adds the numerators up and all ranks choose the same.

    candidate 0        no draft: R tokens in the time of a step that knows no drafts
    candidate b, 1..G  N_b rows on each device: R + the N_b - R largest survivals
    candidate G + 1    uniform: all drafts of all slots, in a step of its own shape and time

Separate from `schedule.py`, which knows no time table of budgets.
Read next: `schedule.py`, whose `top_lengths` fills the chosen budget.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..arrays import Array
from .schedule import full_lengths, ranked_survivals, top_lengths

NO_DRAFT = 0
"""The candidate that drafts nothing."""

HYSTERESIS = 0.01
"""Share by which another candidate must be better before the choice changes."""


class StepCosts(NamedTuple):
    """Measured times of a step's parts, in milliseconds.

    Args:
        draft_ms: float32 [B + 1], drafting, by the number of active slots of a device.
        verify_ms: float32 [G + 1], verification with each budget, then of the uniform full block.
        plain_ms: float32 [B + 1], a step that knows no drafts, by the number of active slots of a device.
    """

    draft_ms: Any
    verify_ms: Any
    plain_ms: Any


def budget_numerators(capped: Array, is_active: Array, budgets: tuple[int, ...]) -> Array:
    """Sum up the tokens that this rank expects of each candidate.

    Args:
        capped: float32 [R, K], survivals of an earlier step, 0 where nothing may be verified.
        is_active: bool [R].
        budgets: G rising numbers of rows on each device, static.

    Returns:
        float32 [G + 2]; minus infinity where a budget cannot hold the active rows, which stays so in
        a sum over ranks.

    Source: spec/dspark.md sections 9.3 and 9.4.
    """
    ranked, _ = ranked_survivals(capped)
    gains = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(ranked)])
    num_active = is_active.sum(dtype=jnp.int32)
    room = jnp.asarray(budgets, jnp.int32) - num_active
    filled = jnp.where(room >= 0, gains[jnp.clip(room, 0, ranked.shape[0])], -jnp.inf)
    return num_active.astype(jnp.float32) + jnp.concatenate([gains[:1], filled, gains[-1:]])


def budget_thetas(numerators: Array, most_active: Array, costs: StepCosts) -> Array:
    """Divide the expected tokens of each candidate by its step's time.

    Args:
        numerators: float32 [G + 2], of one rank or summed over all.
        most_active: int32 [], active slots of the rank that has most.
        costs: times of one device, the same on every rank.

    Returns:
        Tokens per millisecond, float32 [G + 2].

    Source: spec/dspark.md sections 5.1, 9.3 and 9.4.
    """
    drafted_ms = costs.draft_ms[most_active] + costs.verify_ms
    return numerators / jnp.concatenate([costs.plain_ms[most_active][None], drafted_ms])


def choose_budget(thetas: Array, previous: Array) -> Array:
    """Choose the candidate with the most tokens per time, or stay where the gain is small.

    Args:
        thetas: float32 [G + 2].
        previous: int32 [], the choice of the step before; NOTHING if there is none.

    Returns:
        int32 []: the lowest of the best, or `previous` unless that is `HYSTERESIS` better.

    Source: spec/dspark.md section 9.4.
    """
    best = jnp.argmax(thetas).astype(jnp.int32)
    is_close = thetas[best] <= (1 + HYSTERESIS) * thetas[jnp.maximum(previous, 0)]
    return jnp.where((previous >= 0) & is_close, previous, best)


def chosen_lengths(
    choice: Array, capped: Array, caps: Array, is_active: Array, budgets: tuple[int, ...]
) -> Array:
    """Give the drafts to verify under a choice; a budget is filled, since its padding rows cost the same.

    Args:
        choice: int32 [], a candidate.
        capped: float32 [R, K], survivals of the current drafts, 0 where nothing may be verified.
        caps: int32 [R].
        is_active: bool [R], at most as many as the chosen budget has rows.
        budgets: G rising numbers of rows on each device, static.

    Returns:
        int32 [R], 0..K: none for no draft, `top_lengths` for a budget, the caps for the uniform block.

    Source: spec/dspark.md sections 9.3 and 9.4.
    """
    num_rows = jnp.asarray((0, *budgets, 0), jnp.int32)[choice]
    lengths = top_lengths(capped, num_rows - is_active.sum(dtype=jnp.int32))
    return jnp.where(choice == len(budgets) + 1, full_lengths(caps, is_active), lengths)
