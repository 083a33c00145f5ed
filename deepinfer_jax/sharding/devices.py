"""What one device can do: the table that predictions of time and of "fits" are made from.

Separate because these numbers come from data sheets and measurements, not from the model.
Read next: `roofline.py`, which divides by them.
"""

from __future__ import annotations

from .errors import LayoutError
from .layout_plan import DeviceSpec

GIBIBYTE = 2**30

REACHED = 0.65
"""Share of a device's peaks that programs reach.

On one H200, reading and writing memory reached 0.69 of the peak, a large matrix product 0.72 and grouped
products of few rows 0.70; collectives between two sent 0.54 to 0.66 (spec/platform.md section 8).
"""

COLLECTIVE_LATENCY = 50e-6
"""Seconds of the smallest collective.

As a jitted call of its own it took 91 to 105 us on two H200s (spec/platform.md section 8), of which a part
is the call; inside a step it is taken as half.
"""

DEVICES = {
    device.name: device
    for device in (
        DeviceSpec(
            *("H200", 139 * GIBIBYTE, 4.8e12, 989e12, 450e9, COLLECTIVE_LATENCY, REACHED),
            source="NVIDIA data sheet (peaks); memory as the driver reports it; calibrated on this device",
        ),
        DeviceSpec(
            *("B200", 178 * GIBIBYTE, 8e12, 2250e12, 900e9, COLLECTIVE_LATENCY, REACHED),
            source="NVIDIA data sheet (peaks, 191e9 bytes usable); not measured here, calibrated as the H200",
        ),
        DeviceSpec(
            *("Ascend950", 144 * 10**9, 4e12, 500e12, 1000e9, COLLECTIVE_LATENCY, REACHED),
            source="Huawei's public announcement of the Ascend 950DT, September 2025 (bfloat16 taken as half "
            "of FP8, one direction as half of 2 TB/s); not measured here, calibrated as the H200",
        ),
    )
}
"""Device by name."""


def find_device(device: str | DeviceSpec) -> DeviceSpec:
    """Give a device by its name; a `DeviceSpec` is given back.

    Args:
        device: a name of `DEVICES`, or the device itself.

    Returns:
        What it can do.

    Raises:
        LayoutError: a name that is not in the table.
    """
    if isinstance(device, DeviceSpec):
        return device
    if device not in DEVICES:
        raise LayoutError(
            f"device: got {device!r}, expected one of {list(DEVICES)}; choose one, or describe another with "
            "DeviceSpec(...)"
        )
    return DEVICES[device]
