"""Named intermediate values of a forward pass.

Separate because every part of the model may offer values and none should know who wants them.
A tap that nobody asked for costs nothing: it is decided while tracing.
Read next: `backbone.py`, which names the taps.
"""

from __future__ import annotations

from collections.abc import Callable

from ..arrays import Array

type Tap = Callable[[str, Array], None]
"""Offers a value under a name; the receiver keeps it or not."""


def no_tap(name: str, value: Array) -> None:
    """Keep nothing."""


class TapRecorder:
    """Collects the requested values of one trace.

    Args:
        names: full names to keep, such as "layers.3.attn.q".
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.values: dict[str, Array] = {}

    def wants(self, prefix: str) -> bool:
        """Whether a requested name lies under a prefix."""
        return any(name.startswith(prefix) for name in self.names)

    def scoped(self, prefix: str) -> Tap:
        """Give a tap whose names are put under a prefix."""
        if not self.wants(prefix):
            return no_tap

        def tap(name: str, value: Array) -> None:
            full_name = prefix + name
            if full_name in self.names:
                self.values[full_name] = value

        return tap

    def result(self) -> dict[str, Array]:
        """Give the collected values.

        Raises:
            ValueError: a requested name that no part of the model offered.
        """
        missing = sorted(self.names - set(self.values))
        if missing:
            raise ValueError(
                f"taps: got unknown names {missing}, expected names such as 'layers.3.attn.q' or "
                "'final.normed' of parts that this configuration has; see model/backbone.py"
            )
        return self.values


def under(tap: Tap, prefix: str) -> Tap:
    """Put a tap's names under a further prefix."""
    if tap is no_tap:
        return no_tap
    return lambda name, value: tap(prefix + name, value)
