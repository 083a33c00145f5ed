"""The layouts that have names.

Separate because they are examples to copy from: each is one expression.
Read next: `layout.py` for the words.
"""

from __future__ import annotations

from .errors import LayoutError
from .layout import EVERY_AXIS, SINGLE, Layout

_STORED_ONLY = ("experts", "heads", "o_groups")

PRESETS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        SINGLE,
        Layout("data", "many sequences at once of a model that fits on one device", {"slots": EVERY_AXIS}),
        Layout(
            "expert",
            "a model too large for one device, few sequences: all rows everywhere, experts divided",
            {"experts": EVERY_AXIS, "engram_rows": EVERY_AXIS},
        ),
        Layout(
            "data+expert",
            "throughput: sequences and experts over the same devices, as public deployments do",
            {"slots": EVERY_AXIS, "experts": EVERY_AXIS, "engram_rows": EVERY_AXIS},
        ),
        Layout(
            "tensor",
            "latency on a few devices: every layer divided; sums of parts, so equal only to rounding",
            {"heads": EVERY_AXIS, "ffn": EVERY_AXIS, "vocab": EVERY_AXIS, "engram_rows": EVERY_AXIS},
        ),
        Layout(
            "weights-only",
            "a model too large for one device, computed as on one: weights put together layer by layer",
            {"engram_rows": EVERY_AXIS},
            gathered=dict.fromkeys(_STORED_ONLY, EVERY_AXIS),
        ),
        Layout(
            "sequence",
            "the rows of one long prompt over the devices, experts too; decoding as `expert` does",
            {"rows": EVERY_AXIS, "experts": EVERY_AXIS, "engram_rows": EVERY_AXIS},
        ),
    )
}
"""Preset by name."""


def find_layout(layout: str | Layout) -> Layout:
    """Give a preset by its name; a layout is given back.

    Raises:
        LayoutError: a name that is no preset.
    """
    if isinstance(layout, Layout):
        return layout
    if layout not in PRESETS:
        raise LayoutError(
            f"layout: got {layout!r}, expected one of {list(PRESETS)}; choose one, or write a Layout(...)"
        )
    return PRESETS[layout]
