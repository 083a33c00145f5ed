"""The choice of arithmetic: what is rounded and quantised where.

Separate because it is the one static switch that every part of the model reads.
Read next: `linear.py` and `../kernels/quantize.py`, which act on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..arrays import Array


@dataclass(frozen=True, slots=True)
class Numerics:
    """Static choice of compute dtype and of the model's own quantisers.

    Args:
        name: word for messages and reports.
        compute_dtype: dtype of hidden states and of weights that do not keep float32.
        quantizes_activations: whether inputs of FP8 and FP4 matmuls are quantised to e4m3 per 32
            channels (only where the checkpoint stores those weights quantised).
        quantizes_cache: whether window KV (FP8), compressed KV and index keys (FP4) are quantised.

    Source: spec/model.md section 2.
    """

    name: str
    compute_dtype: Any
    quantizes_activations: bool
    quantizes_cache: bool


OFFICIAL = Numerics("official", jnp.bfloat16, quantizes_activations=True, quantizes_cache=True)
"""What the released model was trained for and runs with: the default everywhere."""

FLOAT32 = Numerics("float32", jnp.float32, quantizes_activations=False, quantizes_cache=False)
"""The bare maths, no rounding but float32's: the reference for tests and gradients."""

NUMERICS = {numerics.name: numerics for numerics in (OFFICIAL, FLOAT32)}
"""The named choices of the command line."""


def round_to(values: Array, dtype: Any) -> Array:
    """Cast to `dtype` so that the rounding really happens.

    XLA may drop a float32 -> bfloat16 -> float32 round trip inside one fusion, which would make the
    result depend on what was fused; `reduce_precision` is never dropped.

    Args:
        values: any floating array.
        dtype: target dtype.

    Returns:
        `values` rounded to nearest even and cast.

    Source: spec/model.md section 2, "XLA traps".
    """
    if values.dtype == dtype:
        return values
    if values.dtype == jnp.float32 and dtype == jnp.bfloat16:
        values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    return values.astype(dtype)
