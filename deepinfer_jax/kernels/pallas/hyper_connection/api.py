"""Hyper-connections as the model calls them: entering and leaving a site.

Separate from the implementations so that operands are checked once, whatever runs.
Read next: `ref.py`, the meaning; `cases.py`, what is tested and measured.
"""

from __future__ import annotations

from ....arrays import Array
from ...checks import FLOATS, Operand, check_operands
from ...dispatch import choose
from . import ref
from .ref import Mixes

OP = "hyper_connection"

ENTER_IMPLEMENTATIONS = {"reference": ref.enter_site}
"""The best first."""

LEAVE_IMPLEMENTATIONS = {"reference": ref.leave_site}
"""The best first."""


def enter_site(
    streams: Array,
    pre_mix: Array,
    norm_weight: Array,
    fn: Array,
    base: Array,
    scale: Array,
    *,
    iterations: int,
    hyper_eps: float,
    norm_eps: float,
    implementation: str | None = None,
) -> tuple[Array, Mixes]:
    """Read a site: the normed collapse of the streams, and the site's own mixes.

    x = RMSNorm(sum_k pre_mix_k h_k). z = (fn u) rsqrt(mean(u^2) + eps) with u the flattened streams;
    pre = sigmoid(z s0 + b) + eps; post = 2 sigmoid(z s1 + b); comb = Sinkhorn(z s2 + b).

    Args:
        streams: float32 or bfloat16 [R, M, D].
        pre_mix: float32 [R, M], the previous site's `pre`.
        norm_weight: [D], of the sublayer's norm.
        fn: float32 [M (M + 2), M D].
        base: float32 [M (M + 2)].
        scale: float32 [3].
        iterations: of the Sinkhorn normalisation (static).
        hyper_eps: added to `pre` and in the normalisation (static).
        norm_eps: added to the mean squares (static).
        implementation: a name, or None for the best.

    Returns:
        [R, D] input of the sublayer in the streams' dtype, and the mixes for `leave_site` and for the
        next site.

    Raises:
        ValueError: operands that do not fit.
        ImplementationError: an implementation that cannot run.

    Source: spec/model.md section 4.
    """
    function = choose(OP, implementation, ENTER_IMPLEMENTATIONS)
    operands = {
        "streams": Operand(streams, "R M D", FLOATS),
        "pre_mix": Operand(pre_mix, "R M", ("float32",)),
        "norm_weight": Operand(norm_weight, "D"),
        "fn": Operand(fn, "mix flat", ("float32",)),
        "base": Operand(base, "mix", ("float32",)),
        "scale": Operand(scale, "three", ("float32",)),
    }
    sizes = {"three": 3}
    if streams.ndim == 3:
        count, width = streams.shape[1:]
        sizes |= {"mix": count * (count + 2), "flat": count * width}
    check_operands(OP, operands, sizes)
    return function(
        *(streams, pre_mix, norm_weight, fn, base, scale),
        iterations=iterations,
        hyper_eps=hyper_eps,
        norm_eps=norm_eps,
    )


def leave_site(streams: Array, update: Array, mixes: Mixes, *, implementation: str | None = None) -> Array:
    """Write a sublayer's output back: h_k <- post_k y + sum_j comb[j, k] h_j, rounded once.

    Args:
        streams: float32 or bfloat16 [R, M, D], as they entered the site.
        update: [R, D], the sublayer's output y.
        mixes: the site's mixes.
        implementation: a name, or None for the best.

    Returns:
        [R, M, D] in the streams' dtype.

    Raises:
        ValueError: operands that do not fit.
        ImplementationError: an implementation that cannot run.

    Source: spec/model.md section 4.
    """
    function = choose(OP, implementation, LEAVE_IMPLEMENTATIONS)
    sizes = {"to": streams.shape[1]} if streams.ndim == 3 else {}
    operands = {
        "streams": Operand(streams, "R M D", FLOATS),
        "update": Operand(update, "R D", FLOATS),
        "mixes.post": Operand(mixes.post, "R M", ("float32",)),
        "mixes.comb": Operand(mixes.comb, "R M to", ("float32",)),
    }
    check_operands(OP, operands, sizes)
    return function(streams, update, mixes)
