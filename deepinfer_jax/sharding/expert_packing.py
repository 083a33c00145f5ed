"""Balance the experts of one layer over devices: how many replicas, and which device holds them.

Separate because it is an algorithm on plain numbers; `experts.py` checks them and gives them meaning.
Read next: `experts.py`.
"""

from __future__ import annotations

import numpy as np

_FREE = -1

MAX_SWAPS = 1000
"""Exchanges of places after which the packing of a layer is taken as it is; tens are usual."""


def replica_numbers(loads: np.ndarray, num_devices: int, num_redundant: int) -> np.ndarray:
    """Give each extra place to the expert with the most rows a replica, at most one place a device.

    No other choice has a smaller largest replica.

    Args:
        loads: float64 [E], rows of each expert.
        num_devices: n.
        num_redundant: extra places, at most E (n - 1).

    Returns:
        int64 [E], replicas of each expert.
    """
    numbers = np.ones(len(loads), np.int64)
    shares = loads.copy()
    for _ in range(num_redundant):
        expert = int(np.argmax(np.where(numbers < num_devices, shares, -1.0)))
        numbers[expert] += 1
        shares[expert] = loads[expert] / numbers[expert]
    return numbers


def pack_experts(loads: np.ndarray, num_devices: int, num_redundant: int) -> np.ndarray:
    """Place the experts of one layer, none twice on a device.

    Args:
        loads: float64 [E], rows of each expert.
        num_devices: n.
        num_redundant: extra places; E + num_redundant divides by n.

    Returns:
        int64 [E + num_redundant], the expert of each place, those of device 0 first.
    """
    numbers = replica_numbers(loads, num_devices, num_redundant)
    shares = loads / numbers
    order = np.argsort(-shares, kind="stable")
    packing = _Packing(shares, num_devices, int(numbers.sum()) // num_devices)
    for expert in np.repeat(order, numbers[order]):
        packing.add(int(expert))
    for _ in range(MAX_SWAPS):
        if not packing.relieve():
            break
    # Within a device the order means nothing; sorted, tables are easier to read and compare.
    return np.sort(packing.experts, axis=1).reshape(-1)


class _Packing:
    """Replicas on devices while one layer is being packed."""

    def __init__(self, shares: np.ndarray, num_devices: int, places: int) -> None:
        self.shares = shares
        self.experts = np.full((num_devices, places), _FREE, np.int64)
        self.used = np.zeros(num_devices, np.int64)
        self.loads = np.zeros(num_devices)
        self.holds = np.zeros((num_devices, len(shares)), bool)

    def add(self, expert: int) -> None:
        """Put a replica onto the least loaded device that has a place and not yet this expert."""
        has_place = self.used < self.experts.shape[1]
        is_open = has_place & ~self.holds[:, expert]
        if is_open.any():
            self._put(int(np.argmin(np.where(is_open, self.loads, np.inf))), expert)
        else:
            self._make_room(int(np.argmax(has_place)), expert)

    def _put(self, device: int, expert: int) -> None:
        self.experts[device, self.used[device]] = expert
        self.used[device] += 1
        self.loads[device] += self.shares[expert]
        self.holds[device, expert] = True

    def _make_room(self, device: int, expert: int) -> None:
        """Fill a place of a device that has the expert already: another device gives it a different one.

        An expert has at most one replica a device, so a device without it exists; being full, it holds
        one expert that the device with a place does not.
        """
        donor = int(np.argmax(~self.holds[:, expert]))
        place = int(np.argmax(~self.holds[device, self.experts[donor]]))
        moved = int(self.experts[donor, place])
        self._replace(donor, place, expert)
        self._put(device, moved)

    def _replace(self, device: int, place: int, expert: int) -> None:
        old = self.experts[device, place]
        self.holds[device, [old, expert]] = False, True
        self.experts[device, place] = expert
        self.loads[device] += self.shares[expert] - self.shares[old]

    def relieve(self) -> bool:
        """Exchange a place of the most loaded device where that lowers the larger of both loads the most."""
        device = int(np.argmax(self.loads))
        given, taken = self.experts[device], self.experts
        change = self.shares[given][:, None, None] - self.shares[taken][None, :, :]
        larger = np.maximum(self.loads[device] - change, self.loads[None, :, None] + change)
        is_twice = self.holds[device, taken][None] | self.holds[:, given].T[:, :, None]
        larger = np.where(is_twice, np.inf, larger)
        place, donor, other = (int(index) for index in np.unravel_index(np.argmin(larger), larger.shape))
        # Rounding must not let two devices exchange the same places for ever.
        if larger[place, donor, other] >= self.loads[device] * (1 - 1e-12):
            return False
        mine, theirs = int(given[place]), int(taken[donor, other])
        self._replace(device, place, theirs)
        self._replace(donor, other, mine)
        return True
