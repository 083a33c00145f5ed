"""Rows to the devices that hold their experts, and the outputs back: exact for every routing.

Separate from `exchange.py` because it is the one exchange whose size depends on the data.
Read next: `exchange_plan.py`, which decides how; `../model/moe.py`, which calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import lax

from ..arrays import NOTHING, Array
from .exchange import (
    Meeting,
    Placement,
    add_words,
    all_gather,
    axes_index,
    axes_size,
    from_words,
    meeting,
    pad_rows,
    to_words,
)
from .exchange_plan import ExpertExchange, expert_exchange

type Compute = Callable[[Array, Array, Array], Array]
"""(x [R, D], int32 [R, K] experts of this device or NOTHING, float32 [R, K]) to outputs [R, K, D]."""


class ExpertPlaces(struct.PyTreeNode):
    """Where a layer's experts lie on a mesh; with a leading axis, where those of several layers do.

    Attributes:
        replicas: int32 [E, most replicas], physical places of each expert, repeated in turn.
        num_replicas: int32 [E], how many of them differ.
    """

    replicas: Array
    num_replicas: Array


def physical_experts(expert_ids: Array, table: ExpertPlaces | None, placement: Placement) -> Array:
    """Choose a physical place for each chosen expert.

    The replicas of an expert take turns over rows and choices. All hold the same bytes, so the choice
    changes no result.

    Args:
        expert_ids: int32 [R, K] logical experts, NOTHING for none.
        table: of the layer, or None where expert e lies at place e.
        placement: this device's; devices with other rows begin at other replicas.

    Returns:
        int32 [R, K] places, NOTHING for none.
    """
    if table is None:
        return expert_ids
    experts = jnp.maximum(expert_ids, 0)
    rows, choices = (jnp.arange(size, dtype=jnp.int32) for size in experts.shape)
    first = axes_index(placement.layout.axes_of("rows")) * placement.num_rows
    # Rows and choices added: counted through, an even number of choices would never reach odd replicas.
    turn = (first + rows[:, None] + choices[None, :]) % table.num_replicas[experts]
    return jnp.where(expert_ids >= 0, table.replicas[experts, turn], NOTHING)


def exchange_experts(
    compute: Compute, x: Array, places: Array, weights: Array, num_held: int, placement: Placement
) -> Array:
    """Compute every row's experts where they lie and bring each output home.

    Args:
        compute: the experts of this device.
        x: [R, D], float32 or bfloat16.
        places: int32 [R, K], physical places of the chosen experts over all devices, NOTHING for none.
        weights: float32 [R, K].
        num_held: experts of this device.
        placement: this device's.

    Returns:
        [R, K, D] in x's dtype; 0 where there is no expert.
    """
    layout, num_rows = placement
    axes = layout.axes_of("experts")
    if not axes:
        return compute(x, places, weights)
    # Only rows that can be valid travel; the tile is filled up again at home.
    rows = x[:num_rows], places[:num_rows], weights[:num_rows]
    where = meeting(layout, "experts")
    plan = expert_exchange(num_rows, places.shape[1], axes_size(where.common))
    if plan.is_gathered or not where.common:
        outputs = _gathered(compute, *rows, num_held, axes, where)
    else:
        outputs = _in_rounds(compute, *rows, num_held, axes, where, plan)
    return pad_rows(outputs, x.shape[0])


def _gathered(
    compute: Compute,
    x: Array,
    places: Array,
    weights: Array,
    num_held: int,
    axes: tuple[str, ...],
    where: Meeting,
) -> Array:
    """Show all rows to all devices: all-gather, then reduce-scatter of outputs that one device has each."""
    # Bytes a row: D and 2 K words to every device; K D back.
    words = all_gather(to_words((x, places, weights)), where.common)
    all_x, all_places, all_weights = from_words(words, (x, places, weights))
    held = _held(all_places, axes_index(axes), num_held)
    outputs = compute(all_x, held, all_weights)
    return from_words(add_words(to_words(outputs), where), x)


class _Pairs(NamedTuple):
    """The (row, choice) pairs of a device, P = R * K of them.

    Attributes:
        peers: int32 [P], place along the common axes of the device that holds the expert; the number of
            devices for pairs that do not travel from here.
        ranks: int32 [P], number of earlier pairs for the same device.
        held: int32 [P], place among the holder's experts.
    """

    peers: Array
    ranks: Array
    held: Array


def _in_rounds(
    compute: Compute,
    x: Array,
    places: Array,
    weights: Array,
    num_held: int,
    axes: tuple[str, ...],
    where: Meeting,
    plan: ExpertExchange,
) -> Array:
    """Send pairs in rounds of `capacity` for each peer until the fullest device has sent all."""
    pairs = _pairs(places, num_held, axes, where)
    flat_weights = weights.reshape(-1)
    row_words = to_words(x)
    count = jnp.zeros(plan.num_devices + 1, jnp.int32).at[pairs.peers].add(1)[:-1]
    # 4 bytes: how many rounds the fullest pair of devices needs, so that all take part in all of them.
    rounds = -(-lax.pmax(jnp.max(count), where.common) // plan.capacity)

    def exchange(turn: Array, words: Array) -> Array:
        slots = pairs.ranks - turn * plan.capacity
        is_sent = (slots >= 0) & (slots < plan.capacity) & (pairs.peers < plan.num_devices)
        buffer = jnp.where(is_sent, pairs.peers * plan.capacity + slots, plan.num_devices * plan.capacity)
        pair = jnp.full(plan.num_devices * plan.capacity, NOTHING, jnp.int32)
        pair = pair.at[buffer].set(jnp.arange(buffer.shape[0], dtype=jnp.int32), mode="drop")
        source = jnp.maximum(pair, 0)
        told = (jnp.where(pair >= 0, pairs.held[source], NOTHING)[:, None], flat_weights[source][:, None])
        sent = jnp.concatenate([row_words[source // plan.choices], to_words(told)], axis=1)
        # Bytes a pair: D and 2 words there, D back, over the common axes.
        received = _all_to_all(sent, where.common)
        got, held, routing = from_words(received, (x, *told))
        found = _all_to_all(to_words(compute(got, held, routing)[:, 0]), where.common)
        answer = found[jnp.minimum(buffer, found.shape[0] - 1)]
        return jnp.where(is_sent[:, None], answer, words)

    # Only pairs that were sent are ever replaced: the others stay zero, as their sum over `rest` needs.
    words = jnp.zeros((x.shape[0] * plan.choices, row_words.shape[1]), jnp.uint32)
    words = lax.fori_loop(0, rounds, exchange, words).reshape(x.shape[0], plan.choices, -1)
    return from_words(add_words(words, Meeting((), where.rest)), x)


def _pairs(places: Array, num_held: int, axes: tuple[str, ...], where: Meeting) -> _Pairs:
    flat = places.reshape(-1)
    owner = jnp.maximum(flat, 0) // num_held
    num_peers = axes_size(where.common)
    peer, is_mine = jnp.zeros_like(flat), flat >= 0
    # The owner's number counts along all the expert axes, the last one fastest.
    for axis in reversed(axes):
        coordinate, owner = owner % axes_size((axis,)), owner // axes_size((axis,))
        if axis in where.common:
            later = where.common[where.common.index(axis) + 1 :]
            peer = peer + coordinate * axes_size(later)
        else:
            is_mine = is_mine & (coordinate == axes_index((axis,)))
    peers = jnp.where(is_mine, peer, num_peers)
    is_for = peers[:, None] == jnp.arange(num_peers, dtype=jnp.int32)[None, :]
    earlier = jnp.cumsum(is_for.astype(jnp.int32), axis=0) - 1
    ranks = jnp.sum(jnp.where(is_for, earlier, 0), axis=1)
    return _Pairs(peers, ranks, jnp.maximum(flat, 0) % num_held)


def _all_to_all(words: Array, axes: tuple[str, ...]) -> Array:
    return lax.all_to_all(words, axes, split_axis=0, concat_axis=0, tiled=True)


def _held(places: Array, device: Array | int, num_held: int) -> Array:
    held = places - device * num_held
    return jnp.where((places >= 0) & (held >= 0) & (held < num_held), held, NOTHING)
