"""Writes weights as a checkpoint folder in the official layout.

Separate because reading must not depend on the safetensors library, which writes all our types.
Read next: `reader.py`, which reads the result back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ..arrays import ArraySpec, QuantArray, Storage, spec_leaves
from ..config import ModelConfig
from ..config_json import parse_config
from ..model.draft_weights import DraftWeights, draft_weight_specs
from ..model.weights import Weights, weight_specs
from .errors import CheckpointError, shorten
from .formats import check_quantized, dequantize, quantize, scale_bytes
from .names import scale_name, tensor_table
from .reader import INDEX_FILE
from .token_map import TOKEN_MAP_FILE


def write_checkpoint(
    folder: str | Path,
    config_document: dict[str, Any],
    weights: Weights,
    config: ModelConfig,
    max_shard_bytes: int = 14 * 2**20,
) -> None:
    """Write weights, index and `config.json`, and the token map if the weights carry one.

    Quantised storage is used if `config.is_quantized`, else BF16 and F32 under the same names. Bytes of
    a `QuantArray` are written as they are; of plain arrays, what is on the grid of its storage reads
    back exactly and anything else is rounded to it.

    Args:
        folder: created if needed; must hold no safetensors files yet.
        config_document: the JSON object that `config` was parsed from, written as it is.
        weights: the backbone, stacked as declared, and the draft stages if the configuration has any.
        config: the architecture.
        max_shard_bytes: data bytes of a file, unless a single tensor has more.

    Raises:
        CheckpointError: weights or document that do not fit `config`, values that cannot be stored, or
            a folder that already holds weights.
    """
    folder = Path(folder)
    _check_arguments(folder, config_document, config, weights.draft)
    pairs = _pair_arrays(weight_specs(config), replace(weights, token_map=None, draft=None))
    pairs += _pair_arrays(draft_weight_specs(config), weights.draft)
    shards = _plan_shards(config, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    stored = _stored_tensors(pairs, config.is_quantized)
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(next(stored) for _ in names)
        places.update(dict.fromkeys(names, file_name))
        total += sum(array.nbytes for array in tensors.values())
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if weights.token_map is not None:
        np.save(folder / TOKEN_MAP_FILE, np.asarray(weights.token_map, np.int32))
    _write_json(folder / "config.json", config_document)
    # Last, so that a folder with an index is complete.
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})


def _check_arguments(
    folder: Path, document: dict[str, Any], config: ModelConfig, draft: DraftWeights | None
) -> None:
    if parse_config(document) != config:
        raise CheckpointError(
            "config_document describes another model than config, expected the document that config was "
            "parsed from; pass config = parse_config(config_document)"
        )
    if config.has_vision:
        raise CheckpointError(
            "config has a vision tower, whose tensors cannot be written; "
            "remove vision_config from the document"
        )
    if (draft is None) != (config.draft.num_stages == 0):
        raise CheckpointError(
            f"config has {config.draft.num_stages} draft stages, got {'no' if draft is None else 'some'} "
            "draft weights; give weights a `draft` exactly if the configuration has draft stages"
        )
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if present:
        raise CheckpointError(
            f"{str(folder)!r} already holds {shorten(present)}, expected a folder without weights; "
            "remove them or choose another folder"
        )


def _pair_arrays(specs: Any, arrays: Any) -> list[tuple[ArraySpec, Any]]:
    declared, leaves = spec_leaves(specs), jax.tree.leaves(arrays, is_leaf=_is_quantized)
    if len(declared) != len(leaves):
        raise CheckpointError(
            f"got {len(leaves)} arrays, expected the {len(declared)} that config declares; "
            "pass weights made for it"
        )
    wrong = [
        f"{path}: got {list(leaf.shape)}, expected {list(spec.stacked_shape)}"
        for (path, spec), leaf in zip(declared, leaves, strict=True)
        if leaf.shape != spec.stacked_shape
    ]
    wrong += [
        f"{path}: got bytes of {leaf.storage.value}, expected {spec.storage.value}"
        for (path, spec), leaf in zip(declared, leaves, strict=True)
        if _is_quantized(leaf) and leaf.storage is not spec.storage
    ]
    if wrong:
        raise CheckpointError(f"arrays do not fit config: {shorten(wrong)}; pass weights made for it")
    return [(spec, leaf) for (_, spec), leaf in zip(declared, leaves, strict=True)]


def _plan_shards(config: ModelConfig, max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for tensor in tensor_table(config).values():
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor.name)
        filled += tensor.num_bytes
    return shards


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantArray)


def _stored_tensors(
    pairs: list[tuple[ArraySpec, Any]], is_quantized: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Encode tensors one by one, in the order of `tensor_table`."""
    for spec, stack in pairs:
        host_stack = jax.tree.map(np.asarray, stack)
        for index, name in spec.tensors():
            tensor = jax.tree.map(itemgetter(index), host_stack)
            if spec.storage.is_quantized and is_quantized:
                payload, scales = _encode(spec, tensor, f"tensor {name!r}")
                yield name, payload
                yield scale_name(name), scales
            else:
                yield name, _round(spec, tensor, f"tensor {name!r}")


def _encode(spec: ArraySpec, tensor: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(tensor, QuantArray):
        return quantize(spec.storage, tensor, where)
    payload, scales = np.ascontiguousarray(tensor.payload), np.ascontiguousarray(tensor.scales)
    check_quantized(spec.storage, payload, scale_bytes(scales, where), where)
    if spec.storage is Storage.MXFP4:
        payload = payload.view(np.int8)
    return payload, scales.view(ml_dtypes.float8_e8m0fnu)


def _round(spec: ArraySpec, tensor: Any, where: str) -> np.ndarray:
    if isinstance(tensor, QuantArray):
        tensor = dequantize(spec.storage, np.asarray(tensor.payload), np.asarray(tensor.scales), where)
    dtype = np.dtype(np.float32 if spec.storage is Storage.F32 else ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):  # the largest float32 values are infinite in bfloat16
        rounded = np.ascontiguousarray(tensor.astype(dtype))
    if not np.isfinite(rounded).all():
        raise CheckpointError(
            f"{where} holds NaN or infinity as {dtype}, "
            "expected finite values; fix the weights before writing them"
        )
    return rounded


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
