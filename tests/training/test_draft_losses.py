"""The draft's losses are the worked cases' numbers, and their gradients go where they should.

Separate because it needs no model.
Read next: `deepinfer_jax/training/draft_losses.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.testing.tolerances import assert_close
from deepinfer_jax.training.draft_losses import (
    CE_WEIGHT,
    CONFIDENCE_WEIGHT,
    L1_WEIGHT,
    draft_loss,
)

CASES_FILE = Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json"
CASES = json.loads(CASES_FILE.read_text(encoding="utf-8"))["training_loss_cases"]

each_case = pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])


def arguments(case: dict) -> tuple[jax.Array, ...]:
    """One block of five rows."""
    return (
        jnp.asarray(case["draft_logits"], jnp.float32)[None],
        jnp.asarray(case["target_logits"], jnp.float32)[None],
        jnp.asarray(case["labels"], jnp.int32)[None],
        jnp.asarray(case["confidence_logits"], jnp.float32)[None],
        jnp.asarray(case["mask"], bool)[None],
    )


@each_case
def test_terms_are_the_worked_numbers(case: dict) -> None:
    expected = case["expect"]
    assert case["alphas"] == {"ce": CE_WEIGHT, "l1": L1_WEIGHT, "conf": CONFIDENCE_WEIGHT}
    loss = draft_loss(*arguments(case), decay=case["loss_decay_gamma"])
    found = [loss.ce, loss.l1, loss.confidence, loss.total, loss.tau]
    names = ("ce", "l1", "conf", "total", "tau_probabilistic")
    assert_close(np.asarray(found), [expected[name] for name in names], "operation_float32")
    rates = np.where(case["mask"], expected["accept_rate"], 0.0)
    assert_close(loss.accept_rates, rates, "formula_float32")


@each_case
def test_rows_outside_the_mask_count_nowhere(case: dict) -> None:
    draft, target, labels, confidence, _ = arguments(case)
    mask = jnp.asarray([[True, True, False, False, False]])
    hidden = jnp.asarray([[0.0, 0.0, 7.0, -9.0, 4.0]])
    ramp = jnp.arange(4.0).reshape(1, 1, 4)
    first = draft_loss(draft, target, labels, confidence, mask)
    other = draft_loss(draft + hidden[..., None] * ramp, target, labels, confidence + hidden, mask)
    jax.tree.map(np.testing.assert_array_equal, first, other)


@each_case
def test_blocks_are_averaged_by_weight(case: dict) -> None:
    """The same block twice changes nothing; a block without rows neither."""
    once = draft_loss(*arguments(case))
    copies = [jnp.concatenate([value, value, value]) for value in arguments(case)]
    is_kept = jnp.asarray([True, True, False])[:, None]
    twice = draft_loss(*copies[:-1], copies[-1] & is_kept)
    for found, expected in zip(twice, once, strict=True):
        assert_close(found, expected, "formula_float32")


def test_the_acceptance_is_no_way_to_lower_the_confidence_loss() -> None:
    """Neither the draft's logits nor the target's learn from the confidence term; the target from none."""
    draft, target, labels, confidence, mask = arguments(CASES[0])

    def confidence_term(draft: jax.Array, target: jax.Array) -> jax.Array:
        return draft_loss(draft, target, labels, confidence, mask).confidence

    def total(target: jax.Array) -> jax.Array:
        return draft_loss(draft, target, labels, confidence, mask).total

    for gradient in jax.grad(confidence_term, argnums=(0, 1))(draft, target):
        assert not np.any(np.asarray(gradient))
    assert not np.any(np.asarray(jax.grad(total)(target)))


def test_the_confidence_term_is_least_at_the_acceptance() -> None:
    draft, target, labels, _, mask = arguments(CASES[0])
    rates = np.asarray(CASES[0]["expect"]["accept_rate"])
    best = jnp.asarray(np.log(rates / (1 - rates)), jnp.float32)[None]

    def term(confidence: jax.Array) -> jax.Array:
        return draft_loss(draft, target, labels, confidence, mask).confidence

    assert_close(jax.grad(term)(best), np.zeros((1, 5)), "formula_float32")
    assert term(best) < term(best + 0.5)
    assert term(best) < term(best - 0.5)
