"""A step with everything it is given, as shapes on devices: what `lab_compile.py` lowers.

Separate because it follows the step's arguments and the placement of arrays, and compiles nothing.
Read next: `lab_compile.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from .arrays import is_spec
from .config import CacheConfig, ModelConfig
from .model.abstract_weights import abstract_weights
from .model.numerics import Numerics
from .model.weights import weight_specs
from .plans import ROW_BUCKETS, PrefillPlan
from .sharding.errors import LayoutError
from .sharding.layout import Layout
from .sharding.mesh import MeshShape, make_mesh
from .sharding.place import PADDED, pad_table, padded_size, place_tree
from .sharding.target import ONE_DEVICE, Target
from .step import EngineState, decode_step, initial_state, prefill_step, state_words


@dataclass(frozen=True, slots=True)
class StepShape:
    """Everything that the size of a step depends on.

    Args:
        config: the architecture.
        mesh: the grid of devices.
        layout: on that mesh.
        num_slots: sequences, over all devices.
        context: tokens that each slot can hold.
        step: "prefill" or "decode".
        prefill_rows: prompt rows over all devices, None for a full step on each.
        numerics: the choice of arithmetic.
    """

    config: ModelConfig
    mesh: MeshShape
    layout: Layout
    num_slots: int
    context: int
    step: str
    prefill_rows: int | None
    numerics: Numerics

    def check(self) -> None:
        """Refuse slots and rows that the devices cannot share evenly.

        Raises:
            LayoutError: naming a number that works.
        """
        for what, count, word, part in (
            ("slots", self.num_slots, "slots", 1),
            ("prefill rows", self.num_rows, "rows", ROW_BUCKETS[0]),
        ):
            shares = self.mesh.size(self.layout.axes_of(word))
            if count < 1 or count % (part * shares):
                raise LayoutError(
                    f"{what}: got {count} over {shares} devices, expected a multiple of {part * shares}; "
                    f"take {padded_size(max(count, 1), part * shares)}"
                )

    @property
    def num_rows(self) -> int:
        """Prompt rows of a prefill step, over all devices."""
        shares = self.mesh.size(self.layout.axes_of("rows"))
        return ROW_BUCKETS[-1] * shares if self.prefill_rows is None else self.prefill_rows


def lower_step(shape: StepShape, devices: Sequence[Any]) -> jax.stages.Lowered:
    """Trace and lower a step for devices that may be abstract.

    Args:
        shape: the step and its sizes.
        devices: as many as the mesh has, in its order.

    Returns:
        The lowered step, ready to compile.
    """
    config, numerics = shape.config, shape.numerics
    if shape.mesh.num_devices == 1:
        target, place = ONE_DEVICE, partial(_on_one_device, devices[0])
    else:
        target = Target(shape.layout, make_mesh(shape.mesh, devices))
        place = partial(_on_mesh, target)
    weights = _abstract_weights(shape, place)
    state = place(state_words(), _abstract_state(shape, target))
    options: dict[str, Any] = {"config": config, "numerics": numerics, "target": target}
    if shape.step == "prefill":
        plan = place(("slots",), _abstract_plan(shape))
        return prefill_step.lower(weights, state, plan, **options)
    is_active = place(("slots",), jax.ShapeDtypeStruct((shape.num_slots,), jnp.bool_))
    return decode_step.lower(weights, state, is_active, **options)


def _abstract_weights(shape: StepShape, place: Any) -> Any:
    """Describe the placed weights; tables are filled up so that their rows divide."""
    specs, plain = weight_specs(shape.config), abstract_weights(shape.config, shape.numerics)
    fill_up = partial(pad_table, shares=shape.mesh.size(shape.layout.stored_axes_of(PADDED)))

    def describe(spec: Any, weight: Any) -> Any:
        filled = jax.eval_shape(fill_up, weight) if PADDED in spec.axes else weight
        return place(spec.stacked_axes, filled)

    placed = jax.tree.map(describe, specs, plain.replace(token_map=None), is_leaf=is_spec)
    return placed.replace(token_map=place((), plain.token_map))


def _abstract_state(shape: StepShape, target: Target) -> EngineState:
    sizes = CacheConfig.for_slots(shape.num_slots, shape.context)
    options = {"config": shape.config, "sizes": sizes, "numerics": shape.numerics, "target": target}
    is_forbidden = jax.ShapeDtypeStruct((shape.config.vocab_size,), jnp.bool_)
    return jax.eval_shape(partial(initial_state, **options), is_forbidden)


def _abstract_plan(shape: StepShape) -> PrefillPlan:
    integers: Any = jax.ShapeDtypeStruct((shape.num_rows,), jnp.int32)
    flags: Any = jax.ShapeDtypeStruct((shape.num_rows,), jnp.bool_)
    last_rows: Any = jax.ShapeDtypeStruct((shape.num_slots,), jnp.int32)
    return PrefillPlan(integers, integers, integers, flags, next_ids=integers, last_rows=last_rows)


def _on_one_device(device: Any, words: Any, tree: Any) -> Any:
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda array: _placed(array, sharding), tree)


def _on_mesh(target: Target, words: Any, tree: Any) -> Any:
    """Give the arrays of a tree their shardings; `words` is a prefix of the tree."""
    assert target.mesh is not None
    return place_tree(tree, words, target.layout, target.mesh, put=_placed)


def _placed(array: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
