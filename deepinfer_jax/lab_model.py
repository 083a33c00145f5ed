"""A model as the planner sees it: its arrays by name and size, its layers by role. Nothing is computed.

Separate because it is the one place that knows both the model and the planner's vocabulary.
Read next: `lab.py`, which asks; `sharding/step_sizes.py`, the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from .arrays import QuantArray, spec_leaves
from .config import PAGE_TOKENS, CacheConfig, ModelConfig
from .kernels.pallas.index_top_k.ref import PAGES_AT_ONCE
from .model.abstract_weights import abstract_weights
from .model.numerics import Numerics
from .model.schedule import layer_kind
from .model.weights import weight_specs
from .plans import ROWS_PER_BLOCK
from .sharding.memory import TABLE_PAGES, StoredArray
from .sharding.place import is_words
from .sharding.step_sizes import LayerRole, ModelSizes
from .step import initial_state, state_words


@functools.lru_cache(maxsize=8)
def model_sizes(config: ModelConfig, numerics: Numerics, num_experts_redundant: int = 0) -> ModelSizes:
    """Describe a model to the planner.

    Args:
        config: the architecture.
        numerics: the choice of arithmetic.
        num_experts_redundant: places for further copies of routed experts.

    Returns:
        Its arrays, its layers, and the sizes of what it computes with.
    """
    formats, is_tiled = numerics.row_formats, numerics.batch_invariant

    def row_bytes(row_format: Any, channels: int) -> int:
        return row_format.width(channels) * row_format.dtype(0).itemsize

    return ModelSizes(
        config=config,
        layers=tuple(_role(config, layer) for layer in range(config.num_hidden_layers)),
        weights=tuple(_weight_arrays(config, numerics, num_experts_redundant)),
        state=tuple(_state_arrays(config, numerics)),
        compute_bytes=numerics.compute_dtype(0).itemsize,
        window_bytes=row_bytes(formats.window, config.head_dim),
        entry_bytes=row_bytes(formats.entry, config.head_dim),
        key_bytes=row_bytes(formats.index_key, config.index_head_dim),
        row_tile=numerics.row_tile if is_tiled else None,
        block_rows=ROWS_PER_BLOCK,
        pages_at_once=PAGES_AT_ONCE,
        sampling_tile=numerics.sampled_together,
    )


def _role(config: ModelConfig, layer: int) -> LayerRole:
    kind = layer_kind(config, layer)
    return LayerRole(kind.name, kind.ratio, kind.is_kv_source, kind.is_index_source)


def _weight_arrays(config: ModelConfig, numerics: Numerics, redundant: int) -> Iterator[StoredArray]:
    """List the arrays that the weights are made of, payload and scales of a quantised one separately."""
    abstract = abstract_weights(config, numerics)
    leaves = jax.tree.leaves(
        abstract.replace(token_map=None), is_leaf=lambda leaf: isinstance(leaf, QuantArray)
    )
    for (name, spec), leaf in zip(spec_leaves(weight_specs(config)), leaves, strict=True):
        parts = {"": leaf}
        if isinstance(leaf, QuantArray):
            parts = {".payload": leaf.payload, ".scales": leaf.scales}
        for part, array in parts.items():
            found = _stored(name + part, "weights", weight_kind(name), spec.stacked_axes, array)
            if spec.experts:
                found = found.resized({"experts": spec.experts + redundant})
            yield found
        if redundant and name.endswith("ffn.gate"):
            # How many copies an expert has depends on counts; two places are taken for each.
            shape = (len(spec.layers), config.n_routed_experts, 3)
            yield StoredArray(f"{name}.table", "weights", "expert tables", ("layers",), shape, 4)
    yield _stored("token_map", "weights", "token map", (), abstract.token_map)


def weight_kind(name: str) -> str:
    """Name the line of the table of memory that a weight belongs to, from its place in the tree."""
    return next(kind for part, kind in _KINDS.items() if part in f".{name}.")


_KINDS = {
    ".ffn.experts.": "routed experts",
    ".ffn.shared_experts.": "shared experts",
    ".ffn.": "routers",
    ".attn.compressor.": "compressors",
    ".attn.indexer.": "indexers",
    ".attn.": "attention",
    ".hc_": "hyper-connections",
    "norm.": "norms",
    ".wkv.": "Engram projections",
    "_weight.": "Engram projections",
    ".engram.": "Engram tables",
    ".embed.": "embedding",
    ".head.": "output head",
}
"""Part of a weight's place in the tree -> kind; the first that is found counts."""

_STATE_KINDS = {
    "window": "window rings",
    "kv": "compressed KV",
    "index_keys": "index keys",
    "page_table": "page tables",
    "pending_kv": "pending halves",
    "pending_score": "pending halves",
    "counts": "token counts",
    "in_prompt": "token counts",
}
"""Field of the state -> kind; all others are the small state of slots."""


def _state_arrays(config: ModelConfig, numerics: Numerics) -> Iterator[StoredArray]:
    """List the arrays of the state of one slot with one page."""
    make: Any = functools.partial(
        initial_state, config=config, sizes=CacheConfig.for_slots(1, PAGE_TOKENS), numerics=numerics
    )
    state = jax.eval_shape(make, jax.ShapeDtypeStruct((config.vocab_size,), bool))

    # Words stand for all arrays below a field of the state.
    fields, _ = jax.tree_util.tree_flatten_with_path(state_words(), is_leaf=is_words)
    parts = jax.tree.map(lambda _, part: _Part(part), state_words(), state, is_leaf=is_words)
    parts = jax.tree.leaves(parts, is_leaf=lambda node: isinstance(node, _Part))
    for (field, words), part in zip(fields, parts, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(part.tree)[0]:
            name = jax.tree_util.keystr((*field, *path), simple=True, separator=".")
            last = name.rsplit(".", 1)[-1]
            named = (*words, TABLE_PAGES) if last == "page_table" else words
            yield _stored(name, "cache", _STATE_KINDS.get(last, "slots"), named, leaf)


class _Part(NamedTuple):
    """What lies below a field of the state, kept together."""

    tree: Any


def _stored(name: str, group: str, kind: str, words: tuple[str, ...], array: Any) -> StoredArray:
    return StoredArray(name, group, kind, words, tuple(array.shape), array.dtype.itemsize)
