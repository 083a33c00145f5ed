"""How rows reach the devices that hold their experts, decided from sizes alone.

Separate from `exchange.py` because the planner predicts from the same decision what the step then does.
Read next: `exchange.py`, which carries it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GATHER_ROWS = 16
"""Rows of a device up to which all devices see all rows: two collectives, the fewest there can be."""

CAPACITY_FACTOR = 1.5
"""Places for each pair of devices, over what even routing needs."""

MIN_CAPACITY = 4
"""Fewest places for each pair of devices."""


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """How the (row, chosen expert) pairs of `num_rows` rows a device reach `num_devices` devices.

    Args:
        num_rows: rows of one device.
        choices: experts that each row chose.
        num_devices: that hold different rows and different experts.
        capacity: pairs that one device sends to another in one round of all-to-all; 0 if all rows go to
            all devices instead.
    """

    num_rows: int
    choices: int
    num_devices: int
    capacity: int

    @property
    def is_gathered(self) -> bool:
        """Whether all rows go to all devices."""
        return self.capacity == 0


def expert_exchange(num_rows: int, choices: int, num_devices: int) -> ExpertExchange:
    """Decide how rows reach their experts.

    Few rows are gathered: a device then sends num_rows (devices - 1) rows and gets `choices` outputs for
    each of its own. Many rows travel in rounds with `capacity` places for each pair of devices; what
    does not fit waits for the next round, so no routing loses a token.

    Args:
        num_rows: rows of one device.
        choices: experts that each row chose.
        num_devices: that hold different rows and different experts.

    Returns:
        The decision.

    Source: derived here; spec/platform.md section 8 (a small collective costs about 0.1 ms).
    """
    if num_rows <= GATHER_ROWS:
        return ExpertExchange(num_rows, choices, num_devices, capacity=0)
    pairs = num_rows * choices
    even = pairs / num_devices
    capacity = min(pairs, max(MIN_CAPACITY, math.ceil(CAPACITY_FACTOR * even)))
    return ExpertExchange(num_rows, choices, num_devices, capacity)
