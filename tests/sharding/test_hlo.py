"""Collectives read from compiled programs: kinds, axes, bytes, and how often they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from deepinfer_jax.sharding.hlo import FoundCollective, read_collectives
from deepinfer_jax.sharding.mesh import MeshShape

pytestmark = pytest.mark.multi

SHAPE = MeshShape((("data", 2), ("model", 4)))
BOTH = SHAPE.names
ROWS, WIDTH = 8, 16
NUM_BYTES = ROWS * WIDTH * 4


def compiled_text(function: Callable[..., Any], *others: Any) -> str:
    """Compile a function of a [ROWS, WIDTH] float32 array of each device and of whole other arguments."""
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)
    specs = (P(BOTH), *(P() for _ in others))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(BOTH), check_vma=False)
    text = jax.jit(mapped).lower(jnp.zeros((8 * ROWS, WIDTH)), *others).compile().as_text()
    assert text is not None
    return text


def found_in(function: Callable[..., Any], *others: Any) -> list[tuple[Any, ...]]:
    """List (kind, axes, devices, bytes, calls, depends on data) of a compiled function."""
    return [as_row(found) for found in read_collectives(compiled_text(function, *others), SHAPE)]


def as_row(found: FoundCollective) -> tuple[Any, ...]:
    return (found.kind, found.axes, found.num_devices, found.num_bytes, found.calls, found.depends_on_data)


def times(count: int, body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Repeat a function in a scan."""
    return lambda x: lax.scan(lambda x, _: (body(x), None), x, None, length=count)[0]


def total(axes: str | tuple[str, ...]) -> Callable[[Any], Any]:
    """An all-reduce that cannot be left out in a loop."""
    return lambda x: lax.psum(x, axes) * 0.5


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(total("model"), ("all-reduce", ("model",), 4, NUM_BYTES), id="all_reduce"),
        pytest.param(total(BOTH), ("all-reduce", BOTH, 8, NUM_BYTES), id="two_axes"),
        pytest.param(
            lambda x: lax.all_gather(x, "data", tiled=True)[::2] * 0.5,
            ("all-gather", ("data",), 2, NUM_BYTES),
            id="all_gather",
        ),
        pytest.param(
            lambda x: lax.psum_scatter(x, "model", tiled=True),
            ("reduce-scatter", ("model",), 4, NUM_BYTES),
            id="reduce_scatter",
        ),
        pytest.param(
            lambda x: lax.all_to_all(x, BOTH, 0, 0, tiled=True),
            ("all-to-all", BOTH, 8, NUM_BYTES),
            id="all_to_all",
        ),
        pytest.param(
            lambda x: lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)]),
            ("collective-permute", ("model",), 4, NUM_BYTES),
            id="permute",
        ),
        pytest.param(
            lambda x: lax.all_to_all(x.astype(jnp.uint8), "data", 0, 0, tiled=True).astype(x.dtype),
            ("all-to-all", ("data",), 2, NUM_BYTES // 4),
            id="bytes",
        ),
    ],
)
def test_one_collective(function: Callable[[Any], Any], expected: tuple[Any, ...]) -> None:
    assert found_in(function) == [(*expected, 1, False)]


def test_nested_loops_multiply() -> None:
    def body(x: Any) -> Any:
        return times(3, total("model"))(total("data")(x))

    assert found_in(times(5, body)) == [
        ("all-reduce", ("data",), 2, NUM_BYTES, 5, False),
        ("all-reduce", ("model",), 4, NUM_BYTES, 15, False),
    ]


def test_equal_collectives_are_merged() -> None:
    assert found_in(lambda x: times(3, total("data"))(total("data")(x))) == [
        ("all-reduce", ("data",), 2, NUM_BYTES, 4, False)
    ]


def test_a_loop_of_unknown_length_counts_once_and_is_marked() -> None:
    def function(x: Any, count: Any) -> Any:
        looped = lax.fori_loop(0, count, lambda _, x: times(3, total("model"))(x), x)
        return total("data")(looped)

    assert sorted(found_in(function, jnp.int32(4))) == [
        ("all-reduce", ("data",), 2, NUM_BYTES, 1, False),
        ("all-reduce", ("model",), 4, NUM_BYTES, 3, True),
    ]


def test_a_loop_until_all_are_done_is_marked() -> None:
    def function(x: Any) -> Any:
        return lax.while_loop(lambda x: lax.pmax(x.max(), BOTH) > 1, total("data"), x)

    # XLA moves what the condition needs to the end of the body and before the loop: known to run once.
    found = found_in(function)
    assert ("all-reduce", ("data",), 2, NUM_BYTES, 1, True) in found
    assert {row[:4] for row in found if row[3] == 4} == {("all-reduce", BOTH, 8, 4)}


def test_a_branch_is_marked() -> None:
    def function(x: Any, flag: Any) -> Any:
        return lax.cond(flag, total("data"), lambda x: x * 2, x)

    assert found_in(function, jnp.bool_(True)) == [("all-reduce", ("data",), 2, NUM_BYTES, 1, True)]


def test_names_tell_the_scope() -> None:
    def function(x: Any) -> Any:
        with jax.named_scope("experts"):
            return lax.psum(x, "model")

    (found,) = read_collectives(compiled_text(function), SHAPE)
    assert "experts" in found.op_name
    assert found.op_name.endswith("psum")


def test_a_program_without_collectives_has_none() -> None:
    assert found_in(lambda x: x + 1) == []


def program(instruction: str, entry_type: str = "f32[8,4]{1,0}") -> str:
    """A whole program text around one instruction."""
    return (
        "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"
        f"ENTRY %main (param: {entry_type}) -> {entry_type} {{\n"
        f"  %param = {entry_type} parameter(0)\n"
        f"  {instruction}\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("groups", "axes", "num_devices"),
    [
        pytest.param("replica_groups=mesh['data'=2,'model'=4] {'model'}", ("model",), 4, id="named"),
        pytest.param("replica_groups=mesh['data'=2,'model'=4] {'data','model'}", BOTH, 8, id="named_both"),
        pytest.param("replica_groups=mesh['data'=2,'model'=4] {'model':(1)2}", (), 2, id="named_part"),
        pytest.param("replica_groups=[2,4]<=[8]", ("model",), 4, id="counted"),
        pytest.param("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",), 2, id="counted_transposed"),
        pytest.param("replica_groups=[1,8]<=[8]", BOTH, 8, id="counted_all"),
        pytest.param("replica_groups={{0,1,2,3},{4,5,6,7}}", ("model",), 4, id="listed"),
        pytest.param("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 2, id="listed_other_axis"),
        pytest.param("replica_groups={{0,1},{2,3},{4,5},{6,7}}", (), 2, id="listed_no_axis"),
        pytest.param("replica_groups={}", BOTH, 8, id="all_devices"),
        pytest.param("source_target_pairs={{0,4},{4,0},{1,5},{2,6}}", (), 2, id="pairs_of_some"),
    ],
)
def test_every_form_of_groups_is_read(groups: str, axes: tuple[str, ...], num_devices: int) -> None:
    text = program(f"ROOT %x = f32[8,4]{{1,0}} all-reduce(%param), channel_id=1, {groups}, to_apply=%add")
    (found,) = read_collectives(text, SHAPE)
    assert (found.axes, found.num_devices) == (axes, num_devices)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        pytest.param(
            "%x = (f32[8,4]{1,0}, f32[64,4]{1,0}) all-gather-start(%param), replica_groups=[1,8]<=[8]",
            [("all-gather", BOTH, 8, 128, 1, False)],
            id="start",
        ),
        pytest.param(
            "%x = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-reduce(%param, %param), replica_groups=[1,8]<=[8]",
            [("all-reduce", BOTH, 8, 128, 2, False)],
            id="combined",
        ),
        pytest.param("%x = f32[64,4]{1,0} all-gather-done(%param)", [], id="done"),
        pytest.param(
            "%x = (f32[8,4], /*index=1*/f32[8,4]) all-to-all(%param, /*index=1*/%param), "
            "replica_groups=[4,2]<=[8]",
            [("all-to-all", (), 2, 256, 1, False)],
            id="tuple",
        ),
        pytest.param("%x = f32[8,4] all-reduce(%param), replica_groups=[8,1]<=[8]", [], id="alone"),
    ],
)
def test_forms_of_the_instruction(instruction: str, expected: list[tuple[Any, ...]]) -> None:
    assert [as_row(found) for found in read_collectives(program(instruction), SHAPE)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "without an ENTRY computation", id="no_program"),
        pytest.param(
            program("%x = f32[8] all-reduce(%param), groups=new"), "replica_groups: got", id="unknown_form"
        ),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_collectives(text, SHAPE)
