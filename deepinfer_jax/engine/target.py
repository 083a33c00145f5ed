"""The mesh a model runs on, and the way of arrays to it and back.

Separate because the mesh may span processes: then every process calls the same steps with the same
arrays, and no process alone can read a result.
Read next: `../step.py` (`Target`), `../sharding/place.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ..config import ModelConfig
from ..model.draft_weights import check_draft_layout, words_of
from ..model.schedule import layers_by_kind
from ..model.weights import Weights, check_layout
from ..sharding.errors import LayoutError
from ..sharding.expert_exchange import ExpertPlaces
from ..sharding.experts import balance_experts
from ..sharding.layout import Layout
from ..sharding.mesh import MeshShape, make_mesh
from ..sharding.place import PADDED, mesh_shape, pad_table, place_tree
from ..sharding.presets import find_layout
from ..step import ONE_DEVICE, Target

DEFAULT_LAYOUT = "data+expert"
"""Layout of a mesh for which none is named."""


def make_target(
    config: ModelConfig,
    mesh: str | tuple[int, ...] | MeshShape | Mesh | None,
    layout: str | Layout | None,
    redundant_experts: int = 0,
) -> Target:
    """Say where a model runs, and refuse what cannot hold it.

    Args:
        config: the architecture.
        mesh: such as "8", "2x4" or "data=2,model=4", or a mesh of JAX; None for one device.
        layout: a preset's name or a layout; `DEFAULT_LAYOUT` by default.
        redundant_experts: further places for routed experts.

    Returns:
        The target.

    Raises:
        LayoutError: a layout without a mesh, one that cannot divide the model, or too few devices.
    """
    if mesh is None:
        if layout is not None:
            raise LayoutError(
                f"layout: got {layout!r} without a mesh, expected both; name the grid of devices as well, "
                "such as mesh='8'"
            )
        return ONE_DEVICE
    shape = mesh_shape(mesh) if isinstance(mesh, Mesh) else MeshShape.parse(mesh)
    chosen = find_layout(DEFAULT_LAYOUT if layout is None else layout).on(shape)
    check_layout(config, chosen, shape, redundant_experts)
    return Target(chosen, mesh if isinstance(mesh, Mesh) else make_mesh(shape))


def put_on(
    weights: Weights,
    config: ModelConfig,
    target: Target,
    routing_counts: np.ndarray | None = None,
    redundant_experts: int = 0,
) -> Weights:
    """Put weights where a target wants them.

    Args:
        weights: the loaded weights.
        config: the architecture.
        target: where to.
        routing_counts: [L, E], how often each layer's experts were chosen; None for no balancing.
        redundant_experts: further places for routed experts.

    Returns:
        The placed weights.

    Raises:
        LayoutError: counts of another model, further places without counts, or experts that no mesh
            axis divides.
    """
    if routing_counts is None and not redundant_experts:
        return weights if target.mesh is None else _place(weights, config, target)
    shares = _size(target, target.layout.axes_of("experts"))
    expected = (config.num_hidden_layers, config.n_routed_experts)
    if routing_counts is None or np.shape(routing_counts) != expected or shares == 1:
        got = "no counts" if routing_counts is None else f"counts of shape {np.shape(routing_counts)}"
        raise LayoutError(
            f"balanced experts: got {got} and experts divided over {shares} devices, expected counts of "
            f"shape {expected} and a layout that divides 'experts'; count the choices with "
            "deepinfer_jax.sharding.experts.routing_counts, or leave routing_counts and redundant_experts "
            "out"
        )
    return _place(balanced(weights, config, routing_counts, shares, redundant_experts), config, target)


def balanced(
    weights: Weights, config: ModelConfig, routing_counts: np.ndarray, shares: int, redundant_experts: int
) -> Weights:
    """Reorder and repeat routed experts so that all devices get about as many rows.

    Args:
        weights: the loaded weights.
        config: the architecture.
        routing_counts: [L, E].
        shares: devices over which experts are divided.
        redundant_experts: further places.

    Returns:
        The weights with experts in physical order and their tables.
    """
    layers = {}
    for kind, numbers in layers_by_kind(config).items():
        table = balance_experts(np.asarray(routing_counts)[list(numbers)], shares, redundant_experts)
        layer, at = weights.layers[kind.name], np.arange(len(numbers))[:, None]
        experts = jax.tree.map(
            lambda stack, at=at, t=table: stack[at, t.logical_of_physical], layer.ffn.experts
        )
        places = ExpertPlaces(jnp.asarray(table.replicas), jnp.asarray(table.num_replicas))
        layers[kind.name] = layer.replace(ffn=layer.ffn.replace(experts=experts, expert_table=places))
    return weights.replace(layers=layers)


def _place(weights: Weights, config: ModelConfig, target: Target) -> Weights:
    assert target.mesh is not None
    shares = _size(target, target.layout.axes_of(PADDED))
    engram = tuple(one.replace(embed=pad_table(one.embed, shares)) for one in weights.engram)
    if weights.draft is not None and not holds_draft(config, target):
        weights = weights.replace(draft=None)
    words = words_of(weights, config)
    return place_tree(weights.replace(engram=engram), words, target.layout, target.mesh)


def holds_draft(config: ModelConfig, target: Target) -> bool:
    """Tell whether a layout can divide the draft stages; else a model is placed without them."""
    try:
        refuse_draft(config, target)
    except LayoutError:
        return False
    return True


def refuse_draft(config: ModelConfig, target: Target) -> None:
    """Refuse a layout that cannot divide the draft stages.

    Raises:
        LayoutError: what cannot be divided, by array, dimension, size and mesh axis.
    """
    if target.mesh is not None:
        check_draft_layout(config, target.layout, mesh_shape(target.mesh))


def num_slot_shares(target: Target) -> int:
    """Count the shares that slots are divided into."""
    return _size(target, target.layout.axes_of("slots"))


def num_row_shares(target: Target) -> int:
    """Count the devices that share the rows of a slot."""
    return _size(target, target.layout.sequence_axes)


def to_devices(tree: Any, words: Any, target: Target) -> Any:
    """Put host arrays where a step wants them; left to JAX on one device."""
    return tree if target.mesh is None else place_tree(tree, words, target.layout, target.mesh)


def to_host(tree: Any, target: Target) -> Any:
    """Make a step's output readable in every process."""
    if target.mesh is None or not target.mesh.is_multi_process:
        return tree
    return multihost_utils.process_allgather(tree, tiled=True)


def _size(target: Target, axes: tuple[str, ...]) -> int:
    return 1 if target.mesh is None else mesh_shape(target.mesh).size(axes)
