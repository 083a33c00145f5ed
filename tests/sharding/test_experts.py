"""Expert tables: properties of every table, and how well skewed routing is balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_jax.arrays import NOTHING
from deepinfer_jax.sharding.errors import LayoutError
from deepinfer_jax.sharding.experts import (
    balance_experts,
    device_loads,
    identity_table,
    imbalance,
    imbalance_bound,
    routing_counts,
    table_of,
)

EXPERTS = 384
REDUNDANT = {64: 64, 32: 32, 16: 16, 8: 8}
"""Devices -> redundant experts that the documentation promises to be enough."""


def zipf_counts(exponent: float, layers: int = 2, num_experts: int = EXPERTS) -> np.ndarray:
    """Counts by Zipf's law, popular experts at other numbers in every layer."""
    random = np.random.default_rng(0)
    counts = np.round(1e6 * np.arange(1, num_experts + 1) ** -exponent)
    return np.stack([random.permutation(counts) for _ in range(layers)])


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Counts, devices and redundant experts that a table exists for; many counts equal or 0."""
    num_experts, num_devices = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    least = -num_experts % num_devices
    most = num_experts * (num_devices - 1)
    num_redundant = least + num_devices * draw(st.integers(0, (most - least) // num_devices))
    numbers = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
    rows = st.lists(numbers, min_size=num_experts, max_size=num_experts)
    counts = draw(st.lists(rows, min_size=1, max_size=2))
    return np.array(counts), num_devices, num_redundant


@given(problem=problems())
def test_every_table_is_whole(problem: tuple[np.ndarray, int, int]) -> None:
    counts, num_devices, num_redundant = problem
    layers, num_experts = counts.shape
    table = balance_experts(counts, num_devices, num_redundant)
    places = num_experts + num_redundant
    assert table.logical_of_physical.shape == (layers, places)
    assert table.logical_of_physical.dtype == table.replicas.dtype == table.num_replicas.dtype == np.int32
    for layer in range(layers):
        held = table.logical_of_physical[layer]
        listed = [
            table.replicas[layer, expert, : table.num_replicas[layer, expert]]
            for expert in range(num_experts)
        ]
        assert sorted(np.concatenate(listed)) == list(range(places)), "each place belongs to one expert"
        for expert, own in enumerate(listed):
            assert len(own) >= 1
            assert (held[own] == expert).all()
            repeated = np.resize(own, table.replicas.shape[2])
            np.testing.assert_array_equal(table.replicas[layer, expert], repeated)
        for device in held.reshape(num_devices, -1):
            assert len(set(device)) == len(device), "no device holds an expert twice"


@given(problem=problems())
def test_no_load_is_lost_and_none_below_the_bound(problem: tuple[np.ndarray, int, int]) -> None:
    counts, num_devices, num_redundant = problem
    table = balance_experts(counts, num_devices, num_redundant)
    loads = device_loads(table, counts, num_devices)
    np.testing.assert_allclose(loads.sum(axis=1), counts.sum(axis=1), rtol=1e-12)
    reached, bound = (
        imbalance(table, counts, num_devices),
        imbalance_bound(counts, num_devices, num_redundant),
    )
    assert (reached >= bound * (1 - 1e-9)).all()


@given(problem=problems())
def test_tables_are_deterministic(problem: tuple[np.ndarray, int, int]) -> None:
    first, second = balance_experts(*problem), balance_experts(*problem)
    np.testing.assert_array_equal(first.logical_of_physical, second.logical_of_physical)
    np.testing.assert_array_equal(first.replicas, second.replicas)


@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0, 1.2])
@pytest.mark.parametrize(("devices", "redundant"), REDUNDANT.items())
def test_skewed_counts_are_balanced(devices: int, redundant: int, exponent: float) -> None:
    counts = zipf_counts(exponent)
    reached = imbalance(balance_experts(counts, devices, redundant), counts, devices)
    assert reached.max() <= 1.1
    plain = imbalance(identity_table(len(counts), EXPERTS), counts, devices)
    assert (reached < plain).all()


def test_without_redundant_experts_the_bound_is_nearly_reached() -> None:
    counts = zipf_counts(1.0)
    reached = imbalance(balance_experts(counts, 64, 0), counts, 64)
    bound = imbalance_bound(counts, 64, 0)
    assert (bound > 9).all(), "one expert alone is several devices' share"
    assert (reached <= 1.02 * bound).all()


def test_sampled_routing_is_balanced_for_other_rows_of_the_same_law() -> None:
    # A table is made from past rows and used for the next ones: the law is the same, the counts are not.
    random = np.random.default_rng(1)
    popularity = zipf_counts(0.8, layers=1)[0]
    rows, choices = 60_000, 6
    ids = [
        random.choice(EXPERTS, (1, rows, choices), p=popularity / popularity.sum()).astype(np.int32)
        for _ in range(2)
    ]
    past, following = (routing_counts(part, EXPERTS) for part in ids)
    table = balance_experts(past, 64, 64)
    assert imbalance(table, following, 64).max() <= 1.1


def test_identity_table_gives_every_expert_its_own_number() -> None:
    table = identity_table(2, 5)
    np.testing.assert_array_equal(table.replicas[:, :, 0], np.tile(np.arange(5), (2, 1)))
    counts = np.array([[1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(device_loads(table, counts, 5), counts)
    np.testing.assert_allclose(imbalance(table, counts, 5), [5 / 3, 1])


def test_routing_counts_count_choices_and_skip_padding() -> None:
    ids = np.array([[[0, 1], [1, 2], [NOTHING, NOTHING]], [[3, 3], [0, 3], [1, NOTHING]]])
    np.testing.assert_array_equal(routing_counts(ids, 4), [[1, 2, 1, 0], [1, 1, 0, 3]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda: balance_experts(np.ones(4), 2, 0), "counts: got shape [4]", id="rank"),
        pytest.param(lambda: balance_experts(-np.ones((1, 4)), 2, 0), "-1.0..-1.0", id="negative"),
        pytest.param(lambda: balance_experts(np.ones((1, 4)), 0, 0), "num_devices: got 0", id="no_device"),
        pytest.param(
            lambda: balance_experts(np.ones((1, 384)), 64, 60),
            "num_redundant: got 60 for 384 experts on 64 devices",
            id="uneven",
        ),
        pytest.param(lambda: balance_experts(np.ones((1, 4)), 2, 6), "expected 0..4", id="too_many"),
        pytest.param(lambda: table_of(np.array([[0, 1, 1]]), 3), "expert 2 of layer 0", id="no_place"),
        pytest.param(lambda: table_of(np.array([[0, 3]]), 3), "experts 0..3", id="unknown_expert"),
        pytest.param(
            lambda: imbalance(identity_table(1, 4), np.ones((1, 5)), 2), "expected [1, 4]", id="other_model"
        ),
        pytest.param(lambda: routing_counts(np.array([[[0, 4]]]), 4), "got ids 0..4", id="unknown_id"),
        pytest.param(lambda: routing_counts(np.ones((1, 2)), 4), "got float64", id="no_integers"),
    ],
)
def test_refusals_say_what_to_do(call, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        call()
    assert message in str(error.value)
    assert ";" in str(error.value), "how to fix it"
