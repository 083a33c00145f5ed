"""Rounding and contraction as this package means them, whatever XLA would make of them.

Separate because kernels, model, sampling and training must round at the same places.
Read next: `kernels/__init__.py` and `model/linear.py`, which build on these.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .arrays import Array


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


def contract(subscripts: str, *operands: Array) -> Array:
    """Einsum with float32 accumulation and float32 result, at full precision on every device."""
    return jnp.einsum(
        subscripts, *operands, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
