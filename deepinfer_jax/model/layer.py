"""One layer: two sites, attention and mixture of experts, around the residual streams.

Separate because inference (through a cache) and training (whole sequences) attend differently but
share everything else of a layer.
Read next: `step_layer.py` (attention through the cache), `moe.py`.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..arrays import Array
from ..config import ModelConfig
from . import hyper
from .moe import moe
from .norm import rms_norm
from .numerics import Numerics
from .taps import Tap, no_tap, under
from .weights import LayerWeights


def attention_input(
    streams: Array, pre_mix: Array, weights: LayerWeights, config: ModelConfig, tap: Tap = no_tap
) -> tuple[Array, hyper.Mixes]:
    """Read the attention site: its mixes, and the normed collapse by the previous site's `pre`.

    Args:
        streams: [R, M, D].
        pre_mix: float32 [R, M], the previous site's `pre`.
        weights: the layer's weights.
        config: the architecture.
        tap: records intermediate values.

    Returns:
        [R, D] attention input, the site's mixes.

    Source: spec/model.md section 4.
    """
    tap("draft_input", jnp.mean(streams.astype(jnp.float32), axis=-2))
    site = hyper.mixes(streams, weights.hc_attn, config)
    x = rms_norm(hyper.collapse(streams, pre_mix), weights.attn_norm, config.rms_norm_eps)
    _tap_site(tap, "attn", pre_mix, site)
    tap("attn.in", x)
    return x, site


def finish_layer(
    streams: Array,
    update: Array,
    site: hyper.Mixes,
    weights: LayerWeights,
    is_image: Array,
    config: ModelConfig,
    numerics: Numerics,
    tap: Tap = no_tap,
) -> tuple[Array, Array]:
    """Write the attention's output to the streams and run the mixture-of-experts site.

    Args:
        streams: [R, M, D] as they entered the layer.
        update: [R, D], the attention's output.
        site: the attention site's mixes.
        weights: the layer's weights.
        is_image: bool [R].
        config: the architecture.
        numerics: the static choice of arithmetic.
        tap: records intermediate values.

    Returns:
        [R, M, D] streams after the layer, float32 [R, M] `pre` for the next site.

    Source: spec/model.md section 4.
    """
    tap("attn.out", update)
    streams = hyper.expand(streams, update, site)
    tap("hc.ffn_stream_in", streams)
    ffn_site = hyper.mixes(streams, weights.hc_ffn, config)
    x = rms_norm(hyper.collapse(streams, site.pre), weights.ffn_norm, config.rms_norm_eps)
    _tap_site(tap, "ffn", site.pre, ffn_site)
    tap("ffn.in", x)
    update = moe(x, weights.ffn, is_image, config, numerics, under(tap, "ffn."))
    tap("ffn.out", update)
    streams = hyper.expand(streams, update, ffn_site)
    tap("out", streams)
    return streams, ffn_site.pre


def _tap_site(tap: Tap, name: str, pre_mix: Array, site: hyper.Mixes) -> None:
    tap(f"hc.{name}_pre_mix_in", pre_mix)
    tap(f"hc.{name}_pre", site.pre)
    tap(f"hc.{name}_post", site.post)
    tap(f"hc.{name}_comb", site.comb)
