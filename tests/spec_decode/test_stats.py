"""Counts equal the cases file and brute force; tokens that no output got are never counted.

Separate as it needs no model: a step's small arrays are enough.
Read next: `deepinfer_jax/spec_decode/stats.py`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.spec_decode.calibrate import calibration_errors, survivals_of
from deepinfer_jax.spec_decode.calibration import GREEDY, REGIMES, SAMPLED, Calibration, uncalibrated
from deepinfer_jax.spec_decode.stats import FINE_BINS, NO_DRAFT, DraftStats, judged_lengths
from deepinfer_jax.spec_decode.summary import DraftSummary
from deepinfer_jax.testing.tolerances import assert_close

CASES = Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json"
METRIC_CASES = json.loads(CASES.read_text())["metric_cases"]
BLOCK = 5
EOS = 1


def add_rounds(stats: DraftStats, verified, accepted, tokens=None, logits=None, **further) -> None:
    """Count one step whose slots got their accepted drafts and a token of the target's."""
    num_slots, accepted = len(accepted), np.asarray(accepted)
    stats.add(
        num_tokens=accepted + 1 if tokens is None else tokens,
        num_verified=verified,
        num_accepted=accepted,
        logits=np.zeros((num_slots, BLOCK)) if logits is None else logits,
        regimes=further.pop("regimes", np.full(num_slots, SAMPLED)),
        **further,
    )


@pytest.mark.parametrize("case", METRIC_CASES, ids=lambda case: case["id"])
def test_metrics_equal_the_cases(case) -> None:
    stats = DraftStats(BLOCK)
    # In two steps: what counts is the sum.
    for part in (slice(0, 2), slice(2, None)):
        add_rounds(stats, case["verified_draft_tokens"][part], case["accepted_draft_tokens"][part])
    found, expected = stats.summary(), case["expect"]
    assert_close(found.tau, expected["tau"], "formula_float64")
    assert_close(found.verify_rate, expected["verify_rate"], "formula_float64")
    assert_close(found.draft_acceptance, expected["draft_acceptance_rate"], "formula_float64")
    assert_close(found.unconditional_acceptance, expected["unconditional_accept_rate"], "formula_float64")
    assert_close(found.conditional_acceptance, expected["conditional_accept_rate"], "formula_float64")
    assert found.rounds == len(case["accepted_draft_tokens"])
    assert_close(found.mean_verified, np.mean(case["verified_draft_tokens"]), "formula_float64")


@pytest.mark.parametrize("stop_at", [1, 2, 3, 7, 8, 11, 12])
@pytest.mark.parametrize("max_tokens", [4, 9, 100])
def test_accepted_never_exceeds_the_tokens_returned(stop_at: int, max_tokens: int) -> None:
    """An oracle drafts the target's own tokens, a stop token amid a block and what follows it included."""
    target = [EOS if index == stop_at else 7 for index in range(200)]
    stats, output, rounds = DraftStats(BLOCK), [target[0]], 0  # prefill gives the first token
    while output[-1] != EOS and len(output) < max_tokens:
        block = target[len(output) : len(output) + BLOCK + 1]
        cut = block[: block.index(EOS) + 1] if EOS in block else block
        cut = cut[: max_tokens - len(output)]
        add_rounds(stats, [BLOCK], [min(BLOCK, len(cut))], tokens=[len(cut)])
        output, rounds = output + cut, rounds + 1
    found = stats.summary()
    assert found.rounds == rounds
    assert 1 + found.tokens == len(output)
    assert found.accepted <= len(output) - rounds
    # All drafts that were judged were accepted: what follows the stop is neither accepted nor refused.
    rates = [rate for rate in found.conditional_acceptance if not math.isnan(rate)]
    assert rates == [1.0] * len(rates)
    if rounds:
        assert_close(found.tau, (len(output) - 1) / rounds, "formula_float64")


def test_what_follows_a_stop_has_no_outcome() -> None:
    # Refused after two; stopped on the second draft; stopped on the target's own token; all accepted.
    judged = judged_lengths([3, 2, 3, 6], [5, 5, 5, 5], [2, 2, 2, 5])
    assert judged.tolist() == [5, 2, 5, 5]
    stats = DraftStats(BLOCK)
    add_rounds(stats, [5], [2], tokens=[2])
    assert [int(stats.reliability(k).number.sum()) for k in range(1, BLOCK + 1)] == [1, 1, 0, 0, 0]
    # The confidences promised all five: 1 + 1/2 + .. + 1/32.
    assert_close(stats.summary().expected_tau, 1.96875, "formula_float64")


def test_calibration_and_ranking_equal_brute_force() -> None:
    random = np.random.default_rng(0)
    temperatures = random.uniform(0.5, 2, (len(REGIMES), BLOCK))
    calibration = Calibration({name: tuple(row) for name, row in zip(REGIMES, temperatures, strict=True)})
    stats = DraftStats(BLOCK, calibration)
    logits = random.normal(1, 1.5, (600, BLOCK))
    accepted = np.cumprod(random.random((600, BLOCK)) < 0.7, axis=1).sum(axis=1)
    regimes = random.integers(0, len(REGIMES), 600)
    for part in np.split(np.arange(600), 20):
        add_rounds(stats, np.full(30, BLOCK), accepted[part], logits=logits[part], regimes=regimes[part])
    found = stats.summary()
    rows = np.asarray(calibration.arrays()[0], np.float64)[regimes]
    survivals, label = survivals_of(logits, rows), accepted[:, None] > np.arange(BLOCK)
    # Calibrating the logits first leaves temperatures of 1.
    assert_close(found.calibration_error, calibration_errors(logits / rows, accepted, 1.0), "formula_float64")
    assert_close(found.brier, np.square(survivals - label).mean(axis=0), "formula_float64")
    assert_close(found.expected_tau, 1 + survivals.sum(axis=1).mean(), "formula_float64")
    bins = np.minimum((survivals * FINE_BINS).astype(np.int64), FINE_BINS - 1)
    for k in range(BLOCK):
        gaps = bins[label[:, k], k][:, None] - bins[~label[:, k], k]
        assert_close(found.auroc[k], (np.sign(gaps) / 2 + 0.5).mean(), "formula_float64")
    one_regime = stats.reliability(1, regime=GREEDY)
    assert one_regime.number.sum() == (regimes == GREEDY).sum() == found.rounds_by_regime["greedy"]


def test_only_verified_drafts_are_judged() -> None:
    stats = DraftStats(BLOCK)
    add_rounds(stats, [2, 0, 5], [1, 0, 5])
    assert [int(stats.reliability(k).number.sum()) for k in range(1, BLOCK + 1)] == [2, 2, 1, 1, 1]
    # One token each, and a survival of 1/2, 1/4, .. for each draft verified.
    assert_close(stats.summary().expected_tau, (3 + 0.75 + 0.96875) / 3, "formula_float64")


def test_steps_without_drafts_are_no_rounds() -> None:
    stats = DraftStats(BLOCK, budgets=(4, 8))
    nothing = np.full((2, BLOCK), np.nan)
    for choice in (NO_DRAFT, NO_DRAFT, 1, 3):
        is_drafted = choice != NO_DRAFT
        length = BLOCK if is_drafted else 0
        add_rounds(stats, [length] * 2, [length] * 2, logits=None if is_drafted else nothing, choice=choice)
    found = stats.summary()
    assert found.choices == {"no draft": 2, "4 rows": 1, "full block": 1}
    all_or_nothing = DraftStats(BLOCK)
    add_rounds(all_or_nothing, [BLOCK], [BLOCK], choice=1)
    assert all_or_nothing.summary().choices == {"full block": 1}
    assert (found.steps, found.rounds, found.tokens) == (4, 4, 28)
    assert (found.tau, found.tokens_per_slot_step) == (6.0, 3.5)


def test_idle_slots_are_not_read() -> None:
    stats = DraftStats(BLOCK)
    logits = np.asarray([[0.0] * BLOCK, [np.nan] * BLOCK])
    add_rounds(stats, [5, 99], [2, 77], tokens=[3, 0], logits=logits, regimes=[SAMPLED, -1])
    found = stats.summary()
    assert (found.rounds, found.tokens, found.accepted, found.rounds_without_confidence) == (1, 3, 2, 0)


def test_broken_confidence_is_counted_and_left_out() -> None:
    stats = DraftStats(BLOCK)
    logits = np.zeros((2, BLOCK))
    logits[1, 2] = np.nan
    add_rounds(stats, [5, 5], [5, 0], logits=logits)
    found = stats.summary()
    assert found.rounds_without_confidence == 1
    assert [int(stats.reliability(k).number.sum()) for k in range(1, BLOCK + 1)] == [2, 2, 1, 1, 1]
    assert "1 with a confidence that was no number" in str(found)


def test_times_are_compared_where_both_are_known() -> None:
    stats = DraftStats(BLOCK)
    for predicted, measured in ((10.0, 12.0), (10.0, 8.0), (None, 99.0), (99.0, None)):
        add_rounds(stats, [5], [0], predicted_ms=predicted, measured_ms=measured)
    found = stats.summary()
    assert (found.steps, found.timed_steps) == (4, 2)
    assert (found.predicted_ms, found.measured_ms, found.time_error) == (10.0, 10.0, 0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": [3], "tokens": [2]}, "num_tokens of num_accepted or one more"),
        ({"accepted": [1], "tokens": [4]}, "num_tokens of num_accepted or one more"),
        ({"verified": [2], "accepted": [3]}, r"num_accepted in 0\.\.num_verified"),
        ({"verified": [6]}, r"num_verified in 0\.\.5"),
        ({"choice": NO_DRAFT}, r"num_verified in 0\.\.0"),
        ({"regimes": [3]}, "regimes"),
        ({"logits": np.zeros((1, 4))}, "shapes"),
        ({"verified": [5, 5]}, "shapes"),
    ],
)
def test_counts_that_cannot_be_are_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_rounds(DraftStats(BLOCK), **{"verified": [5], "accepted": [0], **change})


def test_calibration_of_another_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="3 positions, expected 5"):
        DraftStats(BLOCK, uncalibrated(3))


def test_summary_reads_as_a_table() -> None:
    stats = DraftStats(BLOCK, budgets=(4, 8))
    empty = str(stats.summary())
    assert "nan" not in empty and "rounds     0 (none)" in empty
    add_rounds(stats, [5, 5], [5, 2], choice=2)
    text = str(stats.summary())
    assert "tokens     4.50 a round, 1.97 expected" in text
    assert "rounds     2 (sampled 2)" in text
    assert "8 rows 1" in text
    line = next(line for line in text.splitlines() if line.startswith("accepted "))
    assert line.split()[1::2] == ["100.0", "100.0", "50.0", "50.0", "50.0"]
    stats.reset()
    assert isinstance(stats.summary(), DraftSummary) and str(stats.summary()) == empty
