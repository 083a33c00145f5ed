"""Layouts and meshes as values: what is refused, in words that help, and what the presets divide."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_jax.arrays import LOGICAL_AXES
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.weights import check_layout
from deepinfer_jax.sharding.errors import LayoutError
from deepinfer_jax.sharding.layout import FOLLOWERS, GATHERABLE, SINGLE, SPLITTABLE, Layout, describe, divide
from deepinfer_jax.sharding.mesh import MeshShape, make_mesh
from deepinfer_jax.sharding.presets import PRESETS, find_layout
from deepinfer_jax.testing.presets import DIVISIBLE

GRID = MeshShape.parse("2x4")


def layout(**split: Any) -> Layout:
    return Layout("mine", "a test", split)


def refusal(act: Callable[[], Any]) -> str:
    """Give the message of the refusal that an action must meet."""
    with pytest.raises(LayoutError) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("8", (("data", 8),)),
        ("2x4", (("data", 2), ("model", 4))),
        ((2, 2, 2), (("data", 2), ("model", 2), ("pod", 2))),
        ("a=2, b=4", (("a", 2), ("b", 4))),
        (GRID, GRID.axes),
    ],
    ids=["line", "grid", "sizes", "named", "shape"],
)
def test_a_mesh_is_read(text: Any, axes: tuple[tuple[str, int], ...]) -> None:
    mesh = MeshShape.parse(text)
    assert mesh.axes == axes
    assert mesh.num_devices == mesh.size(mesh.names)


@pytest.mark.parametrize("text", ["", "x", "2x", "8.0", "-8", "two", "2*4", "data=2,4", "=8", "data=", "0x8"])
def test_a_mesh_that_is_none_is_refused(text: str) -> None:
    message = refusal(lambda: MeshShape.parse(text))
    assert message.startswith("mesh: got ")
    assert "expected" in message and "write" in message


def test_a_mesh_needs_names_for_more_axes_than_have_them() -> None:
    assert "a=2,b=2,c=2,d=2" in refusal(lambda: MeshShape.parse("2x2x2x2"))


@pytest.mark.parametrize("axes", [(), (("a", 2), ("a", 2)), (("a b", 2),), (("a", 0),)])
def test_axes_have_names_of_their_own_and_sizes(axes: Any) -> None:
    assert "each with a name of its own" in refusal(lambda: MeshShape(axes))


def test_a_mesh_of_more_devices_than_there_are_says_how_to_simulate_them() -> None:
    message = refusal(lambda: make_mesh(MeshShape.parse("4096")))
    assert "needs 4096 devices" in message
    assert "--xla_force_host_platform_device_count=4096" in message


def test_every_axis_can_be_divided_in_one_way_at_least_or_never() -> None:
    words = {*SPLITTABLE, *FOLLOWERS, *GATHERABLE}
    assert words <= LOGICAL_AXES
    assert {*FOLLOWERS.values()} <= SPLITTABLE.keys()


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"split": {"expert": "data"}}, ("'expert'", "experts", "check the spelling")),
        ({"split": {"embed": "data"}}, ("'embed'", "leave 'embed' out")),
        ({"split": {"q_rank": "data"}}, ("'q_rank'", "put 'q_rank' into gathered")),
        ({"split": {"pages": "data"}}, ("'pages'", "write 'slots' instead")),
        ({"split": {"o_groups": "data"}}, ("'o_groups'", "write 'heads' instead")),
        ({"split": {"experts": ()}}, ("'experts'", "leave 'experts' out")),
        ({"gathered": {"slots": "data"}}, ("'slots'", "leave 'slots' out")),
        ({"gathered": {"layer": "data"}}, ("'layer'", "check the spelling")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_word_that_cannot_be_divided_is_refused(tables: dict[str, Any], named: tuple[str, ...]) -> None:
    message = refusal(lambda: Layout("mine", "a test", **tables))
    assert message.startswith("layout 'mine': ")
    assert "expected" in message
    for part in named:
        assert part in message


def test_a_word_in_both_tables_is_refused() -> None:
    tables: Any = {"split": {"experts": "data"}, "gathered": {"experts": "model"}}
    message = refusal(lambda: Layout("mine", "a test", **tables))
    assert "['experts'] in both split and gathered" in message
    assert "take it out of one" in message


def test_rows_begin_with_the_axes_of_slots() -> None:
    message = refusal(lambda: layout(slots="data", rows="model"))
    assert "write rows=['data', 'model']" in message
    assert layout(slots="data", rows=("data", "model")).sequence_axes == ("model",)


@pytest.mark.parametrize("axes", ["pod", ("data", "data"), ("model", "pod")], ids=str)
def test_axes_that_the_mesh_does_not_have_are_refused(axes: Any) -> None:
    message = refusal(lambda: layout(experts=axes).on(GRID))
    assert "'experts' is divided over" in message
    assert "use its names ['data', 'model']" in message


def test_a_star_stands_for_all_axes() -> None:
    found = layout(experts="*", slots="data").on(GRID)
    assert found.axes_of("experts") == ("data", "model")
    assert found.axes_of("slots") == found.axes_of("pages") == found.axes_of("rows") == ("data",)
    assert found.on(GRID) == found
    assert hash(found) == hash(layout(slots=["data"], experts=["data", "model"]))


def test_rows_lie_with_their_slots_while_decoding() -> None:
    found = layout(rows="*", experts="*").on(GRID)
    assert found.sequence_axes == ("data", "model")
    assert found.while_decoding.sequence_axes == ()
    assert found.while_decoding.axes_of("experts") == found.axes_of("experts")


def test_an_array_is_divided() -> None:
    found = layout(experts="*").on(GRID)
    words, sizes = ("layers", "experts", "ffn"), (3, 16, 5)
    assert divide("w", words, sizes, sizes, found, GRID) == ((), ("data", "model"), ())


def test_one_mesh_axis_twice_in_an_array_is_refused() -> None:
    found = layout(experts="*", ffn="model").on(GRID)
    message = refusal(lambda: divide("the w1", ("experts", "ffn"), (16, 64), (16, 64), found, GRID))
    for part in (
        "layout 'mine'",
        "the w1 [16, 64]",
        "mesh axis 'model'",
        "'experts'",
        "'ffn'",
        "another axis",
    ):
        assert part in message


def test_a_size_that_does_not_divide_is_refused_with_sizes_that_do() -> None:
    found = layout(experts="*").on(GRID)
    message = refusal(lambda: divide("the w1", ("experts",), (12,), (12,), found, GRID))
    for part in (
        "mesh data=2 x model=4",
        "the w1 [12]",
        "'experts'",
        "12 experts",
        "8 devices",
        "['data', 'model']",
    ):
        assert part in message
    assert "work: 1, 2, 3, 4, 6, 12" in message


def test_parts_stay_whole() -> None:
    found = layout(heads="*").on(GRID)
    message = refusal(lambda: divide("wq_b", ("heads",), (128,), (4,), found, GRID))
    assert "4 parts (128 channels of heads)" in message
    assert "work: 1, 2, 4;" in message


def test_presets_are_examples_of_themselves() -> None:
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert find_layout(name) is preset
        assert find_layout(preset) is preset
        assert describe(preset) or preset == SINGLE
    assert re.search("'data', 'expert'", refusal(lambda: find_layout("date")))


@pytest.mark.parametrize("mesh", ["1", "2", "8", "2x4", "2x2x2"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_divide_a_model_that_divides(name: str, mesh: str) -> None:
    shape = MeshShape.parse(mesh)
    check_layout(DIVISIBLE, PRESETS[name].on(shape), shape)


def check(config: ModelConfig, preset: str, mesh: str, redundant: int = 0) -> None:
    shape = MeshShape.parse(mesh)
    check_layout(config, PRESETS[preset].on(shape), shape, redundant)


def test_a_model_that_does_not_divide_is_refused_by_array() -> None:
    message = refusal(lambda: check(DIVISIBLE, "data+expert", "7"))
    assert "ffn.experts.w1" in message
    assert f"{DIVISIBLE.n_routed_experts} experts" in message


def test_redundant_experts_count() -> None:
    experts = DIVISIBLE.n_routed_experts
    check(DIVISIBLE, "data+expert", f"{experts + 1}", redundant=1)
    assert "experts" in refusal(lambda: check(DIVISIBLE, "data+expert", "8", redundant=1))
