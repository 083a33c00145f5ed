"""The choice of arithmetic: what is rounded and quantised where, and what a row may depend on.

Separate because it is the one static switch that every part of the model reads.
Read next: `linear.py`, `../arithmetic.py` and `../kernels/row_format.py`, which act on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..kernels import CACHE_FORMATS, CacheFormat


@dataclass(frozen=True, slots=True)
class Numerics:
    """Static choice of compute dtype, of the model's own quantisers and of row invariance.

    Args:
        name: word for messages and reports.
        compute_dtype: dtype of hidden states and of weights that do not keep float32.
        quantizes_activations: whether inputs of FP8 and FP4 matmuls are quantised to e4m3 per 32
            channels (only where the checkpoint stores those weights quantised).
        cache_format: how window rows, compressed entries and index keys are rounded and stored, a key
            of `CACHE_FORMATS`: "fp4" as released, "fp8", "bf16" or "float32".
        batch_invariant: whether rows run in fixed tiles, so that a row's result is bitwise the same
            whatever else is in the step; without it a step runs as one product of its own size.
        implementation: name of the implementation that every kernel uses, None for the best there is.

    Raises:
        ValueError: an unknown cache format.

    Source: spec/model.md section 2, spec/platform.md section 6 (batch invariance).
    """

    name: str
    compute_dtype: Any
    quantizes_activations: bool
    cache_format: str
    batch_invariant: bool = True
    implementation: str | None = None

    def __post_init__(self) -> None:
        if self.cache_format not in CACHE_FORMATS:
            raise ValueError(
                f"cache_format: got {self.cache_format!r}, expected one of {sorted(CACHE_FORMATS)}; "
                "choose one of them"
            )

    @property
    def row_formats(self) -> CacheFormat:
        """Formats of window rows, compressed entries and index keys."""
        return CACHE_FORMATS[self.cache_format]


OFFICIAL = Numerics("official", jnp.bfloat16, quantizes_activations=True, cache_format="fp4")
"""What the released model was trained for and runs with: the default everywhere."""

FLOAT32 = Numerics("float32", jnp.float32, quantizes_activations=False, cache_format="float32")
"""The bare maths, no rounding but float32's: the reference for tests and gradients."""

NUMERICS = {numerics.name: numerics for numerics in (OFFICIAL, FLOAT32)}
"""The named choices of the command line."""
