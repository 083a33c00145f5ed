"""What moves a sequence: to a snapshot and back, to the host and into another engine.

Separate from `step.py` because nothing here computes: bytes are copied, so that a sequence goes on
bitwise as if it had never been elsewhere. Slots and snapshots of one sequence are on the same devices.
Read next: `model/cache.py` (what is copied), `engine/runner.py` (who calls it).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from .arrays import Array
from .config import CacheConfig, ModelConfig
from .model.cache import CompressedPages, SlotCache, empty_cache, slot_cache
from .model.numerics import Numerics
from .sampling.state import note_tokens
from .sharding.exchange import axes_size
from .sharding.target import ONE_DEVICE, Target
from .step import EngineState, state_words

STACKED: Any = ("layers", "slots")
SLOTS: Any = ("slots",)
SLOT_WORDS = SlotCache(window=STACKED, pending_kv=STACKED, pending_score=STACKED, engram_ids=SLOTS)
PAGE_WORDS: Any = ("sources", "pages")
NUMBERS: Any = ()


class Sequence(struct.PyTreeNode):
    """All that the devices hold of one sequence, a place for it on every share of the slots.

    Attributes:
        slot: rings, one slot a share; only that of the sequence's share counts.
        pages: by compress ratio, as many pages a share as a slot can have.
    """

    slot: SlotCache
    pages: dict[int, CompressedPages]


SEQUENCE_WORDS = Sequence(slot=SLOT_WORDS, pages=PAGE_WORDS)  # pyright: ignore[reportArgumentType]


@partial(jax.jit, static_argnames=("num_snapshots", "config", "sizes", "numerics", "target"))
def empty_snapshots(
    *,
    num_snapshots: int,
    config: ModelConfig,
    sizes: CacheConfig,
    numerics: Numerics,
    target: Target = ONE_DEVICE,
) -> SlotCache:
    """Make places for snapshots of slots.

    Args:
        num_snapshots: over all devices.
        config: the architecture.
        sizes: of the slots; their rings are copied.
        numerics: the choice of arithmetic.
        target: where they lie.

    Returns:
        The places, as slots.
    """

    def make(_: Array) -> SlotCache:
        own = num_snapshots // axes_size(target.layout.axes_of("slots"))
        places = replace(sizes, num_slots=own, pages_per_slot=1, num_pages=1)
        return slot_cache(empty_cache(config, places, numerics))

    return target.run(make, jnp.zeros((), jnp.int32), words=(NUMBERS,), out=SLOT_WORDS)


@partial(jax.jit, static_argnames=("target",), donate_argnames=("snapshots",))
def save_step(
    snapshots: SlotCache, state: EngineState, snapshot: Array, slot: Array, *, target: Target = ONE_DEVICE
) -> SlotCache:
    """Copy a slot into a snapshot. Consumes `snapshots`.

    Args:
        snapshots: all of them.
        state: state of the slots.
        snapshot: int32 [], which one to overwrite.
        slot: int32 [], which slot to copy.
        target: where the state lies.

    Returns:
        The snapshots.
    """

    def save(snapshots: SlotCache, state: EngineState, snapshot: Array, slot: Array) -> SlotCache:
        return _copy(slot_cache(state.cache), snapshots, slot, snapshot, target)

    arguments = (snapshots, state, snapshot, slot)
    words = (SLOT_WORDS, state_words(), NUMBERS, NUMBERS)
    return target.run(save, *arguments, words=words, out=SLOT_WORDS)


@partial(jax.jit, static_argnames=("target",), donate_argnames=("state",))
def restore_step(
    state: EngineState, snapshots: SlotCache, slot: Array, snapshot: Array, *, target: Target = ONE_DEVICE
) -> EngineState:
    """Copy a snapshot into a slot. Consumes `state`.

    Args:
        state: state of the slots.
        snapshots: all of them.
        slot: int32 [], which slot to overwrite.
        snapshot: int32 [], which one to copy.
        target: where the state lies.

    Returns:
        The state; the slot's length and parameters are not changed.
    """

    def restore(state: EngineState, snapshots: SlotCache, slot: Array, snapshot: Array) -> EngineState:
        return _with_slots(state, _copy(snapshots, slot_cache(state.cache), snapshot, slot, target))

    arguments = (state, snapshots, slot, snapshot)
    words = (state_words(), SLOT_WORDS, NUMBERS, NUMBERS)
    return target.run(restore, *arguments, words=words, out=state_words())


@partial(jax.jit, static_argnames=("target",), donate_argnames=("state",))
def note_step(
    state: EngineState, slot: Array, token_ids: Array, num_tokens: Array, *, target: Target = ONE_DEVICE
) -> EngineState:
    """Note for the penalties the tokens of a sequence that will not come as rows. Consumes `state`.

    Args:
        state: state of the slots; the slot has its prompt length.
        slot: int32 [], where they belong.
        token_ids: int32 [N], from position 0.
        num_tokens: int32 [], how many of them count.
        target: where the state lies.

    Returns:
        The state.
    """

    def note(state: EngineState, slot: Array, token_ids: Array, num_tokens: Array) -> EngineState:
        num_slots = state.lengths.shape[0]
        positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        place, is_here = _own(slot, num_slots, target)
        is_valid = (positions < num_tokens) & is_here
        slots = jnp.full(token_ids.shape, place, jnp.int32)
        return state.replace(sampler=note_tokens(state.sampler, slots, positions, token_ids, is_valid))

    arguments = (state, slot, token_ids, num_tokens)
    words = (state_words(), NUMBERS, NUMBERS, NUMBERS)
    return target.run(note, *arguments, words=words, out=state_words())


@partial(jax.jit, static_argnames=("target",))
def export_step(state: EngineState, slot: Array, pages: Array, *, target: Target = ONE_DEVICE) -> Sequence:
    """Copy all of a sequence out.

    Args:
        state: state of the slots.
        slot: int32 [], where it runs.
        pages: int32 [pages of a slot], its pages in order, NOTHING after them.
        target: where the state lies.

    Returns:
        The sequence.
    """

    def export(state: EngineState, slot: Array, pages: Array) -> Sequence:
        rings = slot_cache(state.cache)
        place, _ = _own(slot, rings.engram_ids.shape[0], target)
        num_pages = min(one.kv.shape[1] for one in state.cache.compressed.values())
        own, is_own = _own(pages, num_pages, target, "pages")
        chosen = jnp.where(is_own, own, 0)
        return Sequence(
            slot=_take(rings, place),
            pages=jax.tree.map(lambda array: array[:, chosen], state.cache.compressed),
        )

    words = (state_words(), NUMBERS, NUMBERS)
    return target.run(export, state, slot, pages, words=words, out=SEQUENCE_WORDS)


@partial(jax.jit, static_argnames=("target",), donate_argnames=("state",))
def import_step(
    state: EngineState, sequence: Sequence, slot: Array, pages: Array, *, target: Target = ONE_DEVICE
) -> EngineState:
    """Copy a sequence into a slot and its pages. Consumes `state`.

    Args:
        state: state of the slots.
        sequence: from `export_step`, its content in the place of the slot's share.
        slot: int32 [], where it will run.
        pages: int32 [pages of a slot], pages for it, NOTHING after them.
        target: where the state lies.

    Returns:
        The state; the slot's length and parameters are not changed.
    """

    def put(state: EngineState, sequence: Sequence, slot: Array, pages: Array) -> EngineState:
        state = _with_slots(state, _put(sequence.slot, slot_cache(state.cache), slot, target))

        def write(old: Array, new: Array) -> Array:
            own, is_own = _own(pages, old.shape[1], target, "pages")
            return old.at[:, jnp.where(is_own, own, old.shape[1])].set(new, mode="drop")

        compressed = jax.tree.map(write, state.cache.compressed, sequence.pages)
        return state.replace(cache=state.cache.replace(compressed=compressed))

    arguments = (state, sequence, slot, pages)
    words = (state_words(), SEQUENCE_WORDS, NUMBERS, NUMBERS)
    return target.run(put, *arguments, words=words, out=state_words())


def slot_axis(name: str) -> int:
    """Give the axis of an array of `SlotCache` that counts slots."""
    return getattr(SLOT_WORDS, name).index("slots")


def _own(number: Array, count: int, target: Target, word: str = "slots") -> tuple[Array, Array]:
    """Turn numbers over all devices into this device's own, 0 for those of others; tell which are its own."""
    own = number - target.shard(word) * count
    is_own = (number >= 0) & (own >= 0) & (own < count)
    return jnp.where(is_own, own, 0), is_own


def _take(source: SlotCache, slot: Array) -> SlotCache:
    """Take one slot as slots of one."""
    return SlotCache(
        **{
            name: jax.lax.dynamic_slice_in_dim(array, slot, 1, axis=slot_axis(name))
            for name, array in vars(source).items()
        }
    )


def _put(one: SlotCache, destination: SlotCache, slot: Array, target: Target) -> SlotCache:
    """Overwrite a slot, on the device that has it."""
    count = destination.engram_ids.shape[0]
    own, is_own = _own(slot, count, target)
    place = jnp.where(is_own, own, count)
    return SlotCache(
        window=destination.window.at[:, place].set(one.window[:, 0], mode="drop"),
        pending_kv=destination.pending_kv.at[:, place].set(one.pending_kv[:, 0], mode="drop"),
        pending_score=destination.pending_score.at[:, place].set(one.pending_score[:, 0], mode="drop"),
        engram_ids=destination.engram_ids.at[place].set(one.engram_ids[0], mode="drop"),
    )


def _copy(source: SlotCache, destination: SlotCache, start: Array, end: Array, target: Target) -> SlotCache:
    place, _ = _own(start, source.engram_ids.shape[0], target)
    return _put(_take(source, place), destination, end, target)


def _with_slots(state: EngineState, rings: SlotCache) -> EngineState:
    return state.replace(cache=state.cache.replace(**vars(rings)))
