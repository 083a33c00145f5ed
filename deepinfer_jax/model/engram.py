"""Engram: hashed n-gram memory added to the residual streams.

Separate because its arithmetic is integers first: exact 64-bit hashes from 32-bit halves, since XLA
without x64 has no int64.
Read next: `backbone.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from ..arithmetic import fenced, round_to
from ..arrays import NOTHING, Array
from ..config import ConfigError, ModelConfig
from ..kernels import engram_gather, inverse_rms
from ..sharding.exchange import WHOLE, Placement, bring_rows
from .linear import quantized_linear
from .numerics import Numerics
from .taps import Tap, no_tap
from .weights import EngramWeights

_SEED = 10007


class EngramConstants(struct.PyTreeNode):
    """Hash constants of all Engram layers, NumPy, derived from the configuration.

    Attributes:
        multipliers: int64 [Engram layers, ngram], by look-back.
        primes: int64 [Engram layers, C], bucket count of each column.
        offsets: int64 [Engram layers, C], first table row of each column.
    """

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray


@functools.cache
def engram_constants(config: ModelConfig) -> EngramConstants:
    """Derive multipliers, bucket primes and table offsets.

    bound = floor(floor((2^63 - 1) / V) / 2); mult = 2 integers(0, bound) + 1 from
    default_rng(10007 layer). Primes ascend from engram_vocab_size - 1 and are never reused: by layer,
    then n-gram size 2.., then head.

    Args:
        config: the architecture.

    Returns:
        The constants.

    Raises:
        ConfigError: table sizes that are not the sums of the derived primes.

    Source: spec/model.md section 10.
    """
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    sizes = config.engram_max_ngram_size
    multipliers = np.stack(
        [
            2 * np.random.default_rng(_SEED * layer).integers(0, bound, size=sizes, dtype=np.int64) + 1
            for layer in config.engram_layer_ids
        ]
    )
    columns = (sizes - 1) * config.engram_n_heads
    count = len(config.engram_layer_ids) * columns
    primes = primes_above(config.engram_vocab_size - 1, count).reshape(-1, columns)
    totals = tuple(int(total) for total in primes.sum(axis=1))
    if totals != config.engram_num_embeddings:
        raise ConfigError(
            f"config key 'engram_num_embeddings': got {config.engram_num_embeddings}, expected {totals}, "
            "the sums of the primes that engram_vocab_size, engram_n_heads and engram_max_ngram_size imply"
        )
    offsets = np.concatenate([np.zeros_like(primes[:, :1]), np.cumsum(primes, axis=1)[:, :-1]], axis=1)
    return EngramConstants(multipliers, primes, offsets)


def primes_above(start: int, count: int) -> np.ndarray:
    """Give the first `count` primes greater than `start`: int64 [count]."""
    primes: list[int] = []
    candidate = start + 1
    while len(primes) < count:
        divisors = np.arange(2, int(candidate**0.5) + 1)
        if candidate > 1 and np.all(candidate % divisors):
            primes.append(candidate)
        candidate += 1
    return np.array(primes, np.int64)


def hash_rows(history: Array, config: ModelConfig, pad_id: Array) -> Array:
    """Hash each token's n-grams to table rows, for all Engram layers.

    tok_k = history[:, k], or pad from the first k on where the sequence has not begun or an image
    token stands; H_n = XOR_{k < n} tok_k mult_k; row = H_n mod prime + offset.

    Args:
        history: int32 [R, ngram] compressed ids, newest first, NOTHING for an image token or before
            the start.
        config: the architecture.
        pad_id: int32 scalar, compressed id of the pad token.

    Returns:
        int32 [R, Engram layers, C] table rows.

    Source: spec/model.md section 10.
    """
    constants = engram_constants(config)
    is_dead = jnp.cumsum(history == NOTHING, axis=-1, dtype=jnp.int32) > 0
    tokens = jnp.where(is_dead, pad_id, history).astype(jnp.uint32)
    high, low = _multiply_64(tokens[:, None, :], constants.multipliers[None])  # [R, Engram layers, ngram]
    mixed_high, mixed_low = [high[:, :, 0]], [low[:, :, 0]]
    for size in range(1, config.engram_max_ngram_size):
        mixed_high.append(mixed_high[-1] ^ high[:, :, size])
        mixed_low.append(mixed_low[-1] ^ low[:, :, size])
    # Columns stand by n-gram size, then by head; a single token has none.
    heads = config.engram_n_heads
    high, low = (jnp.repeat(jnp.stack(part[1:], axis=-1), heads, axis=-1) for part in (mixed_high, mixed_low))
    remainder = _remainder(high, low, constants.primes[None])
    return (remainder + constants.offsets[None].astype(np.uint32)).astype(jnp.int32)


def _multiply_64(tokens: Array, multipliers: np.ndarray) -> tuple[Array, Array]:
    """Multiply uint32 by constants below 2^63: (high, low) words of the 64-bit products.

    Limbs of 16 bits keep every partial product and sum inside 32 bits.
    """
    token_limbs = (tokens & 0xFFFF, tokens >> 16)
    limbs = [(multipliers >> shift & 0xFFFF).astype(np.uint32) for shift in (0, 16, 32, 48)]
    columns, carry = [], jnp.zeros((), jnp.uint32)
    for place in range(4):
        high, total = jnp.zeros((), jnp.uint32), carry
        for i, token_limb in enumerate(token_limbs):
            if 0 <= place - i < 4:
                product = token_limb * limbs[place - i]
                total = total + (product & 0xFFFF)
                high = high + (product >> 16)
        columns.append(total & 0xFFFF)
        carry = high + (total >> 16)
    return columns[3] << 16 | columns[2], columns[1] << 16 | columns[0]


def _remainder(high: Array, low: Array, primes: np.ndarray) -> Array:
    """Reduce 64-bit values modulo primes below 2^24, eight bits at a time, the highest first.

    A loop, not unrolled: eight unrolled divisions by every prime took 1.5 s to compile.
    """
    modulus = jnp.asarray(primes.astype(np.uint32))

    def fold(step: Array, remainder: Array) -> Array:
        word = jnp.where(step < 4, high, low)
        shift = (24 - 8 * (step % 4)).astype(jnp.uint32)
        return (remainder * 256 + (word >> shift & 0xFF)) % modulus

    return lax.fori_loop(0, 8, fold, jnp.zeros(high.shape, jnp.uint32))


def engram(
    streams: Array,
    table_rows: Array,
    weights: EngramWeights,
    is_image: Array,
    config: ModelConfig,
    numerics: Numerics,
    tap: Tap = no_tap,
    placement: Placement = WHOLE,
) -> Array:
    """Add the gated n-gram value to every stream.

    kv = wkv concat(rows); key = first M D values, one per stream, value = last D, shared;
    dot = <h q_weight, k_weight key> rms(h)^-1 rms(key)^-1 D^-1/2;
    gate = sigmoid(sign(dot) sqrt(max(|dot|, 1e-6))); h <- h + gate value. Image tokens: gate = 0.

    Args:
        streams: [R, M, D].
        table_rows: int32 [R, C].
        weights: the layer's table and projections.
        is_image: bool [R].
        config: the architecture.
        numerics: the static choice of arithmetic.
        tap: records intermediate values.
        placement: who holds which rows of the table.

    Returns:
        [R, M, D] in the streams' dtype.

    Source: spec/model.md section 10.
    """
    count, width = config.hc_mult, config.hidden_size
    implementation = numerics.implementation
    # 4 C bytes a row to every holder, C table rows back.
    table, held_rows = bring_rows(weights.embed, table_rows, "engram_rows", placement)
    entries = fenced(engram_gather(table, held_rows, streams.dtype, implementation=implementation))
    kv = quantized_linear(entries, weights.wkv, numerics)
    keys = kv[:, : count * width].reshape(-1, count, width).astype(jnp.float32)
    value = kv[:, count * width :].astype(jnp.float32)
    hidden = streams.astype(jnp.float32)
    scale = (weights.q_weight.astype(jnp.float32) * weights.k_weight.astype(jnp.float32))[None]
    dot = jnp.sum(hidden * scale * keys, axis=-1, keepdims=True)
    dot = dot * inverse_rms(hidden, config.rms_norm_eps) * inverse_rms(keys, config.rms_norm_eps)
    dot = dot * jnp.float32(width**-0.5)
    gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6)), dot))
    gate = jnp.where(is_image[:, None, None], 0.0, gate)
    output = round_to(hidden + gate * value[:, None, :], streams.dtype)
    for name, tapped in (("hash_ids", table_rows), ("kv", kv), ("dot", dot[..., 0]), ("gate", gate[..., 0])):
        tap(name, tapped)
    tap("out", output)
    return output
