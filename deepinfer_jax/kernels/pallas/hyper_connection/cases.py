"""Named cases of entering and leaving a hyper-connection site, and the released sizes.

Separate because tests and benchmarks read the same table.
Read next: `../../cases.py`, what all tables share.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ....arrays import Array
from ...cases import RELEASED, Arguments, Draws
from .ref import Mixes


@dataclass(frozen=True, slots=True)
class HyperCase:
    """One site; the defaults are tiny.

    Args:
        name: unique in the table.
        tags: what it is for.
        rows: R.
        streams: M.
        width: D.
        dtype: of the streams.
        scale: of the streams; 0 for all-zero ones.
        iterations: of the Sinkhorn normalisation.
    """

    name: str
    tags: frozenset[str] = frozenset()
    rows: int = 6
    streams: int = 4
    width: int = 32
    dtype: str = "float32"
    scale: float = 3.0
    iterations: int = 20

    def arguments(self, key: Array) -> Arguments:
        """Draw the operands of `enter_site`."""
        draws = Draws(key)
        mix, flat = self.streams * (self.streams + 2), self.streams * self.width
        positional = (
            draws.normal(self.rows, self.streams, self.width, dtype=self.dtype, scale=self.scale),
            draws.normal(self.rows, self.streams),
            draws.normal(self.width, dtype=self.dtype),
            draws.normal(mix, flat, scale=flat**-0.5),
            draws.normal(mix),
            jnp.asarray(np.array([0.7, 1.3, 2.1], np.float32)),
        )
        keywords = {"iterations": self.iterations, "hyper_eps": 1e-6, "norm_eps": 1e-20}
        return Arguments(positional, keywords)

    def leave_arguments(self, key: Array) -> Arguments:
        """Draw the operands of `leave_site`."""
        draws, shape = Draws(key), (self.rows, self.streams)
        mixes = Mixes(
            pre=draws.normal(*shape), post=draws.normal(*shape), comb=draws.normal(*shape, self.streams)
        )
        streams = draws.normal(*shape, self.width, dtype=self.dtype, scale=self.scale)
        return Arguments((streams, draws.normal(self.rows, self.width, dtype=self.dtype), mixes), {})


CASES = (
    HyperCase("four_streams"),
    HyperCase("two_streams", streams=2),
    HyperCase("one_pass", iterations=1),
    HyperCase("zero_streams", scale=0.0),
    HyperCase("bfloat16", dtype="bfloat16"),
    *(
        HyperCase(f"released_{rows}", frozenset({RELEASED}), rows=rows, width=5120, dtype="bfloat16")
        for rows in (1, 64, 256)
    ),
)
"""Names are unique."""
