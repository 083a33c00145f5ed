"""Which physical places hold which routed experts: popular ones more than once, devices evenly loaded.

Separate because it is decided on the host from counts of past routing, in NumPy, between steps.
Read next: `expert_packing.py` (how a layer is balanced), `exchange.py` (which sends rows to the places).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import NOTHING
from .errors import LayoutError
from .expert_packing import pack_experts, replica_numbers


@dataclass(frozen=True)
class ExpertTable:
    """Where the experts of L layers are, P places over all devices, as many on each device.

    Device d of n holds the places d P / n to (d + 1) P / n - 1. A row's r-th share of expert e goes to
    place `replicas[l, e, r % num_replicas[l, e]]`.

    Args:
        logical_of_physical: int32 [L, P], expert that each place holds.
        replicas: int32 [L, E, most replicas of an expert], places of each expert, repeated from the start
            where it has fewer.
        num_replicas: int32 [L, E], different places of each expert, at least 1.
    """

    logical_of_physical: np.ndarray
    replicas: np.ndarray
    num_replicas: np.ndarray

    @property
    def num_experts(self) -> int:
        """E, experts that the router knows."""
        return self.num_replicas.shape[1]

    @property
    def num_places(self) -> int:
        """P, places over all devices."""
        return self.logical_of_physical.shape[1]


def identity_table(num_layers: int, num_experts: int) -> ExpertTable:
    """Give every expert the one place of its own number.

    Args:
        num_layers: L.
        num_experts: E.

    Returns:
        The table with P = E.
    """
    places = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
    return ExpertTable(places, places[:, :, None], np.ones_like(places))


def balance_experts(counts: np.ndarray, num_devices: int, num_redundant: int) -> ExpertTable:
    """Place experts so that every device gets about the same number of rows.

    The extra places go, one by one, to the expert with the most rows a replica, which makes the largest
    replica as small as it can be. Replicas are then packed, largest first, each onto the least loaded
    device with a free place; at last the most loaded device exchanges places with others while that
    helps. No device holds an expert twice. Equal counts give equal tables.

    As many redundant experts as devices, at most 64, keep the imbalance under 1.1 for 384 experts on 8 to
    64 devices whose counts follow Zipf's law with exponents 0.5 to 1.2.

    Args:
        counts: [L, E], rows that chose each expert, 0 or more.
        num_devices: n.
        num_redundant: places besides one for each expert; E + num_redundant must divide by n.

    Returns:
        The table with P = E + num_redundant.

    Raises:
        LayoutError: counts that are not [L, E] or negative, or places that do not divide evenly.

    Source: derived here, after the idea of redundant experts (spec/serving.md section 4).
    """
    loads = _checked_counts(counts)
    _require_places(loads.shape[1], num_devices, num_redundant)
    layers = [pack_experts(layer, num_devices, num_redundant) for layer in loads]
    return table_of(np.stack(layers), loads.shape[1])


def table_of(logical_of_physical: np.ndarray, num_experts: int) -> ExpertTable:
    """Complete a table from what each place holds.

    Args:
        logical_of_physical: int [L, P], an expert of 0..E-1 for each place.
        num_experts: E.

    Returns:
        The table.

    Raises:
        LayoutError: an unknown expert, or one without a place.
    """
    held = np.asarray(logical_of_physical, np.int32)
    if held.ndim != 2 or held.size == 0 or held.min() < 0 or held.max() >= num_experts:
        raise LayoutError(
            f"logical_of_physical: got shape {list(held.shape)} with experts {_range(held)}, expected "
            f"[layers, places] with experts 0..{num_experts - 1}; write the expert of each place"
        )
    num_replicas = np.stack([np.bincount(layer, minlength=num_experts) for layer in held])
    if not num_replicas.all():
        layer, expert = np.argwhere(num_replicas == 0)[0]
        raise LayoutError(
            f"logical_of_physical: expert {expert} of layer {layer} has no place, expected one for each of "
            f"{num_experts} experts; give it one"
        )
    # Sorted by expert, an expert's places lie one behind the other, in order.
    by_expert = np.argsort(held, axis=1, kind="stable")
    first = np.cumsum(num_replicas, axis=1) - num_replicas
    share = np.arange(num_replicas.max())[None, None, :] % num_replicas[:, :, None]
    places = np.take_along_axis(by_expert[:, :, None], first[:, :, None] + share, axis=1)
    return ExpertTable(held, places.astype(np.int32), num_replicas.astype(np.int32))


def device_loads(table: ExpertTable, counts: np.ndarray, num_devices: int) -> np.ndarray:
    """Count the rows of each device if an expert's rows are shared evenly among its replicas.

    Args:
        table: where experts are.
        counts: [L, E], rows that chose each expert.
        num_devices: n.

    Returns:
        float64 [L, n].

    Raises:
        LayoutError: counts of other layers or experts, or places that do not divide evenly.
    """
    loads = _checked_counts(counts)
    if loads.shape != table.num_replicas.shape:
        raise LayoutError(
            f"counts: got {list(loads.shape)}, expected {list(table.num_replicas.shape)} as the table has "
            "layers and experts; count the routing of the same model"
        )
    _require_places(table.num_experts, num_devices, table.num_places - table.num_experts)
    shares = loads / table.num_replicas
    of_places = np.take_along_axis(shares, table.logical_of_physical, axis=1)
    return of_places.reshape(len(loads), num_devices, -1).sum(axis=2)


def imbalance(table: ExpertTable, counts: np.ndarray, num_devices: int) -> np.ndarray:
    """Divide the load of the most loaded device by the mean; 1 is perfect.

    Args:
        table: where experts are.
        counts: [L, E], rows that chose each expert.
        num_devices: n.

    Returns:
        float64 [L]; 1 for a layer without rows.
    """
    loads = device_loads(table, counts, num_devices)
    mean = loads.mean(axis=1)
    return np.where(mean > 0, loads.max(axis=1) / np.where(mean > 0, mean, 1.0), 1.0)


def imbalance_bound(counts: np.ndarray, num_devices: int, num_redundant: int) -> np.ndarray:
    """Bound from below what any table can reach: some device holds the largest replica.

    bound = max(1, n min over replica numbers r of max_e counts_e / r_e / sum counts)

    Args:
        counts: [L, E], rows that chose each expert.
        num_devices: n.
        num_redundant: places besides one for each expert.

    Returns:
        float64 [L]; 1 for a layer without rows.
    """
    loads = _checked_counts(counts)
    _require_places(loads.shape[1], num_devices, num_redundant)
    largest = np.array(
        [(layer / replica_numbers(layer, num_devices, num_redundant)).max() for layer in loads]
    )
    total = loads.sum(axis=1)
    return np.maximum(1.0, largest * num_devices / np.where(total > 0, total, 1.0))


def routing_counts(expert_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Count the rows that chose each expert.

    Args:
        expert_ids: int [L, ..., K], experts that each row of a layer chose; NOTHING counts for none.
        num_experts: E.

    Returns:
        int64 [L, E].

    Raises:
        LayoutError: an id that is no expert.
    """
    ids = np.asarray(expert_ids)
    if ids.ndim < 2 or not np.issubdtype(ids.dtype, np.integer):
        raise LayoutError(
            f"expert_ids: got {ids.dtype} {list(ids.shape)}, expected integers [layers, ..., choices]; "
            "stack the router's ids of all layers"
        )
    known = ids[ids != NOTHING]
    if known.size and (known.min() < 0 or known.max() >= num_experts):
        raise LayoutError(
            f"expert_ids: got ids {_range(known)}, expected 0..{num_experts - 1} or {NOTHING} for no choice; "
            "count ids as the router gives them, before they become places"
        )
    layers = ids.reshape(len(ids), -1)
    return np.stack([np.bincount(layer[layer != NOTHING], minlength=num_experts) for layer in layers])


def _checked_counts(counts: np.ndarray) -> np.ndarray:
    loads = np.asarray(counts, np.float64)
    if loads.ndim != 2 or loads.size == 0 or not (np.isfinite(loads).all() and loads.min() >= 0):
        raise LayoutError(
            f"counts: got shape {list(loads.shape)} with values {_range(loads)}, expected [layers, "
            "experts] of numbers that are 0 or more; use routing_counts"
        )
    return loads


def _require_places(num_experts: int, num_devices: int, num_redundant: int) -> None:
    if num_devices < 1:
        raise LayoutError(
            f"num_devices: got {num_devices}, expected at least 1; count the devices of the mesh"
        )
    most = num_experts * (num_devices - 1)
    first = -num_experts % num_devices
    if num_redundant < 0 or num_redundant > most or (num_experts + num_redundant) % num_devices:
        working = [number for number in range(first, first + 4 * num_devices, num_devices) if number <= most]
        raise LayoutError(
            f"num_redundant: got {num_redundant} for {num_experts} experts on {num_devices} devices, "
            f"expected 0..{most} with {num_experts} + num_redundant a multiple of {num_devices}, so that "
            "devices hold equally many and none an expert twice; take one of "
            f"{', '.join(str(number) for number in working)}, ..."
        )


def _range(values: np.ndarray) -> str:
    return f"{values.min()}..{values.max()}" if values.size else "none"
