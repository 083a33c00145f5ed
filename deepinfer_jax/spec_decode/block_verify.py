"""Block verification: accept the longest prefix that is probable as a whole.

It accepts at least as many drafts as the token rule of `verify.py` on average, from the same laws and
uniform numbers. Separate because its thresholds look at all laws of a block.
Read next: `verify.py`, whose token rule it generalises.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from ..arrays import Array
from .verify import final_law, law_at_drafts


def accept_block(
    target_law: Array, draft_law: Array, drafts: Array, lengths: Array, uniforms: Array
) -> tuple[Array, Array]:
    """Accept the longest prefix whose uniform number is below its threshold.

        r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)),  s_i = sum_v max(r_i p_{i+1}(v) - q_{i+1}(v), 0)
        h_i = s_i / (s_i + 1 - r_i) for i < l,  h_l = r_l;  m = largest i with u_i < h_i, or 0

    The token after m < l drafts has the law max(r_m p - q, 0) / Z, after all l the target's.

    Args:
        target_law: p, float32 [B, K + 1, V]; row j is the law of draft j + 1, row l that after l drafts.
        draft_law: q, float32 [B, K, V], laws the drafts were drawn from.
        drafts: int32 [B, K].
        lengths: l, int32 [B], drafts that were verified.
        uniforms: float32 [B, K], in [0, 1).

    Returns:
        Accepted drafts m, int32 [B], and the law of the token after them, float32 [B, V].

    Source: spec/dspark.md section 4.2, with u < h for u <= h: a uniform 0 must not accept what cannot be.
    """
    chance, drafted_with = law_at_drafts(target_law[:, :-1], drafts), law_at_drafts(draft_law, drafts)
    ratios = jnp.stack(list(_prefix_ratios(chance, drafted_with)), axis=1)
    rest = jnp.maximum(ratios[:, :-1, None] * target_law[:, :-1] - draft_law, 0.0).sum(axis=-1)
    # The last position has no law after it that a longer prefix could need.
    denominator = (rest + (1 - ratios[:, :-1]))[:, 1:]
    inner = jnp.where(denominator > 0, rest[:, 1:] / jnp.where(denominator > 0, denominator, 1.0), 1.0)
    thresholds = jnp.concatenate([inner, ratios[:, -1:]], axis=1)
    place = jnp.arange(1, drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    thresholds = jnp.where(place == lengths[:, None], ratios[:, 1:], thresholds)
    is_below = (uniforms < thresholds) & (place <= lengths[:, None])
    num_accepted = jnp.where(is_below, place, 0).max(axis=1)
    scale = jnp.take_along_axis(ratios, num_accepted[:, None], axis=1)[:, 0]
    return num_accepted, final_law(target_law, draft_law, num_accepted, lengths, scale)


def _prefix_ratios(chance: Array, drafted_with: Array) -> Iterator[Array]:
    """Yield r_0 = 1, r_1 .. r_K, each float32 [B]."""
    ratio = jnp.ones(chance.shape[0], jnp.float32)
    yield ratio
    for position in range(chance.shape[1]):
        target, draft = ratio * chance[:, position], drafted_with[:, position]
        # Where q is not above r p the ratio is 1, without a division that could overflow.
        is_rare = target < draft
        ratio = jnp.where(is_rare, target / jnp.where(is_rare, draft, 1.0), jnp.where(target > 0, 1.0, 0.0))
        yield ratio
