"""Acceptance case by case: processed laws, accepted drafts, the law after them, stop tokens, draws.

Separate because every uniform number is given here; `test_exact_laws.py` integrates over them.
Read next: `test_exact_laws.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.config import NOTHING
from deepinfer_jax.sampling.sample import processed_law
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.spec_decode.block_verify import accept_block
from deepinfer_jax.spec_decode.laws import draw, residual_law
from deepinfer_jax.spec_decode.verify import accept_coupled, accept_rejection, cut_at_stop, emitted
from deepinfer_jax.testing.output_laws import accept_thresholds
from deepinfer_jax.testing.samplers import Row, sampler_of
from deepinfer_jax.testing.tolerances import assert_close

CASES = json.loads((Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json").read_text())
REJECTION_CASES = {case["id"]: case for case in CASES["rejection_cases"]}

VOCAB, DRAFTS = 8, 5
EOS = 1

law_of = jax.jit(processed_law)
residual = jax.jit(residual_law)
reject = jax.jit(accept_rejection)
block = jax.jit(accept_block)
couple = jax.jit(accept_coupled)
choose = jax.jit(draw)
join = jax.jit(emitted)
cut = jax.jit(cut_at_stop)

each_case = pytest.mark.parametrize("case", REJECTION_CASES.values(), ids=lambda case: case["id"])


def laws_of(logits: list[list[float]], rows: int, params: SamplingParams) -> np.ndarray:
    """Processed laws [rows, VOCAB]; what a case lacks is impossible, or certain to be token 0."""
    padded = np.full((DRAFTS + 1, VOCAB), -np.inf, np.float32)
    padded[:, 0] = 0
    for row, values in zip(padded, logits, strict=False):
        row[: len(values)] = values
    sampler = sampler_of([Row(params, (0,), ())] * (DRAFTS + 1), VOCAB, EOS)
    return np.asarray(law_of(padded, sampler))[:rows]


def arrays_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """Target laws, draft laws, drafts, length and uniforms of a case, as a batch of one."""
    filters = {"top_k": case["top_k"], "top_p": case["top_p"]}
    target = laws_of(
        case["target_logits"], DRAFTS + 1, SamplingParams(temperature=case["temperature"], **filters)
    )
    draft_filters = filters if case["draft_uses_same_filter"] else {}
    draft = laws_of(
        case["draft_logits"], DRAFTS, SamplingParams(temperature=case["draft_temperature"], **draft_filters)
    )
    length = len(case["draft_tokens"])
    drafts, uniforms = np.zeros((1, DRAFTS), np.int32), np.zeros((1, DRAFTS), np.float32)
    drafts[0, :length], uniforms[0, :length] = case["draft_tokens"], case["uniforms"]
    return target[None], draft[None], drafts, np.array([length], np.int32), uniforms


def emitted_by(case: dict[str, Any]) -> tuple[np.ndarray, int, np.ndarray]:
    target, draft, drafts, lengths, uniforms = arrays_of(case)
    accepted, final = reject(target, draft, drafts, lengths, uniforms)
    last = choose(final, np.array([case["final_uniform"]], np.float32))
    return np.asarray(join(drafts, accepted, last)), int(accepted[0]), np.asarray(final)[0]


@each_case
def test_laws_are_those_of_the_sampling_controls(case: dict[str, Any]) -> None:
    target, draft, *_ = arrays_of(case)
    expect, length, vocab = case["expect"], len(case["draft_tokens"]), len(case["target_logits"][0])
    assert_close(target[0, : length + 1, :vocab], expect["target_probs"], "formula_float32")
    if length:
        assert_close(draft[0, :length, :vocab], expect["draft_probs"], "formula_float32")
        overlap = np.minimum(target[:, :-1], draft).sum(axis=-1)[0, :length]
        assert_close(overlap, expect["acceptance_rate_per_position"], "formula_float32")


@each_case
def test_rejection_accepts_and_emits_what_the_case_says(case: dict[str, Any]) -> None:
    expect, vocab = case["expect"], len(case["target_logits"][0])
    tokens, accepted, final = emitted_by(case)
    assert accepted == expect["accepted"]
    assert expect["final_kind"] == ("bonus" if accepted == len(case["draft_tokens"]) else "residual")
    # A residual divides by its mass, which is small where the laws are close.
    assert_close(final[:vocab], expect["final_dist"], "operation_float32")
    assert not final[vocab:].any()
    assert tokens[0, : accepted + 1].tolist() == expect["emitted"]


@each_case
def test_measured_acceptance_is_the_ratio_of_the_laws(case: dict[str, Any]) -> None:
    target, draft, drafts, lengths, _ = arrays_of(case)
    found = accept_thresholds(reject, target, draft, drafts, lengths)[0]
    for measured, expected in zip(found, case["expect"]["accept_prob"], strict=False):
        assert_close(measured, expected, "formula_float32")
        if expected == 0:
            break  # nothing after a draft that cannot be is ever accepted
    assert not found[len(case["draft_tokens"]) :].any()


@pytest.mark.parametrize("case", CASES["stop_token_cases"], ids=lambda case: case["base_case"])
def test_output_ends_with_the_first_stop_token(case: dict[str, Any]) -> None:
    tokens, accepted, _ = emitted_by(REJECTION_CASES[case["base_case"]])
    stops = np.array([[NOTHING, case["stop_token"]]], np.int32)
    count, is_stopped = cut(tokens, np.array([accepted + 1], np.int32), stops)
    assert tokens[0, : int(count[0])].tolist() == case["expect"]["committed"]
    assert bool(is_stopped[0]) == case["expect"]["finished"]
    # The anchor's row and those of the tokens but the last.
    assert int(count[0]) == case["expect"]["rows_to_keep"]


def test_stop_token_behind_the_tokens_that_count_is_not_seen() -> None:
    tokens = np.array([[3, 4, 5, 5], [3, 4, 5, 5], [5, 3, 3, 3], [3, 3, 3, 3]], np.int32)
    stops = np.array([[5, NOTHING]] * 3 + [[NOTHING, NOTHING]], np.int32)
    count, is_stopped = cut(tokens, np.array([2, 3, 0, 4], np.int32), stops)
    assert np.asarray(count).tolist() == [2, 3, 0, 4]
    assert np.asarray(is_stopped).tolist() == [False, True, False, False]


@given(
    drafts=st.lists(st.integers(0, 2), min_size=DRAFTS, max_size=DRAFTS),
    targets=st.lists(st.integers(0, 2), min_size=DRAFTS + 1, max_size=DRAFTS + 1),
    length=st.integers(0, DRAFTS),
)
def test_coupled_tokens_are_the_targets_whatever_is_drafted_and_verified(
    drafts: list[int], targets: list[int], length: int
) -> None:
    batch = np.array([drafts], np.int32)
    accepted = couple(batch, np.array([targets], np.int32), np.array([length], np.int32))
    count = int(accepted[0])
    last = np.array([targets[count]], np.int32)
    assert np.asarray(join(batch, accepted, last))[0, : count + 1].tolist() == targets[: count + 1]
    # No fewer than there could be.
    assert count == length or (count < length and drafts[count] != targets[count])


def test_draw_is_the_first_token_whose_cumulative_exceeds_the_uniform() -> None:
    law = np.array([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0, 0.0, 0.0]] * 6, np.float32)
    uniforms = np.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-24], np.float32)
    assert np.asarray(choose(law, uniforms)).tolist() == [1, 1, 3, 3, 4, 4]
    assert np.asarray(choose(np.zeros_like(law), uniforms)).tolist() == [0] * 6


def test_draw_never_gives_an_impossible_token_however_sums_round(key: jax.Array) -> None:
    rows, vocab = 64, 4096
    keys = jax.random.split(key)
    weights = jax.random.uniform(keys[0], (rows, vocab), jnp.float32)
    is_possible = jax.random.bernoulli(keys[1], 0.5, weights.shape).at[:, 0].set(False).at[:, -1].set(False)
    law = jnp.where(is_possible, weights, 0.0)
    law = law / law.sum(axis=-1, keepdims=True)
    possible, sums = np.asarray(is_possible), np.asarray(jnp.cumsum(law, axis=-1))
    # Sums made in parallel may rise at a token of probability 0, and may end below the largest uniform.
    rises = ~possible[:, 1:] & (np.diff(sums, axis=1) > 0)
    tempting = sums[np.arange(rows), rises.argmax(axis=1)]
    for uniforms in (tempting, np.full(rows, 1 - 2.0**-24, np.float32)):
        careless = (sums > uniforms[:, None]).argmax(axis=1)
        assert not possible[np.arange(rows), careless].all()
        assert possible[np.arange(rows), np.asarray(choose(law, uniforms))].all()


@pytest.mark.parametrize("accept", [reject, block], ids=["rejection", "block"])
def test_impossible_draft_is_rejected_even_by_a_uniform_of_zero(accept: Any) -> None:
    target = np.tile(np.array([0, 0.5, 0.5], np.float32), (1, 3, 1))
    draft = np.tile(np.array([0.5, 0.5, 0], np.float32), (1, 2, 1))
    zeros = np.zeros((1, 2), np.float32)
    accepted, final = accept(target, draft, np.array([[0, 1]], np.int32), np.array([2], np.int32), zeros)
    assert int(accepted[0]) == 0
    assert np.asarray(final)[0].tolist() == [0, 0, 1]
    accepted, _ = accept(target, draft, np.array([[1, 0]], np.int32), np.array([2], np.int32), zeros)
    assert int(accepted[0]) == 1


@pytest.mark.parametrize("accept", [reject, block], ids=["rejection", "block"])
@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0), (0.5, 1)])
def test_draft_that_its_own_law_excludes_is_judged_by_the_target(
    chance: float, expected: int, accept: Any
) -> None:
    target = np.tile(np.array([chance, 1 - chance], np.float32), (1, 2, 1))
    draft = np.tile(np.array([0.0, 1.0], np.float32), (1, 1, 1))
    one = np.ones(1, np.int32)
    accepted, _ = accept(target, draft, np.zeros((1, 1), np.int32), one, np.full((1, 1), 0.5, np.float32))
    assert int(accepted[0]) == expected


def test_block_rule_keeps_a_certain_draft_before_laws_that_differ_by_rounding() -> None:
    target = np.full((1, 3, 2), 0.5, np.float32)
    draft = np.full((1, 2, 2), 0.5, np.float32)
    draft[:, 1] *= np.float32(1 + 1e-6)
    largest = np.full((1, 2), 1 - 2.0**-24, np.float32)
    accepted, _ = block(target, draft, np.zeros((1, 2), np.int32), np.full(1, 2, np.int32), largest)
    assert int(accepted[0]) == 1


@pytest.mark.parametrize("accept", [reject, block], ids=["rejection", "block"])
def test_equal_laws_accept_everything_for_every_uniform(accept: Any, key: jax.Array) -> None:
    law = jax.nn.softmax(jax.random.normal(key, (64, 4, 3), jnp.float32))
    largest = np.full((64, 3), 1 - 2.0**-24, np.float32)
    drafts = np.asarray(jax.random.randint(key, (64, 3), 0, 3, jnp.int32))
    lengths = np.arange(64, dtype=np.int32) % 4
    accepted, final = accept(law, law[:, :-1], drafts, lengths, largest)
    assert np.asarray(accepted).tolist() == lengths.tolist()
    assert np.array_equal(final, np.asarray(law)[np.arange(64), lengths])


@pytest.mark.parametrize(("left", "expected"), [(5e-9, [5e-9, 1.0]), (2e-8, [1.0, 0.0])])
def test_residual_of_nearly_equal_laws_is_the_law_itself(left: float, expected: list[float]) -> None:
    target, draft = np.array([[left, 1.0]], np.float32), np.array([[0.0, 1.0]], np.float32)
    found = np.asarray(residual(target, draft, np.ones(1, np.float32)))[0]
    assert found.tolist() == np.array(expected, np.float32).tolist()


def test_row_without_an_allowed_token_has_no_law() -> None:
    sampler = sampler_of([Row(SamplingParams(temperature=1.0), (0,), ())] * 2, VOCAB, EOS)
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[1, 3] = 1.0
    assert np.asarray(law_of(logits, sampler)).tolist() == [[0.0] * VOCAB, [0.0] * 3 + [1.0] + [0.0] * 4]
