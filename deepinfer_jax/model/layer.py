"""One layer: two sites, attention and mixture of experts, around the residual streams.

Separate because inference (through a cache) and training (whole sequences) attend differently but
share everything else of a layer.
Read next: `step_layer.py` (attention through the cache), `moe.py`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..arrays import Array
from ..config import ModelConfig
from ..kernels import Mixes, enter_site, leave_site
from ..sharding.exchange import WHOLE, Placement
from .moe import TokenRoles, moe
from .numerics import Numerics
from .taps import Tap, no_tap, under
from .weights import HyperWeights, LayerWeights


def read_site(
    streams: Array, pre_mix: Array, norm: Any, weights: HyperWeights, config: ModelConfig, numerics: Numerics
) -> tuple[Array, Mixes]:
    """Read a site: its own mixes, and the normed collapse of the streams by the previous site's `pre`.

    Args:
        streams: [R, M, D].
        pre_mix: float32 [R, M], the previous site's `pre`.
        norm: [D], weight of the norm.
        weights: the site's hyper-connection.
        config: the architecture.
        numerics: the static choice of arithmetic.

    Returns:
        [R, D] input of the sublayer, the site's mixes.

    Source: spec/model.md section 4.
    """
    return enter_site(
        *(streams, pre_mix, norm, weights.fn, weights.base, weights.scale),
        iterations=config.hc_sinkhorn_iters,
        hyper_eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        implementation=numerics.implementation,
    )


def attention_input(
    streams: Array,
    pre_mix: Array,
    weights: LayerWeights,
    config: ModelConfig,
    numerics: Numerics,
    tap: Tap = no_tap,
) -> tuple[Array, Mixes]:
    """Read the attention site.

    Args:
        streams: [R, M, D].
        pre_mix: float32 [R, M], the previous site's `pre`.
        weights: the layer's weights.
        config: the architecture.
        numerics: the static choice of arithmetic.
        tap: records intermediate values.

    Returns:
        [R, D] attention input, the site's mixes.

    Source: spec/model.md section 4.
    """
    tap("draft_input", jnp.mean(streams.astype(jnp.float32), axis=-2))
    x, site = read_site(streams, pre_mix, weights.attn_norm, weights.hc_attn, config, numerics)
    _tap_site(tap, "attn", pre_mix, site)
    tap("attn.in", x)
    return x, site


def finish_layer(
    streams: Array,
    update: Array,
    site: Mixes,
    weights: LayerWeights,
    layer: Array | int,
    roles: TokenRoles,
    config: ModelConfig,
    numerics: Numerics,
    tap: Tap = no_tap,
    placement: Placement = WHOLE,
) -> tuple[Array, Array]:
    """Write the attention's output to the streams and run the mixture-of-experts site.

    Args:
        streams: [R, M, D] as they entered the layer.
        update: [R, D], the attention's output.
        site: the attention site's mixes.
        weights: the layer's weights.
        layer: the layer's place in the stack of routed experts.
        roles: of the rows.
        config: the architecture.
        numerics: the static choice of arithmetic.
        tap: records intermediate values.
        placement: who holds which experts and channels.

    Returns:
        [R, M, D] streams after the layer, float32 [R, M] `pre` for the next site.

    Source: spec/model.md section 4.
    """
    implementation = numerics.implementation
    tap("attn.out", update)
    streams = leave_site(streams, update, site, implementation=implementation)
    tap("hc.ffn_stream_in", streams)
    x, ffn_site = read_site(streams, site.pre, weights.ffn_norm, weights.hc_ffn, config, numerics)
    _tap_site(tap, "ffn", site.pre, ffn_site)
    tap("ffn.in", x)
    update = moe(x, weights.ffn, layer, roles, config, numerics, under(tap, "ffn."), placement)
    tap("ffn.out", update)
    streams = leave_site(streams, update, ffn_site, implementation=implementation)
    tap("out", streams)
    return streams, ffn_site.pre


def _tap_site(tap: Tap, name: str, pre_mix: Array, site: Mixes) -> None:
    tap(f"hc.{name}_pre_mix_in", pre_mix)
    tap(f"hc.{name}_pre", site.pre)
    tap(f"hc.{name}_post", site.post)
    tap(f"hc.{name}_comb", site.comb)
