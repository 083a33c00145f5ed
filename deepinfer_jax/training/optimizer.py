"""Initial weights, optimizer and the quantisation that the exported file will have.

Separate because it follows the declarations of the weights, not the training loop.
Read next: `lm.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from ..arrays import Array, Storage, is_spec, random_arrays, spec_leaves
from ..config import ModelConfig
from ..kernels.pallas.quantize import power_of_two_scale, round_e2m1, round_e4m3, straight_through
from ..model.schedule import layers_by_kind
from ..model.weights import Weights, weight_specs


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """Draw float32 training weights that start near a plain pre-norm residual network.

    Each hyper-connection site reads mostly one stream, in turn, writes to all and keeps them apart.

    Args:
        config: the architecture.
        seed: of the draw.

    Returns:
        The weights without a token map.
    """
    return residual_start(weight_specs(config), config, seed)


def residual_start(specs: Any, config: ModelConfig, seed: int) -> Any:
    """Draw float32 training weights of a tree of declarations, as `initial_weights` says.

    Args:
        specs: a tree of `ArraySpec`.
        config: the architecture.
        seed: of the draw.

    Returns:
        The same tree with arrays.
    """
    weights = random_arrays(specs, jax.random.key(seed), jnp.float32)
    by_path = dict(spec_leaves(specs))

    def adjust(path: Any, value: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        spec = by_path[name]
        if spec.initializer.constant is not None:
            value = jnp.full_like(value, spec.initializer.constant)
        if name.endswith(("wo_b", "w2")):
            value = value * 0.5
        if name in ("head", "embed"):
            value = value * 0.2
        if name.endswith("scale"):
            value = jnp.full_like(value, 0.1)
        if name.endswith((".hc_attn.base", ".hc_ffn.base")):
            value = jnp.asarray(_hyper_base(config, spec.layers, is_ffn="ffn" in name))
        return value

    return jax.tree_util.tree_map_with_path(adjust, weights)


def _hyper_base(config: ModelConfig, layers: tuple[int, ...], is_ffn: bool) -> np.ndarray:
    count = config.hc_mult
    base = np.zeros((len(layers), 2 * count + count * count), np.float32)
    for row, layer in enumerate(layers):
        base[row, :count] = -2.0
        base[row, (2 * layer + is_ffn) % count] = 2.0
        base[row, 2 * count :] = 3.0 * np.eye(count, dtype=np.float32).reshape(-1)
    return base


def make_optimizer(config: ModelConfig, num_steps: int, warmup: int = 100) -> optax.GradientTransformation:
    """Build the optimizer: Muon for hidden matrices, AdamW for the rest, faster Engram tables.

    Warm-up, constant rate, linear decay to 2 % over the last 40 % of the steps.

    Args:
        config: the architecture.
        num_steps: steps of the whole run.
        warmup: steps of linear warm-up.

    Returns:
        The optax transformation.

    Source: spec/nano_model.md section 5.
    """
    decay = int(num_steps * 0.4)

    def rate(peak: float) -> optax.Schedule:
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, warmup),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, 0.02 * peak, decay),
            ],
            [warmup, num_steps - decay],
        )

    specs = weight_specs(config)
    dimension_numbers = jax.tree.map(_muon_dimensions, specs, is_leaf=is_spec)
    muon = optax.contrib.muon(
        rate(0.02),
        weight_decay=0.1,
        adam_b2=0.95,
        adam_learning_rate=rate(3e-3),
        muon_weight_dimension_numbers=dimension_numbers,
    )
    is_table = jax.tree.map(lambda spec: spec.storage is Storage.FP8_ROW, specs, is_leaf=is_spec)
    is_frozen = jax.tree.map(
        lambda spec: spec.name.endswith(("gate.bias", "gate.bias_vl")), specs, is_leaf=is_spec
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon,
        optax.masked(optax.scale(10 / 3), is_table),
        optax.masked(optax.set_to_zero(), is_frozen),
    )


def _muon_dimensions(spec: Any) -> Any:
    """Give the matrix axes of a hidden matrix, or None for what AdamW updates."""
    is_adam = spec.storage is Storage.F32 or spec.storage is Storage.FP8_ROW
    is_adam |= spec.name in ("embed.weight", "head.weight") or spec.name.endswith("ffn.gate.weight")
    if is_adam or len(spec.shape) < 2 or "streams" in spec.axes:
        return None
    rank = len(spec.stacked_shape)
    return optax.contrib.MuonDimensionNumbers(reduction_axis=(rank - 1,), output_axis=(rank - 2,))


def compute_weights(weights: Weights, config: ModelConfig, dtype: Any, is_quantized: bool) -> Weights:
    """Cast master weights for the forward pass, through the storage's rounding if asked for.

    Gradients pass the rounding unchanged.

    Args:
        weights: float32 master weights with a token map.
        config: the architecture.
        dtype: compute dtype.
        is_quantized: whether to round FP8 and MXFP4 weights as the exported file will.

    Returns:
        The weights to compute with.

    Source: spec/checkpoint.md section 3.
    """

    arrays = weights.replace(token_map=None)
    cast = cast_as_stored(weight_specs(config), arrays, dtype, is_quantized)
    return cast.replace(token_map=weights.token_map)


def cast_as_stored(specs: Any, arrays: Any, dtype: Any, is_quantized: bool) -> Any:
    """Cast a tree of master weights as `compute_weights` says.

    Args:
        specs: a tree of `ArraySpec`.
        arrays: the same tree with float32 arrays.
        dtype: compute dtype.
        is_quantized: whether to round what is stored quantised.

    Returns:
        The same tree with the arrays to compute with.
    """

    def cast(spec: Any, value: Array) -> Array:
        if is_quantized and spec.storage.is_quantized:
            value = _STORED_ROUNDING[spec.storage](value)
        return value.astype(spec.memory_dtype(dtype))

    return jax.tree.map(cast, specs, arrays, is_leaf=is_spec)


@straight_through
def _round_fp8_block(weight: Array) -> Array:
    *stack, rows, columns = weight.shape
    return _round_fp8(weight.reshape(*stack, rows // 32, 32, columns // 32, 32), (-3, -1)).reshape(
        weight.shape
    )


@straight_through
def _round_fp8_row(weight: Array) -> Array:
    groups = weight.reshape(*weight.shape[:-1], weight.shape[-1] // 32, 32)
    return _round_fp8(groups, (-1,)).reshape(weight.shape)


def _round_fp8(groups: Array, axes: tuple[int, ...]) -> Array:
    amax = jnp.max(jnp.abs(groups), axis=axes, keepdims=True)
    scale, inverse = power_of_two_scale(jnp.maximum(amax, 1e-30) * np.float32(1 / 448))
    return round_e4m3(jnp.clip(groups * inverse, -448.0, 448.0)) * scale


@straight_through
def _round_mxfp4(weight: Array) -> Array:
    groups = weight.reshape(*weight.shape[:-1], weight.shape[-1] // 32, 32)
    amax = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale, _ = power_of_two_scale(jnp.maximum(amax, 1e-30) * np.float32(1 / 6))
    return (round_e2m1(groups, scale) * scale).reshape(weight.shape)


_STORED_ROUNDING = {
    Storage.FP8_BLOCK: _round_fp8_block,
    Storage.FP8_ROW: _round_fp8_row,
    Storage.MXFP4: _round_mxfp4,
}


def balance_biases(weights: Weights, loads: Array, config: ModelConfig, step_size: Array) -> Weights:
    """Move each router bias by a fixed step against its expert's load error.

    Args:
        weights: the weights.
        loads: float32 [L, E], share of choices.
        config: the architecture.
        step_size: float32 scalar.

    Returns:
        The weights with new `bias` and `bias_vl` (kept equal: there are no images to learn from).
    """
    layers = dict(weights.layers)
    for kind, members in layers_by_kind(config).items():
        stack = layers[kind.name]
        error = 1.0 / config.n_routed_experts - loads[jnp.asarray(members, dtype=jnp.int32)]
        bias = stack.ffn.bias + step_size * jnp.sign(error)
        layers[kind.name] = stack.replace(ffn=stack.ffn.replace(bias=bias, bias_vl=bias))
    return weights.replace(layers=layers)
