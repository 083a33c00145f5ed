"""Where a model runs: what is refused, what is filled up, what is repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from deepinfer_jax import load
from deepinfer_jax.engine.target import (
    balanced,
    make_target,
    num_row_shares,
    num_slot_shares,
    put_on,
    to_devices,
    to_host,
)
from deepinfer_jax.model.schedule import layers_by_kind
from deepinfer_jax.sharding.errors import LayoutError
from deepinfer_jax.sharding.layout import Layout
from deepinfer_jax.step import ONE_DEVICE
from deepinfer_jax.testing.presets import DIVISIBLE, TINY, random_weights

pytestmark = pytest.mark.multi

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout_alone": ({"mesh": None, "layout": "data"}, "layout: got 'data' without a mesh, expected both"),
    "unknown_preset": ({"mesh": "8", "layout": "dat"}, r"layout: got 'dat', expected one of \['single'"),
    "bad_mesh": ({"mesh": "2*4", "layout": None}, r"mesh: got '2\*4', expected sizes such as 8 or 2x4"),
    "more_devices_than_there_are": (
        {"mesh": "16", "layout": "data"},
        r"mesh data=16: needs 16 devices, got 8 \(cpu\); make the mesh smaller, or simulate",
    ),
    "experts_that_do_not_divide": (
        {"mesh": "4", "layout": "data+expert", "config": TINY},
        r"layers.full_1_source.ffn.experts.w1 \[1, 6, 32, 64\]: dimension 'experts' has 6 experts, which 4 "
        r"devices along \['data'\] cannot share evenly; numbers of devices that work: 1, 2, 3, 6",
    ),
    "groups_that_do_not_divide": (
        {"mesh": "4", "layout": "tensor", "config": TINY},
        r"attn.wo_a \[1, 64, 64\]: dimension 'o_groups' has 2 parts",
    ),
    "an_axis_twice": (
        {"mesh": "2x4", "layout": Layout("twice", "", {"experts": "*", "ffn": "model"})},
        "uses mesh axis 'model' for 'experts' and for 'ffn', expected each axis once in an array",
    ),
    "an_axis_of_another_mesh": (
        {"mesh": "a=8", "layout": Layout("other", "", {"slots": "data"})},
        r"'slots' is divided over \['data'\], expected different axes of the mesh a=8; use its names \['a'\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_before_anything_is_loaded(name: str) -> None:
    words, message = REFUSED[name]
    with pytest.raises(LayoutError, match=message):
        make_target(words.get("config", DIVISIBLE), words["mesh"], words["layout"])


def test_load_refuses_a_layout_before_it_reads_weights(tmp_path) -> None:
    with pytest.raises(LayoutError, match="expected each axis once"):
        load(mesh="2x4", layout=Layout("twice", "", {"experts": "*", "ffn": "model"}))


def test_shares_follow_the_layout() -> None:
    assert (num_slot_shares(ONE_DEVICE), num_row_shares(ONE_DEVICE)) == (1, 1)
    both = make_target(DIVISIBLE, "2x4", Layout("both", "", {"slots": "data", "rows": ("data", "model")}))
    assert (num_slot_shares(both), num_row_shares(both)) == (2, 4)
    of_jax = make_target(DIVISIBLE, jax.make_mesh((2, 2), ("x", "y")), "data")
    assert num_slot_shares(of_jax) == 4


def test_tables_are_filled_up_and_everything_keeps_its_values() -> None:
    config = replace(DIVISIBLE, engram_num_embeddings=(304,))
    weights = random_weights(config, jax.random.key(1))
    target = make_target(config, "6", Layout("tables", "", {"engram_rows": "*"}))
    placed = put_on(weights, config, target)
    assert placed.engram[0].embed.shape[0] == 306
    np.testing.assert_array_equal(placed.engram[0].embed[:304], weights.engram[0].embed)
    for before, after in zip(jax.tree.leaves(weights.layers), jax.tree.leaves(placed.layers), strict=True):
        np.testing.assert_array_equal(before, after)
    assert put_on(weights, config, ONE_DEVICE) is weights


def test_balanced_experts_stand_where_their_table_says() -> None:
    weights = random_weights(DIVISIBLE, jax.random.key(2))
    counts = np.random.default_rng(3).zipf(1.5, (3, DIVISIBLE.n_routed_experts)).clip(max=1000)
    found = balanced(weights, DIVISIBLE, counts, 8, 8)
    for kind in layers_by_kind(DIVISIBLE):
        before, after = weights.layers[kind.name].ffn.experts.w1, found.layers[kind.name].ffn.experts.w1
        table = found.layers[kind.name].ffn.expert_table
        assert after.shape[1] == DIVISIBLE.n_routed_experts + 8
        for layer, expert in np.ndindex(*table.num_replicas.shape):
            for place in np.asarray(table.replicas[layer, expert]):
                np.testing.assert_array_equal(after[layer, place], before[layer, expert])
        assert int(table.num_replicas.sum()) == table.num_replicas.shape[0] * after.shape[1]


@pytest.mark.parametrize(
    ("counts", "redundant", "layout", "message"),
    [
        (None, 8, "data+expert", "got no counts and experts divided over 8 devices"),
        (
            np.ones((3, 4)),
            0,
            "data+expert",
            r"got counts of shape \(3, 4\) .* expected counts of shape \(3, 16\)",
        ),
        (np.ones((3, 16)), 0, "data", "experts divided over 1 devices"),
    ],
    ids=["no_counts", "other_model", "whole_experts"],
)
def test_balancing_without_sense_is_refused(counts, redundant: int, layout: str, message: str) -> None:
    weights = random_weights(DIVISIBLE, jax.random.key(2))
    target = make_target(DIVISIBLE, "8", layout, redundant)
    with pytest.raises(LayoutError, match=message):
        put_on(weights, DIVISIBLE, target, counts, redundant)


def test_arrays_go_to_devices_and_come_back() -> None:
    target = make_target(DIVISIBLE, "8", "data")
    values = {"a": np.arange(16, dtype=np.int32), "b": np.zeros((8, 2), bool)}
    placed = to_devices(values, ("slots",), target)
    assert placed["a"].sharding.shard_shape((16,)) == (2,)
    assert all(np.array_equal(to_host(placed, target)[name], values[name]) for name in values)
    assert to_devices(values, ("slots",), ONE_DEVICE) is values
