"""The choice of arithmetic: what is rounded and quantised where, and what a row may depend on.

Separate because it is the one static switch that every part of the model reads.
Read next: `linear.py`, `../arithmetic.py` and `../kernels/row_format.py`, which act on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..kernels import CACHE_FORMATS, CacheFormat

ROW_TILE = 64
"""Rows of one pass through the layers when results must not depend on the batch.

XLA picks its algorithms by shape, so a matrix product's last bits differ between, say, 1 and 256 rows;
at one shape a row's sum is the same wherever the row stands (spec/platform.md section 8).
"""

SAMPLING_TILE = 8
"""Rows that are sampled together where results must not depend on the number of rows."""

SLOT_SHARE = 4
"""A tile has this many rows for each slot that is drafted at the same time; a slot's block has more."""


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
        row_tile: rows of such a tile.
        sampling_tile: rows of a tile while tokens are sampled.
        implementation: name of the implementation that every kernel uses, None for the best there is.

    Raises:
        ValueError: an unknown cache format, or a tile without rows.

    Source: spec/model.md section 2, spec/platform.md section 6 (batch invariance).
    """

    name: str
    compute_dtype: Any
    quantizes_activations: bool
    cache_format: str
    batch_invariant: bool = True
    row_tile: int = ROW_TILE
    sampling_tile: int = SAMPLING_TILE
    implementation: str | None = None

    def __post_init__(self) -> None:
        if self.cache_format not in CACHE_FORMATS:
            raise ValueError(
                f"cache_format: got {self.cache_format!r}, expected one of {sorted(CACHE_FORMATS)}; "
                "choose one of them"
            )
        if min(self.row_tile, self.sampling_tile) < 1:
            raise ValueError(
                f"tiles: got {self.row_tile} rows and {self.sampling_tile} while sampling, expected 1 or "
                f"more; {ROW_TILE} and {SAMPLING_TILE} are the default"
            )

    @property
    def row_formats(self) -> CacheFormat:
        """Formats of window rows, compressed entries and index keys."""
        return CACHE_FORMATS[self.cache_format]

    @property
    def sampled_together(self) -> int | None:
        """Rows that are sampled together, None for all of a step."""
        return self.sampling_tile if self.batch_invariant else None

    @property
    def slot_tile(self) -> int:
        """Slots drafted together, where nothing may depend on their number or idle ones are skipped."""
        return max(1, self.row_tile // SLOT_SHARE)


OFFICIAL = Numerics("official", jnp.bfloat16, quantizes_activations=True, cache_format="fp4")
"""What the released model was trained for and runs with: the default everywhere."""

FLOAT32 = Numerics("float32", jnp.float32, quantizes_activations=False, cache_format="float32")
"""The bare maths, no rounding but float32's: the reference for tests and gradients."""

NUMERICS = {numerics.name: numerics for numerics in (OFFICIAL, FLOAT32)}
"""The named choices of the command line."""
