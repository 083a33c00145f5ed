"""The verify pass: rows of anchors and drafts through the model, and which drafts are accepted.

Separate from `verify.py` because that compares tokens and laws, and this is where they come from.
Read next: `pack.py` (rows), `verify.py` and `block_verify.py` (acceptance).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from ..arrays import NOTHING, Array
from ..config import ModelConfig
from ..model.backbone import backbone, head_logits
from ..model.cache import Cache
from ..model.numerics import Numerics
from ..model.rows import Rows, chunk_rows, text_rows
from ..model.weights import Weights
from ..sampling.logits import token_logprobs
from ..sampling.randomness import ACCEPT_DRAFT, LAST_TOKEN, uniform
from ..sampling.sample import RowPlaces, Sampled, sample_rows
from ..sampling.state import SamplerState
from ..sharding.layout import SINGLE, Layout
from .block_verify import accept_block
from .draft import Anchors, Drafts
from .laws import draw
from .pack import pack_rows
from .verify import accept_coupled, accept_rejection, emitted


class Verdict(struct.PyTreeNode):
    """What a verify pass found for each of B slots.

    Attributes:
        tokens: int32 [B, T], accepted drafts and the token after them.
        num_tokens: int32 [B].
        is_invalid: bool [B, T], no token could be chosen at this place.
        logprobs: float32 [B, T].
        top_ids: int32 [B, T, N].
        top_logprobs: float32 [B, T, N].
    """

    tokens: Array
    num_tokens: Array
    is_invalid: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array


def verify_drafts(
    cache: Cache,
    *,
    is_dense: bool,
    num_rows: int | None,
    weights: Weights,
    anchors: Anchors,
    sampler: SamplerState,
    is_forbidden: Array,
    drafts: Drafts,
    lengths: Array,
    config: ModelConfig,
    numerics: Numerics,
    verification: str,
    num_logprobs: int,
    layout: Layout = SINGLE,
) -> tuple[Cache, Verdict]:
    """Run the anchors and some drafts of all slots and decide which drafts are accepted.

    Args:
        cache: state of the slots; consumed.
        is_dense: whether every slot has all K + 1 rows, used or not, or only those in use follow each other.
        num_rows: rows of the step if it is not dense (static), enough for all by default.
        weights: the loaded weights.
        anchors: latest tokens.
        sampler: state of the slots.
        is_forbidden: bool [V], tokens that no request may get.
        drafts: of the slots.
        lengths: int32 [B], drafts of each that are verified.
        config: the architecture.
        numerics: the choice of arithmetic (static).
        verification: "coupled", "rejection" or "block" (static).
        num_logprobs: N, most probable tokens to report.
        layout: as in `model.backbone.backbone` (static).

    Returns:
        The cache with the rows of all drafts that were verified, and what was found.

    Source: spec/dspark.md sections 4 and 9.2.
    """
    num_slots, size = drafts.token_ids.shape
    rows, places, row_of = _rows(anchors, drafts, lengths, is_dense, num_rows)
    hidden, _, cache = backbone(weights, config, rows, cache, numerics, layout=layout)
    logits = head_logits(hidden, weights, numerics, layout, rows.is_valid)
    sampled = sample_rows(
        *(logits, places, sampler, is_forbidden),
        num_logprobs=num_logprobs,
        tile=numerics.sampled_together,
        wants_law=verification != "coupled",
    )
    of_slots: Sampled = jax.tree.map(lambda array: array[row_of], sampled)
    verdict = Verdict(
        tokens=of_slots.tokens,
        num_tokens=1 + accept_coupled(drafts.token_ids, of_slots.tokens, lengths),
        is_invalid=of_slots.is_invalid,
        logprobs=of_slots.logprob,
        top_ids=of_slots.top_ids,
        top_logprobs=of_slots.top_logprobs,
    )
    if verification == "coupled":
        return cache, verdict
    tokens, num_accepted = _accept_by_law(of_slots, drafts, lengths, anchors, sampler, verification)
    flat = token_logprobs(logits[row_of.reshape(-1)], tokens.reshape(-1), 0).logprobs
    logprobs = flat.reshape(num_slots, size + 1)
    return cache, verdict.replace(tokens=tokens, num_tokens=1 + num_accepted, logprobs=logprobs)


def _rows(
    anchors: Anchors, drafts: Drafts, lengths: Array, is_dense: bool, num_rows: int | None
) -> tuple[Rows, RowPlaces, Array]:
    """Lay out anchors and drafts as rows.

    Returns:
        The rows; whose they are; int32 [B, K + 1], row of each place in a slot's block, anything in range
        where there is none.
    """
    num_slots, size = drafts.token_ids.shape
    block = jnp.concatenate([anchors.token_ids[:, None], drafts.token_ids], axis=1)
    places = jnp.arange(size + 1, dtype=jnp.int32)[None, :]
    if is_dense:
        rows = chunk_rows(block, anchors.positions, jnp.where(anchors.is_active, 1 + lengths, 0))
        slots, offsets = rows.slots, jnp.tile(places[0], num_slots)
        row_of = jnp.arange(num_slots, dtype=jnp.int32)[:, None] * (size + 1) + places
    else:
        count = num_slots * (size + 1) if num_rows is None else num_rows
        packed = pack_rows(lengths, anchors.is_active, count)
        slots, offsets = jnp.maximum(packed.slots, 0), packed.offsets
        positions = anchors.positions[slots] + offsets
        rows = text_rows(block[slots, offsets], slots, positions, packed.slots != NOTHING, rows_per_block=1)
        row_of = jnp.minimum(packed.first_rows[:, None] + places, count - 1)
    is_before = jnp.arange(size, dtype=jnp.int32)[None, :] < offsets[:, None]
    new_ids = jnp.where(is_before, drafts.token_ids[slots], NOTHING)
    return rows, RowPlaces(slots, new_ids, rows.positions + 1, rows.is_valid), row_of


def _accept_by_law(
    sampled: Sampled,
    drafts: Drafts,
    lengths: Array,
    anchors: Anchors,
    sampler: SamplerState,
    verification: str,
) -> tuple[Array, Array]:
    """Accept drafts by comparing laws: int32 [B, K + 1] tokens, int32 [B] accepted drafts."""
    assert sampled.law is not None and drafts.laws is not None
    seeds, size = sampler.seeds, drafts.token_ids.shape[1]
    first = anchors.positions + 1
    chances = jnp.stack([uniform(seeds, first + place, ACCEPT_DRAFT) for place in range(size)], axis=1)
    accept = accept_block if verification == "block" else accept_rejection
    num_accepted, law = accept(sampled.law, drafts.laws, drafts.token_ids, lengths, chances)
    last = draw(law, uniform(seeds, first + num_accepted, LAST_TOKEN))
    return emitted(drafts.token_ids, num_accepted, last), num_accepted
