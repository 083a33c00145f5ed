"""What calibrates a draft's confidences, by sampling regime, and the file it is kept in. NumPy only.

Separate from `calibrate.py` because an engine reads them at every start and fits them never.
Read next: `calibrate.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..sampling_params import SamplingParams
from .calibrate import calibration_errors, fit_temperatures, survivals_of
from .scaling import Scaling, fit_scaling, with_base

REGIMES = ("greedy", "sampled", "filtered")
"""Ways of sampling whose acceptance means different things: greedy, temperature only, with a filter."""

GREEDY, SAMPLED, FILTERED = range(len(REGIMES))

CALIBRATION_FILE = "draft_calibration.json"
"""Name of the file beside a checkpoint's config.json."""

MIN_ROUNDS = 500
"""Rounds without which a regime stays uncalibrated: 20 bins of fewer say little."""

_FORMAT = "deepinfer_jax draft calibration"
_VERSION = 3


class CalibrationError(ValueError):
    """A calibration that does not fit the draft, or a file that holds none."""


def regime_of(params: SamplingParams) -> int:
    """Tell the regime of a request by its sampling parameters.

    Args:
        params: of the request.

    Returns:
        Index into `REGIMES`: greedy whatever the filters, else whether top-k, top-p or min-p is on.

    Source: spec/dspark.md section 5.6.
    """
    if params.is_greedy:
        return GREEDY
    is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return FILTERED if is_filtered else SAMPLED


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibrates the confidences of one draft: c = sigmoid((log(e^z + base) + shift) / temperature).

    Args:
        temperatures: regime -> K positive temperatures, for every regime.
        source: where they come from, as JSON can hold it: rounds, errors before and after, date.
        shifts: regime -> K numbers, for every regime; all 0 by default.
        bases: regime -> K numbers, 0 or more, for every regime; all 0 by default, which leaves z as it is.

    Raises:
        CalibrationError: a regime missing or unknown, different lengths, a temperature that is not positive,
            or a base below 0.
    """

    temperatures: Mapping[str, tuple[float, ...]]
    source: Mapping[str, Any] = field(default_factory=dict)
    shifts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bases: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.temperatures) != set(REGIMES):
            raise CalibrationError(
                f"calibration: got regimes {sorted(self.temperatures)}, expected {sorted(REGIMES)}; give "
                "each its temperatures"
            )
        ordered = {name: tuple(float(value) for value in self.temperatures[name]) for name in REGIMES}
        if len({len(values) for values in ordered.values()}) != 1 or not ordered[REGIMES[0]]:
            raise CalibrationError(
                f"calibration: got { {name: len(values) for name, values in ordered.items()} } temperatures, "
                "expected the draft's block size for each regime; fit them again"
            )
        for name, values in ordered.items():
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise CalibrationError(
                    f"calibration: {name}: got {values}, expected positive numbers; fit them again"
                )
        object.__setattr__(self, "temperatures", ordered)
        self._complete("shifts", "numbers")
        self._complete("bases", "numbers, 0 or more", least=0.0)

    def _complete(self, what: str, expected: str, least: float = -math.inf) -> None:
        """Put zeros where nothing was given, and refuse what does not fit."""
        given = getattr(self, what) or {name: (0.0,) * self.block_size for name in REGIMES}
        rows = {name: tuple(float(value) for value in given.get(name, ())) for name in REGIMES}
        for row in rows.values():
            if len(row) != self.block_size or not all(math.isfinite(one) and one >= least for one in row):
                raise CalibrationError(
                    f"calibration: got {what} {dict(given)}, expected {self.block_size} {expected}, for each "
                    f"of {list(REGIMES)}; fit them again"
                )
        object.__setattr__(self, what, rows)

    @property
    def block_size(self) -> int:
        """Positions K."""
        return len(self.temperatures[REGIMES[0]])

    def arrays(self) -> tuple[NDArray[np.float32], ...]:
        """Give temperatures, shifts and bases: float32 [regimes, K] each, rows in the order of `REGIMES`."""
        tables = (self.temperatures, self.shifts, self.bases)
        return tuple(np.asarray([table[name] for name in REGIMES], np.float32) for table in tables)

    def survivals(self, logits: ArrayLike, regimes: ArrayLike) -> NDArray[np.float64]:
        """Turn confidence logits into calibrated survivals, each round as its regime is.

        a_k = c_1 ... c_k.

        Args:
            logits: [n, K] raw confidence logits z.
            regimes: int [n], index into `REGIMES`.

        Returns:
            float64 [n, K], clipped to [SMALLEST, 1 - SMALLEST].

        Source: spec/dspark.md section 5.1.
        """
        rows = np.asarray(regimes, np.int64)
        temperatures, shifts, bases = (table[rows] for table in self.arrays())
        return survivals_of(with_base(logits, bases) + shifts, temperatures)

    def save(self, path: str | Path) -> None:
        """Write the calibration as JSON.

        Args:
            path: the file, by convention `CALIBRATION_FILE` in the checkpoint's folder.
        """
        document = {"format": _FORMAT, "version": _VERSION, "block_size": self.block_size}
        document |= {
            "temperatures": dict(self.temperatures),
            "shifts": dict(self.shifts),
            "bases": dict(self.bases),
            "source": dict(self.source),
        }
        Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, block_size: int) -> Calibration:
        """Read a calibration for a draft of K positions.

        Args:
            path: the file.
            block_size: K of the draft.

        Returns:
            The calibration.

        Raises:
            CalibrationError: not such a file, another version, or another K.
            FileNotFoundError: no file.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise CalibrationError(
                f"{path}: got no JSON ({error}), expected a calibration; fit it again"
            ) from error
        found = (document.get("format"), document.get("version")) if isinstance(document, dict) else None
        if found != (_FORMAT, _VERSION):
            raise CalibrationError(
                f"{path}: got format {found}, expected {(_FORMAT, _VERSION)}; fit the calibration again"
            )
        source = document.get("source")
        tables: dict[str, Any] = {name: document.get(name) for name in ("temperatures", "shifts", "bases")}
        if not all(map(_is_table, tables.values())) or not isinstance(source, dict):
            found = ", ".join(f"{name} {table!r}" for name, table in tables.items())
            raise CalibrationError(
                f"{path}: got {found} and source {source!r}, "
                "expected numbers by regime and facts by name; fit the calibration again"
            )
        rows = {name: {regime: tuple(row) for regime, row in table.items()} for name, table in tables.items()}
        calibration = cls(**rows, source=source)
        if calibration.block_size != block_size:
            raise CalibrationError(
                f"{path}: got a calibration of {calibration.block_size} positions, expected {block_size} "
                "(the draft's block size); use the file of this checkpoint or fit it again"
            )
        return calibration


def uncalibrated(block_size: int) -> Calibration:
    """Give the calibration that changes nothing: every temperature 1.

    Args:
        block_size: K.

    Returns:
        The calibration.
    """
    return Calibration({name: (1.0,) * block_size for name in REGIMES}, {"fitted": False})


def fit_calibration(
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_verified: ArrayLike,
    regimes: ArrayLike,
    source: Mapping[str, Any] | None = None,
    method: str = "scaling",
) -> Calibration:
    """Fit every regime on fully verified rounds.

    A regime with fewer than `MIN_ROUNDS` stays as it is.

    Args:
        logits: float64 [n, K] raw confidence logits.
        num_accepted: int [n] drafts accepted.
        num_verified: int [n] drafts whose outcome is known; must be K everywhere.
        regimes: int [n], index into `REGIMES`.
        source: further facts to keep, such as the model and the date.
        method: "scaling" for temperatures, shifts and bases, "temperatures" for the published method alone.

    Returns:
        The calibration; its source says rounds and calibration errors before and after, by regime.

    Raises:
        ValueError: as `fit_temperatures`.

    Source: spec/dspark.md section 5.6.
    """
    table, accepted = np.asarray(logits, np.float64), np.asarray(num_accepted, np.int64)
    verified, rows = np.asarray(num_verified, np.int64), np.asarray(regimes, np.int64)
    size = table.shape[1]
    temperatures, shifts, bases, facts = {}, {}, {}, {}
    for index, name in enumerate(REGIMES):
        own = rows == index
        num_rounds = int(own.sum())
        nothing = np.zeros(size, np.float64)
        fitted = Scaling(np.ones(size, np.float64), nothing, nothing)
        facts[name] = {"rounds": num_rounds, "fitted": num_rounds >= MIN_ROUNDS}
        if num_rounds >= MIN_ROUNDS:
            data = (table[own], accepted[own], verified[own])
            before = calibration_errors(data[0], data[1], fitted.temperatures)
            if method == "scaling":
                fitted = fit_scaling(*data)
            else:
                fitted = Scaling(fit_temperatures(*data), fitted.shifts, fitted.bases)
            raised = with_base(data[0], fitted.bases) + fitted.shifts
            after = calibration_errors(raised, data[1], fitted.temperatures)
            facts[name] |= {"error_before": _rounded(before), "error_after": _rounded(after)}
        temperatures[name] = tuple(round(value, 6) for value in fitted.temperatures.tolist())
        shifts[name] = tuple(round(value, 6) for value in fitted.shifts.tolist())
        bases[name] = tuple(fitted.bases.tolist())
    facts = {**(source or {}), "method": method, "regimes": facts}
    return Calibration(temperatures, facts, shifts, bases)


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


def _is_table(value: object) -> bool:
    if not isinstance(value, dict) or not all(isinstance(row, list) for row in value.values()):
        return False
    numbers = [number for row in value.values() for number in row]
    return all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
