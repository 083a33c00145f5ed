"""The law of the output, exactly: which schedules are lossless, and that looking ahead is not.

The real schedules give lengths to every drafted path and the real acceptance runs on all of them.
Separate because these say something about schedules and acceptance together.
Read next: `test_drawn_tokens.py`, the same with drawn tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer_jax.spec_decode import schedule
from deepinfer_jax.spec_decode.block_verify import accept_block
from deepinfer_jax.spec_decode.verify import accept_rejection
from deepinfer_jax.testing.output_laws import Accept, ToyLaws, emission
from deepinfer_jax.testing.tolerances import assert_close

CASES = json.loads((Path(__file__).parents[1] / "golden" / "dspark_scheduler_cases.json").read_text())
LAW_CASES = {case["id"]: case for case in CASES["exact_law_cases"]}
JOINT = CASES["joint_law_case"]

each_mode = pytest.mark.parametrize(
    ("accept", "mode"),
    [(accept_rejection, "token rule"), (accept_block, "block")],
    ids=["rejection", "block"],
)


def toy_target(prefix: tuple[int, ...]) -> list[float]:
    if len(prefix) % 2:
        return [1 / 5, 1 / 2, 3 / 10]
    return [(6 + sum(prefix)) / 12, (4 - sum(prefix)) / 12, 2 / 12]


def toy_draft(prefix: tuple[int, ...]) -> list[float]:
    return [1 / 2, 1 / 4, 1 / 4] if prefix and prefix[-1] == 0 else [1 / 5, 2 / 5, 2 / 5]


TOY = ToyLaws(toy_target, toy_draft, vocab_size=3, num_drafts=3)
COIN = ToyLaws(lambda _: [0.7, 0.3], lambda _: [0.5, 0.5], vocab_size=2, num_drafts=2)


def admitted(rule: Callable[[tuple[int, ...], int], bool]) -> list[int]:
    """Lengths of all paths: drafts k = 1, 2, .. while the rule admits (path, k)."""
    lengths = []
    for path in TOY.paths():
        is_admitted = [rule(path, place) for place in range(1, 4)]
        lengths.append((*is_admitted, False).index(False))
    return lengths


def appendix_lengths() -> list[int]:
    """Lengths that the global search gives to the paths of the paper's example."""
    confidences = {case["id"]: case["confidences"][0] for case in CASES["scheduler_cases"][:2]}
    ms = CASES["profiles"]["appendix_a"]["ms_by_tokens"]
    step_ms = np.array([np.inf, *ms.values()], np.float32)
    found = []
    for path in COIN.paths():
        row = confidences["S02" if path[0] else "S01"][:2]
        found += lengths_by(schedule.best_lengths, [row], step_ms)
    return found


def lengths_by(rule: Callable[..., Any], confidences: Any, step_ms: NDArray[np.float32]) -> list[int]:
    """Lengths that a rule of (capped, is_active, step_ms) gives to requests."""
    rows = jnp.asarray(confidences, jnp.float32)
    every, everyone = jnp.full(len(rows), rows.shape[1], jnp.int32), jnp.ones(len(rows), bool)
    capped = schedule.cap_survivals(schedule.survivals(rows), every, everyone)
    return np.asarray(jax.jit(rule)(capped, everyone, step_ms)).tolist()


def distance(law: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Total variation."""
    return float(np.abs(law - other).sum() / 2)


LENGTHS: dict[str, Callable[[], list[int]]] = {
    "L01": lambda: admitted(lambda path, place: True),
    "L02": lambda: admitted(lambda path, place: False),
    "L03": lambda: admitted(lambda path, place: place == 1 or path[place - 2] != 1),
    "L04": lambda: admitted(lambda path, place: place <= 2 or path[0] == 0),
    "L05": lambda: admitted(lambda path, place: path[place - 1] != 1),
    "L06": appendix_lengths,
}


@each_mode
@pytest.mark.parametrize("case", LAW_CASES.values(), ids=lambda case: case["id"])
def test_law_of_the_output_is_the_case_s(case: dict[str, Any], accept: Accept, mode: str) -> None:
    laws = COIN if case["id"] == "L06" else TOY
    assert (laws.vocab_size, laws.num_drafts) == (case["vocab"], case["gamma"])
    horizon, expect = case["horizon"], case["expect"]
    found = emission(accept, laws, LENGTHS[case["id"]](), horizon)
    weights = laws.path_probabilities()
    law, num_accepted = weights @ found.outputs, float(weights @ found.num_accepted)

    names = ["".join(map(str, output)) for output in itertools.product(range(case["vocab"]), repeat=horizon)]
    target = np.array([expect["target_law"].get(name, {"p": 0.0})["p"] for name in names])
    assert_close(laws.target_outputs(horizon), target, "formula_float32")
    block = expect["block_verification"]
    is_block = mode == "block"
    assert expect["equals_target"] == block["equals_target"]
    if expect["equals_target"] or not is_block:
        named = np.array([expect["law"].get(name, {"p": 0.0})["p"] for name in names])
        assert_close(law, named, "formula_float32")
    if expect["equals_target"]:
        assert_close(law, target, "formula_float32")
    else:
        assert distance(law, target) > 0.05
    if not is_block:
        assert_close(distance(law, target), expect["tv_distance"], "formula_float32")
    expected = block["expected_accepted"] if is_block else expect["expected_accepted_token_rule"]
    assert_close(num_accepted, expected, "formula_float32")


def coin_laws(target: dict[Any, list[float]], draft: dict[Any, list[float]]) -> ToyLaws:
    """Laws of two tokens that depend on the last token alone, None before the first."""
    return ToyLaws(
        lambda prefix: target[prefix[-1] if prefix else None],
        lambda prefix: draft[prefix[-1] if prefix else None],
        vocab_size=2,
        num_drafts=2,
    )


# As the case's descriptions target0 .. draft1 say.
REQUESTS = (
    coin_laws(
        {None: [0.7, 0.3], 0: [0.7, 0.3], 1: [0.4, 0.6]},
        {None: [0.5, 0.5], 0: [0.5, 0.5], 1: [0.25, 0.75]},
    ),
    coin_laws(
        {None: [0.25, 0.75], 1: [0.25, 0.75], 0: [0.9, 0.1]},
        {None: [0.4, 0.6], 1: [0.4, 0.6], 0: [0.7, 0.3]},
    ),
)
JOINT_MS = np.array([np.inf, np.inf, *JOINT["step_ms_by_tokens"].values()], np.float32)


def top(num_drafts: int) -> Callable[..., Any]:
    return lambda capped, is_active, step_ms: schedule.top_lengths(capped, jnp.int32(num_drafts))


def past_best(capped: Any, is_active: Any, step_ms: Any) -> Any:
    """As many drafts as confidences would ask for that know no drawn token."""
    past = schedule.survivals(jnp.asarray(JOINT["marginal_confidences"], jnp.float32))
    return schedule.top_lengths(capped, schedule.best_num_drafts(past, is_active, step_ms))


JOINT_RULES: dict[str, Callable[..., Any]] = {
    "paper greedy with early stop": schedule.early_stop_lengths,
    "global search on current confidences": schedule.best_lengths,
    "top-K, K fixed at 2": top(2),
    "top-K, K fixed at 3": top(3),
    "top-K, K=4 from confidences averaged over the draft law": past_best,
}


def joint_law(accept: Accept, lengths_of: Callable[[int, int], list[int]]) -> NDArray[np.float64]:
    """Law of the first two tokens of both requests, [4, 4], where lengths depend on both first drafts."""
    by_length = [
        [emission(accept, laws, [length] * 4, 2).outputs for length in range(3)] for laws in REQUESTS
    ]
    weights = [laws.path_probabilities() for laws in REQUESTS]
    joint = np.zeros((4, 4))
    for (first, path0), (second, path1) in itertools.product(*(enumerate(laws.paths()) for laws in REQUESTS)):
        length0, length1 = lengths_of(path0[0], path1[0])
        outputs = np.outer(by_length[0][length0][first], by_length[1][length1][second])
        joint += weights[0][first] * weights[1][second] * outputs
    return joint


def lengths_by_first_tokens(rule: Callable[..., Any]) -> dict[str, list[int]]:
    found = {}
    for tokens in itertools.product(range(2), repeat=2):
        confidences = [
            [JOINT["c1"][request], JOINT["c2_by_first_token"][request][token]]
            for request, token in enumerate(tokens)
        ]
        found["".join(map(str, tokens))] = lengths_by(rule, confidences, JOINT_MS)
    return found


@each_mode
@pytest.mark.parametrize("case", JOINT["schedulers"], ids=lambda case: case["name"])
def test_joint_law_of_competing_requests_is_the_case_s(
    case: dict[str, Any], accept: Accept, mode: str
) -> None:
    lengths = lengths_by_first_tokens(JOINT_RULES[case["name"]])
    assert lengths == case["lengths_by_first_tokens"]
    found = joint_law(accept, lambda first, second: lengths[f"{first}{second}"])
    target = np.outer(*(laws.target_outputs(2) for laws in REQUESTS))
    assert (distance(found, target) < 1e-6) == case["lossless"]
    if mode == "token rule" or case["lossless"]:
        assert_close(distance(found, target), case["tv_distance"], "formula_float32")


# Confidences of the toy laws, by the tokens drafted before. A second request always competes for rows.
CONFIDENCES = {
    **{(): 0.8, (0,): 0.9, (1,): 0.05, (2,): 0.6},
    **{pair: [0.95, 0.3, 0.7][sum(pair) % 3] for pair in itertools.product(range(3), repeat=2)},
}
COMPETITOR = [0.75, 0.8, 0.7]
RISING_MS = np.array([np.inf, *(1.0 + 0.1 * rows for rows in range(8))], np.float32)
# Steep, then flatter: only what was drafted first tells whether many rows pay.
STEEP_MS = np.array([np.inf, 1.0, 2.0, 3.0, 3.9, 4.5, 4.9, 5.3, 5.6], np.float32)


def threshold_of(confidences: Any) -> list[int]:
    rows = jnp.asarray(confidences, jnp.float32)
    every, everyone = jnp.full(len(rows), rows.shape[1], jnp.int32), jnp.ones(len(rows), bool)
    return np.asarray(schedule.threshold_lengths(rows, 0.65, every, everyone)).tolist()


LOSSLESS_RULES: dict[str, Callable[[Any], list[int]]] = {
    **{
        f"top {count}": lambda confidences, count=count: lengths_by(top(count), confidences, RISING_MS)
        for count in (3, 4, 5)
    },
    "algorithm 1": lambda confidences: lengths_by(schedule.early_stop_lengths, confidences, RISING_MS),
    "threshold": threshold_of,
}


def toy_lengths(rule: Callable[[Any], list[int]]) -> list[int]:
    """Lengths of the toy request on every path, beside its competitor."""
    rows = [[CONFIDENCES[path[:place]] for place in range(3)] for path in TOY.paths()]
    lengths = [rule([row, COMPETITOR])[0] for row in rows]
    assert len(set(lengths)) > 1, "a rule that gives one length to all paths shows nothing"
    return lengths


@each_mode
@pytest.mark.parametrize("name", LOSSLESS_RULES)
def test_rule_that_does_not_look_ahead_is_lossless(name: str, accept: Accept, mode: str) -> None:
    found = emission(accept, TOY, toy_lengths(LOSSLESS_RULES[name]), 3)
    assert_close(TOY.path_probabilities() @ found.outputs, TOY.target_outputs(3), "formula_float32")


@each_mode
def test_search_that_looks_ahead_is_biased(accept: Accept, mode: str) -> None:
    lengths = toy_lengths(lambda confidences: lengths_by(schedule.best_lengths, confidences, STEEP_MS))
    found = emission(accept, TOY, lengths, 3)
    assert distance(TOY.path_probabilities() @ found.outputs, TOY.target_outputs(3)) > 0.02


def random_laws(seed: int) -> ToyLaws:
    """Laws that leave several tokens after a rejection, where the toy laws leave one."""
    generator = np.random.default_rng(seed)

    def law() -> Callable[[tuple[int, ...]], list[float]]:
        paths = (path for place in range(4) for path in itertools.product(range(3), repeat=place))
        rows = {path: generator.dirichlet([1.0] * 3).tolist() for path in paths}
        return lambda prefix: rows[prefix]

    return ToyLaws(law(), law(), vocab_size=3, num_drafts=3)


@each_mode
@pytest.mark.parametrize("seed", range(3))
def test_random_laws_come_through_a_length_that_follows_the_drafts(
    seed: int, accept: Accept, mode: str
) -> None:
    laws = random_laws(seed)
    lengths = [1 + (path[0] > 0) + (path[0] > 0 and path[1] > 0) for path in laws.paths()]
    found = laws.path_probabilities() @ emission(accept, laws, lengths, 3).outputs
    assert_close(found, laws.target_outputs(3), "formula_float32")


@pytest.mark.parametrize(("name", "gain"), [("fixed", 1.05), ("algorithm 1", 1.0)])
def test_block_rule_accepts_more_of_the_same_drafts(name: str, gain: float) -> None:
    weights = TOY.path_probabilities()
    lengths = [3] * len(weights) if name == "fixed" else toy_lengths(LOSSLESS_RULES[name])
    token, block = (emission(accept, TOY, lengths, 1) for accept in (accept_rejection, accept_block))
    assert weights @ block.num_accepted > gain * (weights @ token.num_accepted)
