"""Measured step times of one engine on one device: what a schedule weighs tokens against. NumPy only.

Separate because a table is measured once, kept on disk, and read by engines that only trust it if it is
theirs.
Read next: `guard.py`, which compares a table with the steps themselves; `budgets.py`, which weighs by it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAX_AGE_DAYS = 30
"""A table older than this is measured again: drivers and neighbours change."""

ROWS_PER_SLOT = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Rows of a budget for each slot where every budget is a program of its own; the full block is added."""

_FORMAT = "deepinfer_jax cost table"
_VERSION = 2


_TIMES = ("verify_ms", "draft_ms", "plain_ms")


class CostTableError(ValueError):
    """A cost table that cannot be, or a file that holds none."""


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """All that step times depend on; a table holds for one of these.

    Args:
        device: kind of device, as JAX names it, and how many if several.
        jax_version: of the measurement.
        model: name of the checkpoint.
        numerics: name of the numerics.
        num_slots: slots of each device.
        pages_per_slot: pages that one sequence can have, which bounds its context.
        block_size: drafts of a block, K.
        row_tile: rows of a tile where tiles without rows are skipped, None where every budget is compiled.
        layout: name of the layout.
    """

    device: str
    jax_version: str
    model: str
    numerics: str
    num_slots: int
    pages_per_slot: int
    block_size: int
    row_tile: int | None
    layout: str = "single"

    def key(self) -> str:
        """Give a file name for it: readable, and different for different engines."""
        words = f"{self.device}-{self.model}-{self.num_slots}-slots"
        readable = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:60]
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return f"{readable}-{digest}"


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured step times, in milliseconds.

    Args:
        engine: what was measured.
        date: day of the measurement, ISO format.
        verify_ms: rows of a step -> its time without drafting.
        draft_ms: running slots -> what drafting adds.
        uniform_ms: time without drafting of a step that verifies the full block of every slot.
        plain_ms: running slots -> time of a step that knows no drafts; without any, that of verifying as
            many rows.

    Raises:
        CostTableError: nothing measured, a size out of range, a time that is not positive, or no date.

    Source: spec/dspark.md section 5.3.
    """

    engine: MeasuredEngine
    date: str
    verify_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    uniform_ms: float
    plain_ms: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TIMES:
            points = sorted(getattr(self, name).items())
            is_valid = all(size >= 1 and _is_time(value) for size, value in points)
            is_valid = is_valid and (bool(points) or name == "plain_ms")
            # Drafting may cost less than can be measured; a step cannot.
            is_valid = is_valid and (name == "draft_ms" or not points or points[0][1] > 0)
            _require(is_valid, name, dict(points), "sizes >= 1 with milliseconds, positive for a step")
            object.__setattr__(self, name, dict(points))
        is_valid = _is_time(self.uniform_ms) and self.uniform_ms > 0
        _require(is_valid, "uniform_ms", self.uniform_ms, "positive milliseconds")
        try:
            datetime.date.fromisoformat(self.date)
        except (TypeError, ValueError) as error:
            raise CostTableError(
                f"cost table: date: got {self.date!r}, expected a day such as 2026-11-30; measure again"
            ) from error

    def arrays(self, budgets: Sequence[int], num_slots: int) -> tuple[NDArray[np.float32], ...]:
        """Give the times that the schedule's candidates are weighed by.

        Between measured sizes the time is linear, beyond the last it goes on with the last slope; a larger
        size never takes less. With tiles the rows are rounded up to whole ones first.

        Args:
            budgets: rows of the candidates 1..G, rising.
            num_slots: slots.

        Returns:
            Milliseconds: what drafting adds by running slots, float32 [num_slots + 1]; the step without
            drafting, float32 [G + 1]: of each budget, then of the uniform full block; and the step that knows
            no drafts by running slots, float32 [num_slots + 1].

        Source: spec/dspark.md sections 5.3 and 9.3.
        """
        slots = np.arange(num_slots + 1, dtype=np.int64)
        draft = _at(self.draft_ms, slots)
        verify = _at(self.verify_ms, self._whole_tiles(np.asarray(budgets, np.int64)))
        plain = _at(self.plain_ms, slots) if self.plain_ms else self.row_ms(num_slots)
        parts = (draft, np.append(verify, self.uniform_ms), plain)
        return tuple(part.astype(np.float32) for part in parts)

    def row_ms(self, max_rows: int) -> NDArray[np.float32]:
        """Give the time of a step without drafting by its rows, for the paper's Algorithm 1.

        A step pays for the shape that it is padded to: a whole tile, or without tiles the next measured size.

        Args:
            max_rows: largest number of rows.

        Returns:
            float32 [max_rows + 1] milliseconds; a step without rows counts as the smallest.

        Source: spec/dspark.md sections 5.2 and 5.3.
        """
        rows = np.arange(max_rows + 1, dtype=np.int64)
        if self.engine.row_tile is not None:
            return _at(self.verify_ms, self._whole_tiles(rows)).astype(np.float32)
        sizes = np.asarray(list(self.verify_ms), np.int64)
        padded = sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
        return _at(self.verify_ms, np.maximum(rows, padded)).astype(np.float32)

    def check(self, engine: MeasuredEngine, today: datetime.date | None = None) -> str | None:
        """Tell why the table does not hold for an engine.

        Args:
            engine: the engine that would use it.
            today: the day, by default that of the clock.

        Returns:
            The reason, with what to do; None if the table holds.
        """
        reasons = [
            f"{item.name} {getattr(self.engine, item.name)!r} instead of {getattr(engine, item.name)!r}"
            for item in fields(engine)
            if getattr(self.engine, item.name) != getattr(engine, item.name)
        ]
        age = ((today or datetime.date.today()) - datetime.date.fromisoformat(self.date)).days
        # A day in the future is another time zone.
        if not -1 <= age <= MAX_AGE_DAYS:
            reasons.append(f"date {self.date}, {age} days ago (at most {MAX_AGE_DAYS})")
        if not reasons:
            return None
        return f"the cost table was measured with {', '.join(reasons)}; measure the step times again"

    def save(self, path: str | Path) -> None:
        """Write the table as JSON; its folder is made if needed.

        Args:
            path: the file, by convention `default_path(engine)`.
        """
        document = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: engines may start while another measures.
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        partial.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a table.

        Args:
            path: the file.

        Returns:
            The table; `check` tells whether it holds.

        Raises:
            CostTableError: not such a file, or another version.
            FileNotFoundError: no file.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            found = document.pop("format"), document.pop("version")
            if found != (_FORMAT, _VERSION):
                raise CostTableError(f"format {found} instead of {(_FORMAT, _VERSION)}")
            document["engine"] = MeasuredEngine(**document["engine"])
            for name in _TIMES:
                document[name] = {int(size): value for size, value in document[name].items()}
            return cls(**document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CostTableError(
                f"{path}: got {error or type(error).__name__}, expected a cost table; measure the "
                "step times again"
            ) from error

    def _whole_tiles(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        tile = self.engine.row_tile
        return rows if tile is None else -(-rows // tile) * tile


def default_path(engine: MeasuredEngine) -> Path:
    """Say where the table of an engine is kept: in the cache folder, beside the compiled programs.

    Args:
        engine: what is measured.

    Returns:
        The file.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "deepinfer_jax" / "costs" / f"{engine.key()}.json"


def budgets_for(num_slots: int, block_size: int, row_tile: int | None) -> tuple[int, ...]:
    """List the row budgets that a schedule may choose.

    With tiles any number of rows costs one program, so the budgets are all whole tiles up to the full block
    of every slot. Without, each is a program: a few multiples of the slots.

    Args:
        num_slots: slots of each device.
        block_size: drafts of a block, K.
        row_tile: rows of a tile, or None.

    Returns:
        Rows, rising; the last holds num_slots (K + 1) rows and less than a tile more.

    Source: spec/dspark.md section 9.3.
    """
    full = num_slots * (block_size + 1)
    if row_tile is not None:
        return tuple(range(row_tile, full + row_tile, row_tile))
    sizes = {math.ceil(num_slots * factor) for factor in ROWS_PER_SLOT if factor < block_size + 1}
    return tuple(sorted({*sizes, full}))


def _at(points: Mapping[int, float], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Read measured times at any sizes: clamped below, linear between, the last slope beyond."""
    known = np.asarray(list(points), np.float64)
    # A larger size that took less is noise: the time never falls.
    times = np.maximum.accumulate(np.asarray(list(points.values()), np.float64))
    found = np.interp(sizes, known, times)
    if len(known) < 2:
        return found
    slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
    return found + slope * np.maximum(sizes - known[-1], 0.0)


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def _require(condition: bool, what: str, got: object, expected: str) -> None:
    if not condition:
        raise CostTableError(f"cost table: {what}: got {got!r}, expected {expected}; measure again")
