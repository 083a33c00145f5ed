"""Held-out loss, by the training forward and by the model as shipped.

Separate because a checkpoint is judged by the inference path, long after its training:
`python -m deepinfer_jax.training.evaluate --help`.
Read next: `lm.py`, `../model/backbone.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Array
from ..assets import NANO_FOLDER
from ..checkpoint import load_weights
from ..config import CacheConfig, ModelConfig
from ..config_json import read_config
from ..model.backbone import backbone
from ..model.cache import empty_cache, with_own_pages
from ..model.numerics import NUMERICS, Numerics
from ..model.rows import chunk_rows
from ..model.weights import Weights
from ..text.tokenizer import Tokenizer
from .data import HeldOut, evaluation_batches, held_out
from .forward import Batch, TrainingMode, forward
from .losses import token_losses
from .packing import CODES_PER_UNIT, PackedRows


def take_batch(data: tuple[Array, Array, Array], indices: Array) -> Batch:
    """Gather packed rows by number into a batch.

    Args:
        data: uint16, uint8 and uint8 [rows, T]: tokens, segments, loss codes.
        indices: int32 [B].

    Returns:
        The batch.
    """
    tokens, segments, codes = (part[indices] for part in data)
    weights = codes.astype(jnp.float32) / CODES_PER_UNIT
    return Batch(tokens.astype(jnp.int32), segments.astype(jnp.int32), weights)


def device_rows(rows: PackedRows) -> tuple[Array, Array, Array]:
    """Put packed rows into device memory as they are: tokens, segments, loss codes."""
    return jnp.asarray(rows.tokens), jnp.asarray(rows.segments), jnp.asarray(rows.loss_codes)


def evaluate(
    weights: Weights, config: ModelConfig, mode: TrainingMode, texts: dict[str, HeldOut], batch_rows: int
) -> dict[str, float]:
    """Measure held-out nats per token by kind of text.

    Args:
        weights: the weights in the compute dtype, with a token map.
        config: the architecture.
        mode: static choices.
        texts: held-out rows by kind.
        batch_rows: rows at a time.

    Returns:
        Mean nats over all predicted tokens, each weighing the same, by kind.
    """
    total = _total_nats(config, mode)
    results = {}
    for kind, text in texts.items():
        sums = []
        for rows in evaluation_batches(text.rows, batch_rows):
            indices = jnp.arange(len(rows), dtype=jnp.int32)
            sums.append(total(weights, take_batch(device_rows(rows), indices)))
        results[kind] = float(sum(np.asarray(sums, np.float64)) / text.num_tokens)
    return results


@cache
def _total_nats(config: ModelConfig, mode: TrainingMode) -> Callable[[Weights, Batch], Array]:
    @jax.jit
    def total(weights: Weights, batch: Batch) -> Array:
        hidden = forward(weights, batch, config, mode).hidden
        nats, _ = token_losses(hidden, batch, weights)
        return jnp.sum(jnp.where(batch.loss_weights > 0, nats, 0.0))

    return total


def evaluate_inference(
    weights: Weights, config: ModelConfig, numerics: Numerics, text: HeldOut, batch_rows: int
) -> float:
    """Measure held-out nats per token through `backbone`, the function that generates.

    Only rows of one segment count: the cache of a slot holds one sequence.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        text: held-out rows.
        batch_rows: rows at a time.

    Returns:
        Mean nats a token.
    """

    @jax.jit
    def losses(weights: Weights, batch: Batch) -> Array:
        slots, length = batch.tokens.shape
        num_tokens = jnp.sum((batch.segments == 1).astype(jnp.int32), axis=1)
        rows = chunk_rows(batch.tokens, jnp.zeros(slots, jnp.int32), num_tokens)
        cache = with_own_pages(empty_cache(config, CacheConfig.for_slots(slots, length), numerics))
        hidden, _, _ = backbone(weights, config, rows, cache, numerics)
        nats, _ = token_losses(hidden.reshape(slots, length, -1), batch, weights)
        is_counted = (batch.segments == 1) & (batch.loss_weights > 0)
        return jnp.stack([jnp.sum(jnp.where(is_counted, nats, 0.0)), jnp.sum(is_counted.astype(jnp.float32))])

    is_single = np.flatnonzero(text.rows.segments.max(axis=1) == 1)
    totals = np.zeros(2)
    for rows in evaluation_batches(text.rows.take(is_single), batch_rows):
        batch = take_batch(device_rows(rows), jnp.arange(len(rows), dtype=jnp.int32))
        totals += np.asarray(losses(weights, batch), np.float64)
    return float(totals[0] / totals[1])


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line and print stories' nats a token through the inference path."""
    parser = argparse.ArgumentParser(description="Measure a checkpoint's held-out loss on stories.")
    parser.add_argument("--model", type=Path, default=NANO_FOLDER, help="checkpoint folder (default: nano)")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the corpus files")
    parser.add_argument("--numerics", choices=sorted(NUMERICS), default="official")
    parser.add_argument("--batch-rows", type=int, default=8)
    options = parser.parse_args(arguments)
    config, numerics = read_config(options.model), NUMERICS[options.numerics]
    weights = load_weights(options.model, config, numerics.compute_dtype)
    text = held_out(options.corpus, Tokenizer.from_folder(options.model))["stories"]
    nats = evaluate_inference(weights, config, numerics, text, options.batch_rows)
    print(json.dumps({"text": "stories", "numerics": numerics.name, "nats": nats}))


if __name__ == "__main__":
    main()
