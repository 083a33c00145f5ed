"""Golden arrays, and sequences fed to the backbone in any chunks at one compiled shape.

Separate because every test of the model starts from rows: here they are built, run and unpacked.
Read next: `presets.py` (small models), `tolerances.py` (how results are compared).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..arrays import Array
from ..config import PAGE_TOKENS, CacheConfig, ModelConfig
from ..model.backbone import NO_TAPS, Taps, backbone, head_logits
from ..model.cache import Cache, empty_cache, with_own_pages
from ..model.numerics import Numerics
from ..model.rows import Rows
from ..model.weights import Weights
from .battery import unpacked


def read_golden(folder: str | Path, name: str) -> dict[str, np.ndarray]:
    """Read all arrays of a golden file.

    Args:
        folder: where the golden files lie.
        name: file name without `.npz`.

    Returns:
        The arrays by name.

    Raises:
        FileNotFoundError: no such file.
    """
    with np.load(Path(folder) / f"{name}.npz", allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def make_rows(
    token_ids: ArrayLike,
    start: ArrayLike = 0,
    is_image: ArrayLike | None = None,
    rows_per_block: int = 1,
    lengths: ArrayLike | None = None,
    slots: ArrayLike | None = None,
) -> Rows:
    """Flatten one chunk per slot, each padded to the same number of rows.

    Args:
        token_ids: int [B, T].
        start: int [B] or scalar, position of each chunk's first token.
        is_image: bool [B, T], none by default.
        rows_per_block: adjacent rows sure to share a slot, a divisor of T.
        lengths: int [B], valid tokens of each chunk, T by default.
        slots: int [B], cache slot of each chunk, 0..B-1 by default.

    Returns:
        Rows of B * T tokens in the order of `token_ids`.

    Raises:
        ValueError: a chunk length that the blocks do not divide.
    """
    tokens = np.asarray(token_ids, np.int32)
    count, length = tokens.shape
    if length % rows_per_block:
        raise ValueError(
            f"rows: got chunks of {length}, expected a multiple of rows_per_block={rows_per_block}"
        )
    offsets = np.arange(length, dtype=np.int32)[None, :]
    positions = np.broadcast_to(np.asarray(start, np.int32).reshape(-1, 1) + offsets, tokens.shape)
    valid = np.broadcast_to(
        offsets < np.asarray(length if lengths is None else lengths).reshape(-1, 1), tokens.shape
    )
    image = np.zeros(tokens.shape, bool) if is_image is None else np.asarray(is_image, bool)
    owners = np.arange(count, dtype=np.int32) if slots is None else np.asarray(slots, np.int32)
    return Rows(
        token_ids=jnp.asarray(tokens.reshape(-1)),
        slots=jnp.asarray(np.repeat(owners, length)),
        positions=jnp.asarray(positions.reshape(-1)),
        is_image=jnp.asarray(image.reshape(-1)),
        is_valid=jnp.asarray(valid.reshape(-1)),
        rows_per_block=rows_per_block,
    )


@functools.partial(jax.jit, static_argnames=("config", "numerics", "taps"))
def model_step(
    weights: Weights, config: ModelConfig, rows: Rows, cache: Cache, numerics: Numerics, taps: Taps = NO_TAPS
) -> tuple[Array, dict[str, Array], Cache]:
    """Run the backbone and the head, compiled once for each shape and static choice.

    Args:
        weights: the loaded weights.
        config: the architecture (static).
        rows: the step's rows.
        cache: state before the step.
        numerics: the choice of arithmetic (static).
        taps: names of intermediate values (static).

    Returns:
        Logits [R, V], the tapped values, the cache after the step.
    """
    hidden, values, cache = backbone(weights, config, rows, cache, numerics, taps)
    return head_logits(hidden, weights, numerics), values, cache


def fresh_cache(
    config: ModelConfig,
    slots: int,
    capacity: int,
    numerics: Numerics,
    *,
    slack: int = 0,
    page_tokens: int = PAGE_TOKENS,
) -> Cache:
    """Make an empty cache whose slots own all the pages they can have.

    Args:
        config: the architecture.
        slots: number of sequences B.
        capacity: tokens of each.
        numerics: gives the formats of stored rows.
        slack: positions by which a sequence can be shortened.
        page_tokens: tokens of a page.

    Returns:
        The cache.
    """
    sizes = CacheConfig.for_slots(slots, capacity, slack, page_tokens)
    return with_own_pages(empty_cache(config, sizes, numerics))


class ChunkRunner:
    """Sequences in slots, fed chunk by chunk through one compiled shape.

    Args:
        weights: the loaded weights.
        config: the architecture.
        numerics: the choice of arithmetic.
        slots: number of sequences B.
        capacity: tokens per sequence that the cache holds.
        chunk: rows of each slot in a step; shorter chunks are padded.
        rows_per_block: a divisor of `chunk`.
        taps: names of intermediate values to collect.
        pad_token: token id of padding rows.
        slack: positions by which a sequence can be shortened.
        page_tokens: tokens of a page.
    """

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        numerics: Numerics,
        *,
        slots: int,
        capacity: int,
        chunk: int,
        rows_per_block: int = 1,
        taps: Taps = NO_TAPS,
        pad_token: int = 0,
        slack: int = 0,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.weights, self.config, self.numerics, self.taps = weights, config, numerics, taps
        self.chunk, self.rows_per_block, self.pad_token = chunk, rows_per_block, pad_token
        self.cache = fresh_cache(config, slots, capacity, numerics, slack=slack, page_tokens=page_tokens)
        self.lengths = np.zeros(slots, np.int32)
        self.tapped: list[dict[str, np.ndarray]] = [{} for _ in range(slots)]

    def feed(
        self,
        chunks: Sequence[ArrayLike],
        is_image: Sequence[ArrayLike] | None = None,
        order: ArrayLike | None = None,
    ) -> list[np.ndarray]:
        """Append one chunk, which may be empty, to each sequence.

        `self.tapped` holds the step's tapped values of each slot afterwards.

        Args:
            chunks: token ids of each slot's chunk, at most `chunk` of them.
            is_image: bool for each of them, none by default.
            order: order in which the slots' rows stand in the step, 0..B-1 by default.

        Returns:
            Logits [tokens of the chunk, V] of each slot.
        """
        slots = len(self.lengths)
        order = np.arange(slots) if order is None else np.asarray(order)
        tokens = np.full((slots, self.chunk), self.pad_token, np.int32)
        image = np.zeros((slots, self.chunk), bool)
        counts = np.array([len(np.asarray(chunk)) for chunk in chunks], np.int32)
        for slot, chunk in enumerate(chunks):
            tokens[slot, : counts[slot]] = chunk
            if is_image is not None:
                image[slot, : counts[slot]] = is_image[slot]
        rows = make_rows(
            tokens[order],
            start=self.lengths[order],
            is_image=image[order],
            rows_per_block=self.rows_per_block,
            lengths=counts[order],
            slots=order,
        )
        logits, tapped, self.cache = model_step(
            self.weights, self.config, rows, self.cache, self.numerics, self.taps
        )
        self.lengths = self.lengths + counts
        place = np.argsort(order)

        def split(values: Array) -> list[np.ndarray]:
            by_slot = np.asarray(values).reshape(slots, self.chunk, *values.shape[1:])[place]
            return [by_slot[slot, : counts[slot]] for slot in range(slots)]

        parts = {name: split(values) for name, values in tapped.items()}
        self.tapped = [{name: part[slot] for name, part in parts.items()} for slot in range(slots)]
        return split(logits)

    def feed_all(self, sequences: Sequence[ArrayLike], sizes: Sequence[int]) -> list[np.ndarray]:
        """Append whole sequences in chunks whose sizes repeat in a cycle.

        Args:
            sequences: token ids of each slot.
            sizes: chunk sizes, used in turn by every slot.

        Returns:
            Logits [tokens, V] of each slot.
        """
        sequences = [np.asarray(sequence) for sequence in sequences]
        found: list[list[np.ndarray]] = [[] for _ in sequences]
        done, step = 0, 0
        while done < max(len(sequence) for sequence in sequences):
            size = sizes[step % len(sizes)]
            for slot, part in enumerate(self.feed([sequence[done : done + size] for sequence in sequences])):
                found[slot].append(part)
            done, step = done + size, step + 1
        return [np.concatenate(parts) for parts in found]

    def live_state(self, slot: int) -> dict[str, NDArray]:
        """Read what the cache must hold for a sequence: every entry that a later token may read.

        Args:
            slot: the sequence.

        Returns:
            Arrays by part of the cache, in order of position.
        """
        return live_state(self.cache, self.config, self.numerics, slot, int(self.lengths[slot]))


def live_state(
    cache: Cache, config: ModelConfig, numerics: Numerics, slot: int, length: int
) -> dict[str, NDArray]:
    """Read the entries of a slot that a later token may read, unpacked to float32.

    Args:
        cache: the cache.
        config: the architecture.
        numerics: gives the formats of stored rows.
        slot: the sequence.
        length: its tokens so far.

    Returns:
        Arrays by part of the cache, in order of position.
    """
    formats = numerics.row_formats
    latest = _latest(length, config.sliding_window)
    window = np.asarray(cache.window)[:, slot, latest % cache.window.shape[2]]
    state: dict[str, NDArray] = {"window": unpacked(window, formats.window)}
    table = np.asarray(cache.page_table)[slot]
    for ratio, pages in cache.compressed.items():
        groups = np.arange(length // ratio)
        entries = pages.kv.shape[2]
        at = (slice(None), table[groups // entries], groups % entries)
        state[f"compressed_{ratio}"] = unpacked(np.asarray(pages.kv)[at], formats.entry)
        state[f"index_keys_{ratio}"] = unpacked(np.asarray(pages.index_keys)[at], formats.index_key)
    pending = np.arange(length - length % 2, length) % cache.pending_kv.shape[2]
    state["pending_kv"] = np.asarray(cache.pending_kv)[:, slot, pending]
    state["pending_score"] = np.asarray(cache.pending_score)[:, slot, pending]
    ids = np.asarray(cache.engram_ids)[slot]
    state["engram_ids"] = ids[_latest(length, config.engram_max_ngram_size - 1) % len(ids)]
    return state


def _latest(length: int, count: int) -> NDArray:
    return np.arange(max(0, length - count), length)
