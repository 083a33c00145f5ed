"""The collectives on small arrays: every routing, every mesh axis, bit for bit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from deepinfer_jax.arrays import NOTHING, QuantArray, Storage
from deepinfer_jax.sharding.exchange import (
    WHOLE,
    Placement,
    bring_chosen,
    bring_columns,
    bring_rows,
    from_words,
    meeting,
    put_together,
    to_words,
)
from deepinfer_jax.sharding.exchange_plan import GATHER_ROWS, expert_exchange
from deepinfer_jax.sharding.expert_exchange import ExpertPlaces, exchange_experts, physical_experts
from deepinfer_jax.sharding.layout import Layout
from deepinfer_jax.sharding.mesh import MeshShape, make_mesh
from deepinfer_jax.sharding.place import partitions

pytestmark = pytest.mark.multi

SHAPE = MeshShape.parse("2x4")
MESH = make_mesh(SHAPE)
EVERYWHERE = ("data", "model")
DEVICES, EXPERTS, CHOICES, WIDTH = 8, 16, 3, 6
MANY = GATHER_ROWS + 8
"""Rows of a device that travel in rounds."""


def on_mesh(function, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def scaled(values, x, places, weights):
    """Stands in for experts: expert e multiplies by its own value, by the weight and by channel number."""
    channel = jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)
    chosen = values[jnp.maximum(places, 0)] * weights
    found = x[:, None, :] * chosen[:, :, None] * channel[None, None, :]
    return jnp.where((places >= 0)[:, :, None], found, 0)


def random_routing(rows: int, random: np.random.Generator) -> np.ndarray:
    ids = np.stack([random.permutation(EXPERTS)[:CHOICES] for _ in range(rows)])
    ids[random.random(rows) < 0.2] = NOTHING
    return ids.astype(np.int32)


def one_device_only(rows: int) -> np.ndarray:
    """All rows choose the experts of the last device, and one of the first."""
    return np.tile(np.array([EXPERTS - 1, EXPERTS - 2, 0], np.int32), (rows, 1))


def one_expert_only(rows: int) -> np.ndarray:
    return np.tile(np.array([5, NOTHING, NOTHING], np.int32), (rows, 1))


ROUTINGS = {
    "random": lambda rows: random_routing(rows, np.random.default_rng(rows)),
    "one_device": one_device_only,
    "one_expert": one_expert_only,
    "nobody": lambda rows: np.full((rows, CHOICES), NOTHING, np.int32),
}
LAYOUTS = {
    "over_the_rows": {"slots": "*", "experts": "*"},
    "last_axis_first": {"slots": "*", "experts": ("model", "data")},
    "one_axis_of_rows": {"slots": "*", "experts": "model"},
    "rows_on_one_axis": {"slots": "data", "experts": "*"},
    "rows_on_the_later_axis": {"slots": "model", "experts": "*"},
    "repeated_rows": {"experts": "*"},
    "apart": {"slots": "data", "experts": "model"},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("rows_each", [3, MANY], ids=["few_rows", "many_rows"])
def test_every_routing_reaches_its_experts_and_comes_home(layout, rows_each) -> None:
    chosen = Layout("test", "", layout).on(SHAPE)
    rows = rows_each * SHAPE.size(chosen.axes_of("rows"))
    held = EXPERTS // SHAPE.size(chosen.axes_of("experts"))
    # Two rows of padding behind each device's rows.
    padded = rows_each + 2

    def run(values, x, places, weights):
        filled = [jnp.pad(array, ((0, 2), (0, 0)), constant_values=fill) for array, fill in (
            (x, 9.0), (places, NOTHING), (weights, 9.0))]  # fmt: skip
        assert filled[0].shape[0] == padded
        compute = partial(scaled, values)
        return exchange_experts(compute, *filled, held, Placement(chosen, rows_each))[:rows_each]

    by_rows = PartitionSpec(chosen.axes_of("rows") or None)
    by_experts = PartitionSpec(chosen.axes_of("experts"))
    function = on_mesh(run, (by_experts, by_rows, by_rows, by_rows), by_rows)
    random = np.random.default_rng(1)
    values = random.standard_normal(EXPERTS).astype(np.float32)
    x = random.standard_normal((rows, WIDTH)).astype(np.float32)
    weights = random.random((rows, CHOICES)).astype(np.float32)
    for name, routing in ROUTINGS.items():
        places = routing(rows)
        expected = jax.jit(scaled)(values, x, places, weights)
        found = function(values, x, places, weights)
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_capacity_holds_even_routing_and_small_steps_are_gathered() -> None:
    assert expert_exchange(GATHER_ROWS, 6, 8).is_gathered
    plan = expert_exchange(64, 6, 8)
    assert plan.capacity == 72  # 64 rows x 6 choices / 8 devices = 48 on average, half as many again
    assert expert_exchange(64, 6, 1).capacity == 384
    assert expert_exchange(64, 6, 384).capacity >= 4


def test_replicas_take_turns_and_absent_experts_stay_absent() -> None:
    table = ExpertPlaces(
        replicas=jnp.array([[4, 4, 4], [0, 2, 5], [1, 3, 1]], jnp.int32),
        num_replicas=jnp.array([1, 3, 2], jnp.int32),
    )
    ids = jnp.array([[1, 2], [1, NOTHING], [1, 0], [2, 1]], jnp.int32)
    places = np.asarray(physical_experts(ids, table, WHOLE))
    for expert, allowed in enumerate(([4], [0, 2, 5], [1, 3])):
        assert set(places[np.asarray(ids) == expert].tolist()) <= set(allowed)
    assert places[1, 1] == NOTHING
    many = np.asarray(physical_experts(jnp.ones((100, 1), jnp.int32), table, WHOLE)).ravel()
    assert max(np.bincount(many)[[0, 2, 5]]) - min(np.bincount(many)[[0, 2, 5]]) <= 1


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data"), ("model",)], ids=str)
@pytest.mark.parametrize("slots", [EVERYWHERE, ("data",), ()], ids=str)
def test_rows_of_a_divided_table_come_as_stored(axes, slots) -> None:
    split = {"engram_rows": axes, **({"slots": slots} if slots else {})}
    layout = Layout("test", "", split).on(SHAPE)
    random = np.random.default_rng(2)
    codes = random.integers(0, 127, (24, 64)).astype(np.uint8)
    table = QuantArray(
        *(jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn), jnp.asarray(codes[:, :2])),
        *(Storage.FP8_ROW, ("engram_rows", "engram_row")),
    )
    wanted = random.integers(0, 24, (16, 3)).astype(np.int32)

    def run(table, indices):
        rows = indices.shape[0]
        brought, places = bring_rows(table, indices, "engram_rows", Placement(layout, rows))
        return jax.tree.map(lambda stored: stored[places], brought)

    by_rows = PartitionSpec(slots or None)
    found = on_mesh(run, (PartitionSpec(axes), by_rows), by_rows)(table, wanted)
    np.testing.assert_array_equal(np.asarray(found.payload).view(np.uint8), codes[wanted])
    np.testing.assert_array_equal(found.scales, codes[:, :2][wanted])


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data"), ("model",), ("data",)], ids=str)
@pytest.mark.parametrize("slots", [EVERYWHERE, ("data",), ("model",), ()], ids=str)
def test_columns_of_a_divided_head_come_home_in_order(axes, slots) -> None:
    layout = Layout("test", "", {"vocab": axes, **({"slots": slots} if slots else {})}).on(SHAPE)
    own, rest = meeting(layout, "vocab")
    logits = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

    def run(columns, rows):
        shown = jax.lax.all_gather(rows, own, axis=0, tiled=True) if own else rows
        return bring_columns(columns[shown], axes, own, rest)

    by_rows = PartitionSpec(slots or None)
    function = on_mesh(run, (PartitionSpec(None, axes), by_rows), by_rows)
    np.testing.assert_array_equal(function(logits, np.arange(16, dtype=np.int32)), logits)


def test_chosen_rows_reach_all_that_share_them() -> None:
    values = np.random.default_rng(3).standard_normal((16, 4)).astype(np.float32)
    row_ids = np.random.default_rng(4).permutation(16).astype(np.int32)
    chosen = np.array([3, 15, -1, 0], np.int32)
    whole = PartitionSpec()
    run = partial(bring_chosen, axes=EVERYWHERE)
    divided = PartitionSpec(EVERYWHERE)
    found = on_mesh(run, (divided, divided, whole), whole)(values, row_ids, chosen)
    expected = np.stack([values[row_ids == row][0] if row >= 0 else np.zeros(4) for row in chosen])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "kind", [jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32], ids=lambda kind: kind.__name__
)
def test_stored_weights_are_put_together_in_order(kind) -> None:
    layout = Layout("test", "", gathered={"heads": ("model", "data"), "ffn": "data"}).on(SHAPE)
    weights = {
        name: jnp.asarray(np.random.default_rng(6).standard_normal(shape), kind)
        for name, shape in (("rows", (16, 3)), ("columns", (3, 8)), ("both", (2, 4)), ("none", (5,)))
    }
    words = {
        **{"rows": ("heads", "embed"), "columns": ("embed", "heads"), "both": ("ffn", "embed")},
        "none": ("embed",),
    }
    specs = partitions(words, layout)
    function = on_mesh(lambda tree: put_together(tree, words, layout), (specs,), PartitionSpec())
    for name, found in function(weights).items():
        assert found.dtype == kind
        np.testing.assert_array_equal(
            np.asarray(found, np.float32), np.asarray(weights[name], np.float32), err_msg=name
        )


@pytest.mark.parametrize("widths", [(4,), (3, 2), (1, 1, 1)], ids=str)
def test_words_keep_every_bit(widths) -> None:
    kinds = (jnp.float32, jnp.uint8, jnp.bfloat16)
    random = np.random.default_rng(5)
    tree = tuple(
        jax.lax.bitcast_convert_type(
            jnp.asarray(random.integers(0, 256, (5, width, jnp.dtype(kind).itemsize)).astype(np.uint8)), kind
        )
        if jnp.dtype(kind).itemsize > 1
        else jnp.asarray(random.integers(0, 256, (5, width)).astype(np.uint8))
        for width, kind in zip(widths, kinds, strict=False)
    )
    words = to_words(tree)
    assert words.dtype == jnp.uint32
    for before, after in zip(tree, from_words(words, tree), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(np.asarray(before).view(np.uint8), np.asarray(after).view(np.uint8))
