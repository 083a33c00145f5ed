"""The weights' shapes and dtypes, without a byte of them.

Separate from `weights.py` because it needs to know how each storage lies in memory, not what it means.
Read next: `weights.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import ArraySpec, QuantArray, Storage
from ..config import ModelConfig
from .numerics import Numerics
from .weights import Weights, map_specs, weight_specs


def abstract_weights(config: ModelConfig, numerics: Numerics) -> Weights:
    """Describe the weights of a model as they would lie in memory, for tracing and compiling.

    Args:
        config: the architecture; `is_quantized` decides between bytes and plain arrays.
        numerics: gives the dtype of what is neither quantised nor stored as F32.

    Returns:
        The tree of loaded weights with `jax.ShapeDtypeStruct` in place of arrays, token map included.
    """

    def describe(spec: ArraySpec) -> Any:
        if not (config.is_quantized and spec.storage.is_quantized):
            return jax.ShapeDtypeStruct(spec.stacked_shape, spec.memory_dtype(numerics.compute_dtype))
        payload, scales = spec.resident_shapes
        dtype = jnp.uint8 if spec.storage is Storage.MXFP4 else jnp.float8_e4m3fn
        codes: Any = jax.ShapeDtypeStruct(payload, dtype)
        exponents: Any = jax.ShapeDtypeStruct(scales, jnp.uint8)
        return QuantArray(codes, exponents, spec.storage, spec.axes)

    weights = map_specs(describe, weight_specs(config))
    return weights.replace(token_map=jax.ShapeDtypeStruct((config.vocab_size,), jnp.int32))
