"""Temperatures equal the cases file; fits calibrate what is known to be off, and refuse censored traffic.

Separate as it needs no model: logits and accepted counts are enough.
Read next: `deepinfer_jax/spec_decode/calibrate.py`, `calibration.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.spec_decode import calibration as files
from deepinfer_jax.spec_decode.calibrate import (
    calibration_errors,
    confidences_of,
    expected_calibration_error,
    fit_temperatures,
    reliability,
    survival_errors,
    survivals_of,
)
from deepinfer_jax.spec_decode.calibration import (
    CALIBRATION_FILE,
    FILTERED,
    GREEDY,
    REGIMES,
    SAMPLED,
    Calibration,
    CalibrationError,
    fit_calibration,
    regime_of,
    uncalibrated,
)
from deepinfer_jax.spec_decode.plots import plot_reliability
from deepinfer_jax.spec_decode.scaling import fit_scaling, with_base
from deepinfer_jax.testing.tolerances import assert_close

CASES = Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json"
CALIBRATION_CASES = json.loads(CASES.read_text())["calibration_cases"]
BLOCK = 5
TRUE_TEMPERATURES = np.asarray([1.8, 0.6, 2.5, 1.0, 3.0])
"""Of the synthetic traffic: over- and underconfident positions."""


def traffic(seed: int, num_rounds: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Draw confidence logits, and accept drafts with the probabilities of the true temperatures."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.5, 1.5, (num_rounds, BLOCK))
    is_accepted = random.random(logits.shape) < confidences_of(logits, TRUE_TEMPERATURES)
    return logits, np.cumprod(is_accepted, axis=1).sum(axis=1)


def verified(num_accepted: np.ndarray, block: int = BLOCK) -> np.ndarray:
    """Verify every draft."""
    return np.full(len(num_accepted), block)


@pytest.mark.parametrize("case", CALIBRATION_CASES, ids=lambda case: case["id"])
def test_temperatures_and_errors_equal_the_cases(case) -> None:
    logits, accepted = np.asarray(case["logits"]), np.asarray(case["prefix_accepted"]).sum(axis=1)
    rows, expected = case["temperature_grid"], case["expect"]
    num_steps = round((rows["stop"] - rows["start"]) / rows["step"])
    grid = np.round(rows["start"] + rows["step"] * np.arange(num_steps + 1), 10)
    fitted = fit_temperatures(logits, accepted, verified(accepted), grid)
    assert fitted.tolist() == expected["temperatures"]
    before = calibration_errors(logits, accepted, np.ones(BLOCK))
    assert_close(before, expected["ece_before"], "formula_float64")
    assert_close(calibration_errors(logits, accepted, fitted), expected["ece_after"], "formula_float64")


def test_known_miscalibration_is_removed_on_held_out_rounds() -> None:
    logits, accepted = traffic(seed=1)
    fitted = fit_temperatures(logits, accepted, verified(accepted))
    held_out, outcome = traffic(seed=2)
    before = calibration_errors(held_out, outcome, np.ones(BLOCK))
    assert before.min() > 0.02 and before.mean() > 0.06
    assert calibration_errors(held_out, outcome, fitted).max() <= 0.02
    # The ranking of requests at a position stays.
    at_first = confidences_of(held_out, fitted)[:, 0]
    assert (np.argsort(at_first, kind="stable") == np.argsort(held_out[:, 0], kind="stable")).all()


def test_smallest_of_equal_temperatures_wins() -> None:
    # A logit of 0 gives one half at any temperature.
    fitted = fit_temperatures(np.zeros((8, 2)), np.arange(8) % 3, np.full(8, 2), [2.0, 0.5, 1.0])
    assert fitted.tolist() == [0.5, 0.5]


def test_error_by_hand() -> None:
    predictions = np.asarray([0.01, 0.02, 0.52, 0.54, 1.0])
    is_true = [False, True, True, False, True]
    # Bins 0 and 10 hold two each, the last the clipped certainty.
    by_hand = (2 * abs(0.015 - 0.5) + 2 * abs(0.53 - 0.5) + 1e-8) / 5
    assert_close(expected_calibration_error(predictions, is_true), by_hand, "formula_float64")
    assert np.isnan(expected_calibration_error(predictions[:0], []))


def test_extreme_logits_stay_finite() -> None:
    survivals = survivals_of([[1e4, -1e4, 0.0]], np.ones(3))
    assert survivals.tolist() == [[1 - 1e-8, 1e-8, 1e-8]]


def test_reliability_counts_every_round_once() -> None:
    logits, accepted = traffic(seed=3, num_rounds=500)
    rows = reliability(logits, accepted, TRUE_TEMPERATURES, position=2)
    assert rows.number.sum() == 500
    is_used = rows.number > 0
    assert_close((rows.observed * rows.number)[is_used].sum(), (accepted >= 2).sum(), "formula_float64")
    assert np.isnan(rows.predicted[~is_used]).all()
    with pytest.raises(ValueError, match=r"position: got 0, expected 1\.\.5"):
        reliability(logits, accepted, TRUE_TEMPERATURES, position=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_verified": [5, 4, 5]}, "got 1 of 3 rounds with fewer than 5 drafts verified"),
        ({"num_verified": [5, 5]}, r"got logits \(3, 5\)"),
        ({"logits": np.zeros((0, 5)), "num_accepted": [], "num_verified": []}, "n >= 1"),
        ({"logits": np.full((3, 5), np.nan)}, "not finite"),
        ({"num_accepted": [0, 6, 1]}, r"num_accepted 0\.\.6"),
        ({"grid": [0.0, 1.0]}, "grid"),
    ],
    ids=["truncated", "shapes", "empty", "nan", "too many", "zero temperature"],
)
def test_fit_refuses(change, message: str) -> None:
    rounds = {"logits": np.zeros((3, 5)), "num_accepted": [0, 5, 1], "num_verified": [5, 5, 5]}
    with pytest.raises(ValueError, match=message):
        fit_temperatures(**{**rounds, **change})


@pytest.mark.parametrize(
    ("params", "regime"),
    [
        (SamplingParams(temperature=0.0, top_p=0.5), GREEDY),
        (SamplingParams(temperature=1e-6), GREEDY),
        (SamplingParams(), SAMPLED),
        (SamplingParams(temperature=0.6, top_k=-1, presence_penalty=1.0), SAMPLED),
        (SamplingParams(top_k=20), FILTERED),
        (SamplingParams(top_p=0.95), FILTERED),
        (SamplingParams(min_p=0.05), FILTERED),
    ],
)
def test_regime_of_a_request(params: SamplingParams, regime: int) -> None:
    assert regime_of(params) == regime


def test_regimes_are_fitted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_ROUNDS", 300)
    logits, accepted = traffic(seed=4, num_rounds=2000)
    regimes = np.where(np.arange(2000) < 1000, GREEDY, SAMPLED)
    regimes[-200:] = FILTERED
    # What is accepted in one regime says nothing of another.
    accepted[regimes == GREEDY] = BLOCK
    arguments = (logits, accepted, verified(accepted), regimes, {"model": "nano"})
    found = fit_calibration(*arguments, method="temperatures")
    assert found.temperatures["filtered"] == (1.0,) * BLOCK
    own = regimes == SAMPLED
    alone = fit_temperatures(logits[own], accepted[own], verified(accepted[own]))
    assert found.temperatures["sampled"] == tuple(np.round(alone, 6))
    assert found.shifts["sampled"] == found.bases["sampled"] == (0.0,) * BLOCK
    assert found.temperatures["greedy"][0] < found.temperatures["sampled"][0]
    facts = found.source["regimes"]
    assert found.source["model"] == "nano"
    assert [facts[name]["rounds"] for name in REGIMES] == [1000, 800, 200]
    assert not facts["filtered"]["fitted"]
    assert sum(facts["sampled"]["error_after"]) < sum(facts["sampled"]["error_before"])


def test_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    rows = {"greedy": (0.5, 2.0), "sampled": (1.25, 1.0), "filtered": (3.0, 0.75)}
    shifts = {"greedy": (-0.5, 0.0), "sampled": (0.0, 0.25), "filtered": (1.0, 2.0)}
    bases = {"greedy": (1.0, 0.0), "sampled": (0.0, 0.0), "filtered": (0.0, 0.5)}
    calibration = Calibration(rows, {"rounds": 12}, shifts, bases)
    calibration.save(tmp_path / CALIBRATION_FILE)
    found = Calibration.load(tmp_path / CALIBRATION_FILE, block_size=2)
    assert found == calibration
    temperatures, shifts, bases = found.arrays()
    assert temperatures.dtype == np.float32
    assert temperatures.tolist() == [[0.5, 2.0], [1.25, 1.0], [3.0, 0.75]]
    assert shifts.tolist() == [[-0.5, 0.0], [0.0, 0.25], [1.0, 2.0]]
    assert bases.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 0.5]]
    temperatures, shifts, bases = uncalibrated(BLOCK).arrays()
    assert (temperatures == 1).all()
    assert not shifts.any() and not bases.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "a note"}, "got format"),
        ({"version": 2}, "got format"),
        ({"shifts": {name: [0.0] for name in REGIMES}}, "got shifts"),
        ({"shifts": {name: ["x"] for name in REGIMES}}, "expected numbers by regime"),
        ({"bases": {name: [-1.0, 0.0] for name in REGIMES}}, "got bases .* 2 numbers, 0 or more"),
        ({"bases": None}, "bases None .* expected numbers by regime"),
        ({"temperatures": [1.0]}, "got temperatures"),
        ({"temperatures": {name: ["1", 1.0] for name in REGIMES}}, "got temperatures"),
        ({"temperatures": {"greedy": [1.0, 1.0]}}, "got regimes"),
        ({"temperatures": {name: [1.0, -1.0] for name in REGIMES}}, "positive"),
        ({"temperatures": {"greedy": [1.0], "sampled": [1.0, 1.0], "filtered": [1.0]}}, "block size"),
        (
            {key: {name: [1.0] * 3 for name in REGIMES} for key in ("temperatures", "shifts", "bases")},
            "3 positions, expected 2",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / CALIBRATION_FILE
    uncalibrated(2).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CalibrationError, match=message):
        Calibration.load(path, block_size=2)


@pytest.mark.parametrize("text", ["no json", "[1, 2]"])
def test_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(text)
    with pytest.raises(CalibrationError, match="fit"):
        Calibration.load(tmp_path / CALIBRATION_FILE, block_size=2)


def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    logits, accepted = traffic(seed=5, num_rounds=300)
    series = {
        name: [reliability(logits, accepted, temperatures, k) for k in range(1, BLOCK + 1)]
        for name, temperatures in (("before", np.ones(BLOCK)), ("after", TRUE_TEMPERATURES))
    }
    figure = plot_reliability(series, tmp_path / "new" / "reliability.png")
    assert (tmp_path / "new" / "reliability.png").read_bytes().startswith(b"\x89PNG")
    plot_reliability(series, tmp_path / "reliability.svg")
    assert "calibration error</text>" in (tmp_path / "reliability.svg").read_text()
    assert len(figure.axes) == BLOCK
    # The diagonal and one line each.
    assert [len(axes.lines) for axes in figure.axes] == [3] * BLOCK
    with pytest.raises(ValueError, match="as many in every series"):
        plot_reliability({"before": series["before"], "after": []})
    with pytest.raises(ValueError, match="as many in every series"):
        plot_reliability({})


def test_matplotlib_is_imported_late() -> None:
    code = "import sys, deepinfer_jax.spec_decode.plots; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_shift_reaches_what_no_temperature_can() -> None:
    """Coupled verification accepts (1 - t) / (1 + t) where the head was taught 1 - t."""
    random = np.random.default_rng(6)
    logits = random.normal(0.5, 1.5, (20_000, 3))
    taught = 1 / (1 + np.exp(-logits))
    chances = taught / (2 - taught)
    accepted = np.cumprod(random.random(chances.shape) < chances, axis=1).sum(axis=1)
    fit, held = slice(0, 10_000), slice(10_000, None)
    temperatures = fit_temperatures(logits[fit], accepted[fit], verified(accepted[fit], 3))
    scaling = fit_scaling(logits[fit], accepted[fit], verified(accepted[fit], 3))
    assert not scaling.bases.any()
    before = calibration_errors(logits[held], accepted[held], np.ones(3))
    scaled = calibration_errors(logits[held], accepted[held], temperatures)
    shifted = calibration_errors(logits[held] + scaling.shifts, accepted[held], scaling.temperatures)
    assert before.max() > 0.1 and scaled.max() > 0.04 and shifted.max() < 0.02
    assert (scaling.shifts < 0).all()


def test_a_base_reaches_acceptance_that_never_falls_to_nothing() -> None:
    """Where t is large greedy choices still agree at times: their odds grow with 1 / t, not (1 - t) / t."""
    random = np.random.default_rng(7)
    logits = random.normal(0.0, 2.0, (20_000, 2))
    distance = 1 / (1 + np.exp(logits))
    odds = 0.5 * distance**-1.5
    accepted = np.cumprod(random.random(odds.shape) < odds / (1 + odds), axis=1).sum(axis=1)
    regimes = np.full(len(logits), GREEDY)
    fit, held = slice(0, 10_000), slice(10_000, None)
    found = fit_calibration(logits[fit], accepted[fit], verified(accepted[fit], 2), regimes[fit])
    assert found.bases["greedy"] == (1.0, 1.0) and found.bases["sampled"] == (0.0, 0.0)
    assert survival_errors(found.survivals(logits[held], regimes[held]), accepted[held]).max() < 0.02
    # The error that the fit itself tells is that of the whole formula.
    own = survival_errors(found.survivals(logits[fit], regimes[fit]), accepted[fit])
    assert found.source["regimes"]["greedy"]["error_after"] == pytest.approx(own, abs=1e-4)
    without = Calibration(found.temperatures, {}, found.shifts)
    assert survival_errors(without.survivals(logits[held], regimes[held]), accepted[held]).max() > 0.05


def test_without_a_base_logits_are_as_they_were() -> None:
    logits = np.append(traffic(seed=8, num_rounds=50)[0], [[0.0, 1e4, -1e4, np.inf, np.nan]], axis=0)
    regimes = np.arange(51) % len(REGIMES)
    np.testing.assert_array_equal(with_base(logits, np.zeros(BLOCK)), logits)
    expected = survivals_of(logits, np.ones(BLOCK))
    np.testing.assert_array_equal(uncalibrated(BLOCK).survivals(logits, regimes), expected)


def test_a_base_keeps_odds_from_falling_below_it() -> None:
    logits = np.asarray([-1e4, -2.0, 0.0, 2.0, 1e4])
    by_hand = [0.0, np.log(np.exp(-2) + 1), np.log(2), np.log(np.exp(2) + 1), 1e4]
    assert_close(with_base(logits, 1.0), by_hand, "formula_float64")
    assert_close(with_base(logits[:1], 0.5), [np.log(0.5)], "formula_float64")
