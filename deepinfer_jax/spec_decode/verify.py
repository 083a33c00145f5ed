"""Which drafts are accepted, and the law of the token after them: coupled, or by rejection sampling.

Both leave the law of the output as plain decoding has it. Coupled verification compares drafts with the
tokens that plain decoding chooses, so its output is the same under every schedule; rejection sampling
needs the laws and uniform numbers, and a schedule that does not look ahead.
Separate from `schedule.py` because acceptance knows no confidence.
Read next: `block_verify.py`, the third mode; `laws.py`, which draws the token after the drafts.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..arrays import Array
from .laws import residual_law
from .schedule import leading_count


def accept_coupled(drafts: Array, targets: Array, lengths: Array) -> Array:
    """Accept drafts while they are what the target chooses at their positions.

    Args:
        drafts: int32 [B, K].
        targets: int32 [B, K + 1], token that plain decoding chooses after each row; token m of a slot
            with m accepted drafts comes after them.
        lengths: int32 [B], drafts that were verified.

    Returns:
        Accepted drafts, int32 [B].

    Source: spec/dspark.md section 4.3.
    """
    return leading_count((drafts == targets[:, :-1]) & _is_verified(drafts, lengths))


def accept_rejection(
    target_law: Array, draft_law: Array, drafts: Array, lengths: Array, uniforms: Array
) -> tuple[Array, Array]:
    """Accept each draft x with probability min(1, p(x) / q(x)), until one is rejected.

    A draft that was not verified is not rejected: after the last verified one, all accepted, the next
    token has the target's law itself. After a rejection it has max(p - q, 0) / Z.

    Args:
        target_law: p, float32 [B, K + 1, V]; row j is the law of draft j + 1, row l that after l drafts.
        draft_law: q, float32 [B, K, V], laws the drafts were drawn from.
        drafts: int32 [B, K].
        lengths: int32 [B], drafts that were verified.
        uniforms: float32 [B, K], in [0, 1).

    Returns:
        Accepted drafts, int32 [B], and the law of the token after them, float32 [B, V].

    Source: spec/dspark.md section 4.1.
    """
    chance, drafted_with = law_at_drafts(target_law[:, :-1], drafts), law_at_drafts(draft_law, drafts)
    is_accepted = uniforms * drafted_with < chance
    num_accepted = leading_count(is_accepted & _is_verified(drafts, lengths))
    scale = jnp.ones(drafts.shape[0], jnp.float32)
    return num_accepted, final_law(target_law, draft_law, num_accepted, lengths, scale)


def final_law(
    target_law: Array, draft_law: Array, num_accepted: Array, lengths: Array, scale: Array
) -> Array:
    """Give the law of the token after the accepted drafts.

    Args:
        target_law: p, float32 [B, K + 1, V].
        draft_law: q, float32 [B, K, V].
        num_accepted: int32 [B].
        lengths: int32 [B], drafts that were verified.
        scale: float32 [B], factor of p in the residual.

    Returns:
        float32 [B, V]: the target's law if all verified drafts were accepted, else the residual.

    Source: spec/dspark.md sections 4.1 and 4.2.
    """
    last_draft = jnp.minimum(num_accepted, draft_law.shape[1] - 1)
    target = jnp.take_along_axis(target_law, num_accepted[:, None, None], axis=1)[:, 0]
    draft = jnp.take_along_axis(draft_law, last_draft[:, None, None], axis=1)[:, 0]
    is_rejected = num_accepted < lengths
    return jnp.where(is_rejected[:, None], residual_law(target, draft, scale), target)


def law_at_drafts(law: Array, drafts: Array) -> Array:
    """Read the probability of each draft: float32 [B, K] of float32 [B, K, V] and int32 [B, K]."""
    return jnp.take_along_axis(law, drafts[:, :, None], axis=2)[:, :, 0]


def emitted(drafts: Array, num_accepted: Array, last: Array) -> Array:
    """Put the token after the accepted drafts behind them.

    Args:
        drafts: int32 [B, K].
        num_accepted: m, int32 [B].
        last: int32 [B].

    Returns:
        int32 [B, K + 1]: m drafts, then `last`, which also fills the rest.
    """
    is_draft = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :] < num_accepted[:, None]
    return jnp.concatenate([jnp.where(is_draft, drafts, last[:, None]), last[:, None]], axis=1)


def cut_at_stop(tokens: Array, num_tokens: Array, stop_ids: Array) -> tuple[Array, Array]:
    """End each slot's tokens with the first stop token among them.

    As many verified rows stay in the caches as tokens: the anchor's and those of the tokens but the last.

    Args:
        tokens: int32 [B, T], at least 0.
        num_tokens: int32 [B], how many of them count.
        stop_ids: int32 [B, S], padded with NOTHING.

    Returns:
        Tokens that count, the stop token included, int32 [B], and whether there is one, bool [B].

    Source: spec/dspark.md section 4.1.
    """
    before = leading_count(~(tokens[:, :, None] == stop_ids[:, None, :]).any(axis=-1))
    return jnp.minimum(num_tokens, before + 1), before < num_tokens


def _is_verified(drafts: Array, lengths: Array) -> Array:
    return jnp.arange(drafts.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
