"""How an array is declared: shape, logical axes, storage, initial values, checkpoint tensors.

One `ArraySpec` per kind of tensor is the single source that random initialisation, the checkpoint
reader and writer, shape checks, shardings and the parameter table read.
Read next: `model/weights.py`, where every weight of the model is declared.

Dimension letters used in shape comments and docstrings, everywhere in the package:

    R rows (tokens of a step)   B slots (sequences)      D hidden channels   V vocabulary
    N query heads               H head channels          M residual streams  L layers
    E routed experts            K experts or entries     F expert channels   G compressed groups
    W sliding window            C Engram columns         I index heads
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from .config import NOTHING as NOTHING

type Array = jax.Array

MASKED_SCORE = -jnp.inf
"""Score of what must not be chosen or attended to."""

LOGICAL_AXES = frozenset(
    {
        *("rows", "slots", "entries", "pages", "layers", "sources", "streams", "mix", "scalars"),
        *("embed", "vocab", "heads", "head_dim", "q_rank", "o_groups", "o_rank", "group_input"),
        *("experts", "router", "ffn", "index_heads", "index_head_dim", "engram_rows", "engram_row"),
        *("engram_input", "engram_output", "markov_rank", "markov_vocab", "draft_input", "confidence_input"),
    }
)
"""The words that name a dimension's meaning; a layout maps them to mesh axes."""


class Storage(Enum):
    """How the released mixed checkpoint stores a tensor (spec/checkpoint.md section 3)."""

    BF16 = "bf16"
    F32 = "f32"
    FP8_BLOCK = "fp8 32x32"
    FP8_ROW = "fp8 1x32"
    MXFP4 = "mxfp4 1x32"

    @property
    def is_quantized(self) -> bool:
        """Whether a `.scale` tensor belongs to it."""
        return self not in (Storage.BF16, Storage.F32)

    @property
    def block_rows(self) -> int:
        """Rows that share a scale, where there are scales; columns are always 32."""
        return 32 if self is Storage.FP8_BLOCK else 1


class QuantArray(struct.PyTreeNode):
    """A quantised weight as it lies in device memory: the bytes of the checkpoint, alone or stacked.

    Slicing its leading axes is `jax.tree.map`; `kernels.dequantize` gives its values.

    Args:
        payload: float8_e4m3fn [..., rows, columns]; for MXFP4 uint8 [..., rows, columns / 2], the
            even column in the low nibble.
        scales: uint8 E8M0 bytes [..., ceil(rows / 32) or rows, ceil(columns / 32)].
        storage: FP8_BLOCK, FP8_ROW or MXFP4.
        axes: logical axes of rows and columns.

    Source: spec/checkpoint.md section 3.
    """

    payload: Array
    scales: Array
    storage: Storage = struct.field(pytree_node=False)
    axes: tuple[str, ...] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, stacking axes in front."""
        *rows, columns = self.payload.shape
        return (*rows, 2 * columns if self.storage is Storage.MXFP4 else columns)

    @property
    def ndim(self) -> int:
        """Number of dimensions of `shape`."""
        return len(self.payload.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of payload and scales."""
        return sum(array.size * array.dtype.itemsize for array in (self.payload, self.scales))


@dataclass(frozen=True, slots=True)
class Initializer:
    """How a random weight is drawn: normal with `scale / sqrt(fan_in)`, or a constant.

    Args:
        scale: standard deviation times sqrt(last dimension); ignored for a constant.
        constant: value of every element, or None for a normal draw.
        noise: standard deviation added to a constant, so that a test reaches every path.
    """

    scale: float = 1.0
    constant: float | None = None
    noise: float = 0.0

    def draw(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Draw an array in float32 and round it to `dtype`."""
        return self.scaled(jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def scaled(self, draws: Any) -> Any:
        """Turn standard normal draws, of JAX or NumPy, into values."""
        if self.constant is None:
            return draws * (self.scale / math.sqrt(draws.shape[-1]))
        return self.constant + self.noise * draws


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The declaration of one weight: a tensor, or equal tensors of several layers and experts stacked.

    Args:
        name: checkpoint tensor name, with `{layer}` and `{expert}` where tensors are stacked.
        shape: logical shape of one tensor, before packing and stacking.
        axes: logical axis word of each dimension of `shape`.
        storage: storage in the released mixed checkpoint.
        initializer: how random weights are drawn.
        layers: layer ids stacked in front, in order; empty for a tensor that no layer owns.
        experts: number of experts stacked behind the layers; 0 for none.

    Raises:
        ValueError: axes that do not fit the shape or are not in `LOGICAL_AXES`.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    storage: Storage = Storage.BF16
    initializer: Initializer = Initializer()
    layers: tuple[int, ...] = ()
    experts: int = 0

    def __post_init__(self) -> None:
        unknown = set(self.axes) - LOGICAL_AXES
        if len(self.axes) != len(self.shape) or unknown:
            raise ValueError(
                f"{self.name}: axes {self.axes} for shape {self.shape}; expected one word of LOGICAL_AXES "
                f"for each dimension (unknown: {sorted(unknown)})"
            )

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape in memory: layers, experts, then the tensor's own dimensions."""
        return self._stack_sizes + self.shape

    @property
    def stacked_axes(self) -> tuple[str, ...]:
        """Logical axes of `stacked_shape`."""
        return ("layers",) * bool(self.layers) + ("experts",) * bool(self.experts) + self.axes

    @property
    def num_parameters(self) -> int:
        """Elements over all stacked tensors."""
        return math.prod(self.stacked_shape)

    @property
    def _stack_sizes(self) -> tuple[int, ...]:
        return (len(self.layers),) * bool(self.layers) + (self.experts,) * bool(self.experts)

    def tensors(self) -> list[tuple[tuple[int, ...], str]]:
        """List the checkpoint tensors as (index in the stack, name)."""
        entries = []
        for index in np.ndindex(*self._stack_sizes):
            rest = list(index)
            layer = self.layers[rest.pop(0)] if self.layers else None
            expert = rest.pop(0) if self.experts else None
            entries.append((index, self.name.format(layer=layer, expert=expert)))
        return entries

    def stored_shapes(self, is_quantized: bool) -> list[tuple[str, tuple[int, ...], str]]:
        """List (name suffix, shape, safetensors dtype) of what one tensor is on disk.

        Args:
            is_quantized: whether the checkpoint uses the released mixed storage; otherwise
                every quantised tensor is BF16 under the same name.
        """
        rows, columns = self.shape[0], self.shape[-1]
        if self.storage is Storage.F32:
            return [("", self.shape, "F32")]
        if self.storage is Storage.BF16 or not is_quantized:
            return [("", self.shape, "BF16")]
        scale_shape = (-(-rows // self.storage.block_rows), -(-columns // 32))
        packed = (rows, columns // 2) if self.storage is Storage.MXFP4 else self.shape
        payload = "I8" if self.storage is Storage.MXFP4 else "F8_E4M3"
        return [("", packed, payload), (".scale", scale_shape, "F8_E8M0")]

    @property
    def resident_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a quantised stack in device memory: payload, packed for MXFP4, and scales."""
        return tuple(self._stack_sizes + shape for _, shape, _ in self.stored_shapes(is_quantized=True))

    def memory_dtype(self, compute_dtype: Any) -> Any:
        """Give the dtype in device memory for a compute dtype: what is stored as F32 stays float32."""
        return jnp.float32 if self.storage is Storage.F32 else compute_dtype

    def on_layers(self, layers: Sequence[int]) -> ArraySpec:
        """Stack this declaration over the given layers."""
        return replace(self, layers=tuple(layers))


def is_spec(leaf: object) -> bool:
    """Tell an `ArraySpec` leaf, for `jax.tree.map(..., is_leaf=is_spec)`."""
    return isinstance(leaf, ArraySpec)


def spec_leaves(tree: Any) -> list[tuple[str, ArraySpec]]:
    """List (key path, declaration) of every array declared in a tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), spec) for path, spec in leaves]


def random_arrays(specs: Any, key: Array, compute_dtype: Any) -> Any:
    """Draw every declared array at random.

    Args:
        specs: a pytree of `ArraySpec`.
        key: base key; each array folds in a hash of its name, so adding one changes no other.
        compute_dtype: dtype of the arrays that are not stored as F32.

    Returns:
        The same tree with arrays.
    """

    def draw(spec: ArraySpec) -> Array:
        array_key = jax.random.fold_in(key, _name_hash(spec.name))
        return spec.initializer.draw(array_key, spec.stacked_shape, spec.memory_dtype(compute_dtype))

    return jax.tree.map(draw, specs, is_leaf=is_spec)


def random_resident_arrays(specs: Any, key: Array, compute_dtype: Any) -> Any:
    """Draw every declared array at random, the quantised ones as bytes, never wider.

    Quantised weights get uniform codes under scales of two neighbouring powers of two, mixed so that
    the standard deviation is the one that their initializer asks for.

    Args:
        specs: a pytree of `ArraySpec`.
        key: base key, used as `random_arrays` does.
        compute_dtype: dtype of the arrays that are neither quantised nor stored as F32.

    Returns:
        The same tree with arrays, and `QuantArray` where the released checkpoint is quantised. Of a
        quantised stack, some six times `_BYTES_AT_ONCE` are held besides the result.
    """

    def draw(spec: ArraySpec) -> Array | QuantArray:
        array_key = jax.random.fold_in(key, _name_hash(spec.name))
        if spec.storage.is_quantized:
            return _draw_quantized(spec, array_key)
        return spec.initializer.draw(array_key, spec.stacked_shape, spec.memory_dtype(compute_dtype))

    return jax.tree.map(draw, specs, is_leaf=is_spec)


_BYTES_AT_ONCE = 2**24

# Codes kept to a sign, exponents 8..11 and any mantissa: 2^1..2^4 times 1..1.875, never NaN.
_E4M3_KEPT, _E4M3_FORCED = 0x9F, 0x40
# Root mean squares: of those (the means of 4^e and of (1 + m / 8)^2), and of all 16 e2m1 codes.
_E4M3_DEVIATION = math.sqrt(85.0 * 2.1484375)
_E2M1_DEVIATION = math.sqrt(8.5625)


def _draw_quantized(spec: ArraySpec, key: Array) -> QuantArray:
    is_mxfp4 = spec.storage is Storage.MXFP4
    deviation = spec.initializer.scale / math.sqrt(spec.shape[-1])
    exponent = math.log2(deviation / (_E2M1_DEVIATION if is_mxfp4 else _E4M3_DEVIATION))
    # Scale 2^(e + 1) for a share p and 2^e for the rest: the mean square is 4^e (1 + 3 p).
    lower = math.floor(exponent)
    threshold = round(256 * (4 ** (exponent - lower) - 1) / 3)
    keys = jax.random.split(key)
    payload_shape, scale_shape = spec.resident_shapes
    if is_mxfp4:
        payload = _random_bytes(keys[0], payload_shape)
    else:
        codes = _random_bytes(keys[0], payload_shape, _E4M3_KEPT, _E4M3_FORCED)
        payload = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    draws = _random_bytes(keys[1], scale_shape).astype(jnp.int32)
    scales = (127 + lower + (draws < threshold).astype(jnp.int32)).astype(jnp.uint8)
    return QuantArray(payload, scales, spec.storage, spec.axes)


@partial(jax.jit, static_argnames=("shape", "kept", "forced", "at_once"))
def _random_bytes(
    key: Array, shape: tuple[int, ...], kept: int = 0xFF, forced: int = 0, at_once: int = _BYTES_AT_ONCE
) -> Array:
    """Fill blocks of rows in a loop: drawn at once, the generator's counters take many times the result."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    count = min(rows, max(1, at_once // columns))
    num_bytes = count * columns

    def fill(index: Array, filled: Array) -> Array:
        words = jax.random.bits(jax.random.fold_in(key, index), (-(-num_bytes // 4),), jnp.uint32)
        block = lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:num_bytes].reshape(count, columns)
        block = (block & jnp.uint8(kept)) | jnp.uint8(forced)
        # The last block moves back into place and overwrites some rows of the one before.
        start = jnp.minimum(index * count, rows - count)
        return lax.dynamic_update_slice(filled, block, (start, jnp.int32(0)))

    filled = lax.fori_loop(0, -(-rows // count), fill, jnp.zeros((rows, columns), jnp.uint8))
    return filled.reshape(shape)


def _name_hash(name: str) -> int:
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
