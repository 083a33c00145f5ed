"""What steps work on and what they tell: the state of slots, the tokens of a step. Values only.

Separate from `step.py` because several files have steps, and all of them share these.
Read next: `step.py`, `speculate.py`, `slot_steps.py`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

from .arrays import Array
from .model.cache import Cache
from .plans import PRIOR_CONFIDENCE
from .sampling.logits import Logprobs
from .sampling.state import SamplerState


class DraftState(struct.PyTreeNode):
    """What later steps remember of drafts.

    Attributes:
        survivals: float32 [B, K], how likely the latest drafts were to be accepted up to each, a guess before
            any; [B, 1] for a model without drafts.
        choice: int32 [], how many rows the latest step verified, as `speculate.py` numbers its choices.
        num_skipped: int32 [], steps without drafts since the latest with them.
    """

    survivals: Array
    choice: Array
    num_skipped: Array


class EngineState(struct.PyTreeNode):
    """State of B slots between steps.

    Attributes:
        cache: what the model keeps of the sequences.
        sampler: sampling parameters and counts.
        drafts: what is remembered of drafts.
        lengths: int32 [B], tokens in the cache; the next token's position.
        tokens: int32 [B], the latest sampled token, not yet in the cache.
        is_running: bool [B], whether the slot has a token to continue from.
        is_forbidden: bool [V], tokens that no request may get.
    """

    cache: Cache
    sampler: SamplerState
    drafts: DraftState
    lengths: Array
    tokens: Array
    is_running: Array
    is_forbidden: Array


class DraftOutput(struct.PyTreeNode):
    """What the host learns of the drafts of a step, for each of B slots.

    Attributes:
        num_verified: int32 [B], drafts that the model verified.
        num_accepted: int32 [B], drafts among the step's tokens: all but the last, or all if that is a stop
            token that was drafted.
        num_rows: int32 [B], rows that the model ran.
        logits: float32 [B, K], confidence in each draft, not calibrated.
        choice: int32 [B], how many rows were verified, as `speculate.py` numbers it; the same in all slots.
    """

    num_verified: Array
    num_accepted: Array
    num_rows: Array
    logits: Array
    choice: Array


class StepOutput(struct.PyTreeNode):
    """What the host learns of a step that gives each of B slots up to T tokens.

    Attributes:
        tokens: int32 [B, T].
        num_tokens: int32 [B], how many of them the slot got; the other fields count only for these.
        finish: int32 [B], after the last of them: RUNNING, STOPPED (it is a stop token) or LENGTH.
        is_invalid: bool [B], the logits after them held NaN, or left no token that may be sampled.
        logprobs: float32 [B, T], the model's log-probability of each token.
        top_ids: int32 [B, T, N], the model's most probable tokens.
        top_logprobs: float32 [B, T, N].
        prompt: log-probabilities of prompt tokens, where the step was told to report them.
        drafts: what became of drafts, where there were any.
    """

    tokens: Array
    num_tokens: Array
    finish: Array
    is_invalid: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array
    prompt: Logprobs | None = None
    drafts: DraftOutput | None = None


def prior_survivals(num_slots: int, size: int) -> Array:
    """Say how likely drafts are to be accepted before there were any: float32 [B, K]."""
    places = jnp.arange(1, size + 1, dtype=jnp.float32)
    return jnp.broadcast_to(jnp.float32(PRIOR_CONFIDENCE) ** places, (num_slots, size))


def state_words() -> EngineState:
    """Give the logical axes of the state's arrays, one tuple for all arrays below a field."""
    slots: Any = ("slots",)
    stacked: Any = ("layers", "slots")
    pages: Any = ("sources", "pages")
    whole: Any = ()
    cache = Cache(
        window=stacked,
        compressed=pages,
        page_table=slots,
        pending_kv=stacked,
        pending_score=stacked,
        engram_ids=slots,
        decoder_starts=slots,
    )
    drafts = DraftState(survivals=slots, choice=whole, num_skipped=whole)
    per_slot = {"sampler": slots, "lengths": slots, "tokens": slots, "is_running": slots}
    return EngineState(cache=cache, drafts=drafts, is_forbidden=whole, **per_slot)
