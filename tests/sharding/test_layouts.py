"""Every layout gives the tokens of one device, and every reported bit where no contraction is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np
import pytest

from deepinfer_jax import EngineConfig, SamplingParams
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.generate import Generation, generate_ids, generation_of
from deepinfer_jax.engine.target import make_target, put_on
from deepinfer_jax.model.numerics import FLOAT32, OFFICIAL, Numerics
from deepinfer_jax.model.weights import Weights
from deepinfer_jax.sharding.layout import Layout
from deepinfer_jax.step import admit_step, decode_step, initial_state, prefill_step
from deepinfer_jax.testing.presets import DIVISIBLE, as_resident, random_weights
from deepinfer_jax.testing.tolerances import assert_close

RANDOM = np.random.default_rng(4)
# Longer than a tile, a page and the window; as long as a tile; short ones. More than there are devices.
LENGTHS = (1, 64, 200, 7, 65, 16, 17, 3, 130, 33)
PROMPTS = [RANDOM.integers(3, 120, length).tolist() for length in LENGTHS]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
PARAMS = [
    GREEDY if number % 2 else replace(GREEDY, temperature=0.9, seed=number, top_p=0.95)
    for number in range(len(PROMPTS))
]


@dataclass(frozen=True)
class Outcome:
    """Tokens of each request, and everything that was reported of them as one array."""

    tokens: list[list[int]]
    logprobs: np.ndarray


@cache
def weights_for(numerics: Numerics) -> Weights:
    """Plain weights in float32; the packed bytes of a quantised checkpoint otherwise."""
    plain = random_weights(DIVISIBLE, jax.random.key(8), numerics.compute_dtype)
    return as_resident(plain, DIVISIBLE) if numerics.quantizes_activations else plain


def run_requests(
    numerics: Numerics = FLOAT32,
    mesh: str | None = None,
    layout: str | Layout | None = None,
    prefill: str = "exact",
    routing_counts: np.ndarray | None = None,
    redundant_experts: int = 0,
) -> Outcome:
    """Run all requests, on one device or on a mesh."""
    config = replace(DIVISIBLE, is_quantized=numerics.quantizes_activations)
    target = make_target(config, mesh, layout, redundant_experts)
    weights = put_on(weights_for(numerics), config, target, routing_counts, redundant_experts)
    options = EngineConfig(prefill=prefill, max_rows=64)
    generations = generate_ids(weights, config, numerics, PROMPTS, PARAMS, options=options, target=target)
    return outcome(generations)


def outcome(generations: list[Generation]) -> Outcome:
    """Collect what was reported."""
    rows = [
        [one.logprob, *one.top.keys(), *one.top.values()]
        for generation in generations
        for one in generation.logprobs
    ]
    return Outcome([generation.token_ids for generation in generations], np.array(rows))


HALVES = Layout(
    "halves",
    "experts divided along one axis of the mesh only, and repeated along the other",
    {"slots": "*", "experts": "model", "engram_rows": "data"},
)
LONG = Layout(
    "long",
    "sequences over one axis, the rows of each over the other",
    {"slots": "data", "rows": ("data", "model"), "experts": "model", "engram_rows": ("model", "data")},
)


MIXED = Layout(
    "mixed",
    "sequences over one axis, the channels of the experts over the other, the rest stored divided",
    {"slots": "data", "ffn": "model", "vocab": ("model", "data")},
    gathered={"heads": "model", "o_groups": ("data", "model"), "index_heads": "data"},
)


@cache
def alone(numerics: Numerics, prefill: str = "exact") -> Outcome:
    """The requests on one device."""
    return run_requests(numerics, prefill=prefill)


@pytest.mark.multi
def test_the_same_requests_trace_nothing_again() -> None:
    steps = (initial_state, admit_step, prefill_step, decode_step)
    run_requests(FLOAT32, "8", "data")
    counts = [step._cache_size() for step in steps]
    run_requests(FLOAT32, "8", "data")
    assert [step._cache_size() for step in steps] == counts


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("layout", "mesh"), [("data", "8"), slow("sequence", "8"), slow(LONG, "4x2")], ids=["data", "seq", "long"]
)
def test_a_prefix_is_found_on_the_share_that_has_it(layout, mesh) -> None:
    """Whoever comes later gets pages and window of whoever came first, and the bits of one device."""
    target = make_target(DIVISIBLE, mesh, layout)
    # Of the size of all requests, so that the programs are those of the other tests.
    largest = max(len(prompt) + one.max_tokens for prompt, one in zip(PROMPTS, PARAMS, strict=True))
    options = EngineConfig(max_rows=64, num_slots=8, max_context=largest)
    weights = put_on(weights_for(FLOAT32), DIVISIBLE, target)
    engine = Engine(weights, DIVISIBLE, FLOAT32, options, target=target)
    rounds = []
    for _ in range(2):
        requests = [engine.submit(prompt, one) for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
        while engine.has_work:
            engine.step()
        rounds.append(requests)
    engine.close()
    assert [request.num_cached for request in rounds[0]] == [0] * len(PROMPTS)
    assert [request.num_cached for request in rounds[1]] == [(length - 1) // 128 * 128 for length in LENGTHS]
    for requests in rounds:
        found = outcome([generation_of(request) for request in requests])
        assert found.tokens == alone(FLOAT32).tokens
        np.testing.assert_array_equal(found.logprobs, alone(FLOAT32).logprobs)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("layout", "mesh", "numerics"),
    [
        ("data", "8", FLOAT32),
        ("expert", "8", FLOAT32),
        ("data+expert", "2x4", FLOAT32),
        ("weights-only", "8", FLOAT32),
        ("sequence", "8", FLOAT32),
        slow("single", "8", FLOAT32),
        slow(HALVES, "2x4", FLOAT32),
        slow(LONG, "4x2", FLOAT32),
        slow("data+expert", "2x4", OFFICIAL),
        slow("weights-only", "8", OFFICIAL),
        slow("sequence", "8", OFFICIAL),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_tokens_and_logprobs_are_bitwise_those_of_one_device(layout, mesh, numerics) -> None:
    expected, found = alone(numerics), run_requests(numerics, mesh, layout)
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


@pytest.mark.multi
@pytest.mark.parametrize(("layout", "mesh"), [("tensor", "8"), slow(MIXED, "2x4")], ids=["tensor", "mixed"])
def test_divided_contractions_give_the_same_tokens(layout, mesh) -> None:
    expected, found = alone(FLOAT32), run_requests(FLOAT32, mesh, layout)
    assert found.tokens == expected.tokens
    assert_close(found.logprobs, expected.logprobs, "equivalence_float32")


@pytest.mark.multi
@pytest.mark.slow
def test_balanced_and_redundant_experts_change_no_token() -> None:
    counts = np.ones((DIVISIBLE.num_hidden_layers, DIVISIBLE.n_routed_experts))
    counts[:, 3], counts[1, 7] = 40, 90
    expected = alone(FLOAT32)
    found = run_requests(FLOAT32, "8", "data+expert", routing_counts=counts, redundant_experts=8)
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


@pytest.mark.multi
@pytest.mark.slow
def test_bounded_prefill_is_that_of_one_device() -> None:
    expected = alone(FLOAT32, "bounded")
    found = run_requests(FLOAT32, "4x2", LONG, prefill="bounded")
    assert found.tokens == expected.tokens
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
