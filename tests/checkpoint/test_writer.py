from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.arrays import Storage
from deepinfer_jax.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    tensor_table,
    write_checkpoint,
)
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.config_json import parse_config, read_config
from deepinfer_jax.model.draft_weights import DraftWeights, draft_weight_specs
from deepinfer_jax.model.weights import Weights

type Loaded = tuple[dict, ModelConfig, Weights, DraftWeights | None]


def read_all(folder: Path, dtype=jnp.float32) -> Loaded:
    config = read_config(folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(config)
    draft = checkpoint.load(draft_weight_specs(config), config.is_quantized, dtype)
    document = json.loads((folder / "config.json").read_text())
    return document, config, load_checkpoint(folder, config, dtype).weights, draft


def write(folder: Path, loaded: Loaded, **options) -> Path:
    document, config, weights, draft = loaded
    write_checkpoint(folder, document, replace(weights, draft=draft), config, **options)
    return folder


def assert_same(first: object, second: object) -> None:
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def is_canonical(payload: np.ndarray, is_mxfp4: bool, block_rows: int) -> np.ndarray:
    """Tell the groups whose largest code is above half the format's maximum, which fixes their scale."""
    if is_mxfp4:
        codes = np.stack([payload & 7, payload >> 4 & 7], axis=-1).reshape(len(payload), -1)
        half = 5
    else:
        codes, half = payload & 0x7F, 0x76
    groups = np.maximum.reduceat(codes, np.arange(0, codes.shape[1], 32), axis=1)
    if block_rows > 1:
        groups = np.maximum.reduceat(groups, np.arange(0, len(groups), block_rows), axis=0)
    return groups > half


@pytest.mark.parametrize("model", ["tiny_bf16", "tiny_fp8fp4"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_round_trip_returns_every_value(golden: Path, tmp_path: Path, model: str, dtype) -> None:
    loaded = read_all(golden / model, dtype)
    again = read_all(write(tmp_path / "copy", loaded), dtype)
    assert again[:2] == loaded[:2]
    assert_same(again[2:], loaded[2:])


def test_round_trip_of_bf16_returns_every_byte(golden: Path, tmp_path: Path, raw_tensors: Callable) -> None:
    folder = write(tmp_path / "copy", read_all(golden / "tiny_bf16"))
    assert raw_tensors(folder) == raw_tensors(golden / "tiny_bf16")


def test_quantised_bytes_are_written_as_they_were_read(
    golden: Path, tmp_path: Path, raw_tensors: Callable
) -> None:
    folder = write(tmp_path / "copy", read_all(golden / "tiny_fp8fp4"))
    assert raw_tensors(folder) == raw_tensors(golden / "tiny_fp8fp4")


def test_round_trip_of_fp8_and_mxfp4_values_returns_every_canonical_byte(
    golden: Path, tmp_path: Path, raw_tensors: Callable, plain: Callable
) -> None:
    first = raw_tensors(golden / "tiny_fp8fp4")
    second = raw_tensors(write(tmp_path / "copy", plain(read_all(golden / "tiny_fp8fp4"))))
    assert first.keys() == second.keys()
    total = kept = 0
    for name, tensor in first.items():
        assert (second[name].dtype, second[name].shape) == (tensor.dtype, tensor.shape)
        if name.endswith(".scale"):
            continue
        if tensor.dtype not in ("F8_E4M3", "I8"):
            assert second[name] == tensor
            continue
        payload = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)
        block_rows = 1 if tensor.dtype == "I8" or ".engram.embed." in name else 32
        canonical = is_canonical(payload, tensor.dtype == "I8", block_rows)
        scale_name = name.removesuffix("weight") + "scale"
        scales, new_scales = (np.frombuffer(t[scale_name].data, np.uint8) for t in (first, second))
        np.testing.assert_array_equal(
            new_scales.reshape(canonical.shape), scales.reshape(canonical.shape) - ~canonical
        )
        columns = np.arange(payload.shape[1]) // (16 if tensor.dtype == "I8" else 32)
        where = canonical[np.arange(len(payload)) // block_rows][:, columns]
        new_payload = np.frombuffer(second[name].data, np.uint8).reshape(tensor.shape)
        np.testing.assert_array_equal(new_payload[where], payload[where], name)
        total, kept = total + canonical.size, kept + int(canonical.sum())
    assert kept > 0.7 * total


def test_second_round_trip_of_values_returns_every_byte(
    golden: Path, tmp_path: Path, raw_tensors: Callable, plain: Callable
) -> None:
    first = write(tmp_path / "first", plain(read_all(golden / "tiny_fp8fp4")))
    second = write(tmp_path / "second", plain(read_all(first)))
    assert raw_tensors(second) == raw_tensors(first)


def test_shards_are_numbered_bounded_and_indexed(golden: Path, tmp_path: Path, raw_tensors: Callable) -> None:
    limit = 200_000
    folder = write(tmp_path / "copy", read_all(golden / "tiny_fp8fp4"), max_shard_bytes=limit)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 4 and set(index["weight_map"].values()) == set(files)
    table = tensor_table(read_config(folder))
    assert list(index["weight_map"]) == list(table)
    assert index["metadata"]["total_size"] == sum(tensor.num_bytes for tensor in table.values())
    sizes = dict.fromkeys(files, 0)
    for name, tensor in raw_tensors(folder).items():
        sizes[index["weight_map"][name]] += len(tensor.data)
    assert max(sizes.values()) <= limit


def test_config_and_token_map_are_written_beside(golden: Path, tmp_path: Path) -> None:
    loaded = read_all(golden / "tiny_bf16")
    folder = write(tmp_path / "copy", loaded)
    assert json.loads((folder / "config.json").read_text()) == loaded[0]
    np.testing.assert_array_equal(np.load(folder / "engram_token_map.npy"), np.asarray(loaded[2].token_map))


def test_quantised_weights_of_an_unquantised_configuration_are_written_as_bf16(
    golden: Path, tmp_path: Path, plain: Callable
) -> None:
    document, _, weights, draft = read_all(golden / "tiny_fp8fp4")
    document = {key: value for key, value in document.items() if key != "quantization_config"}
    config = parse_config(document)
    found = read_all(write(tmp_path / "copy", (document, config, weights, draft)))
    assert_same(found[2:], plain((weights, draft)))


def test_bytes_of_another_storage_are_refused(golden: Path, tmp_path: Path) -> None:
    document, config, weights, draft = read_all(golden / "tiny_fp8fp4")
    (table, *rest) = weights.engram
    broken = table.replace(wkv=table.wkv.replace(storage=Storage.FP8_ROW))
    with pytest.raises(CheckpointError, match=r"engram\.0\.wkv: got bytes of fp8 1x32, expected fp8 32x32"):
        write(tmp_path / "a", (document, config, replace(weights, engram=(broken, *rest)), draft))


@pytest.mark.parametrize(("part", "byte"), [("payload", 0x7F), ("scales", 0xFF)])
def test_nan_bytes_are_not_written(golden: Path, tmp_path: Path, part: str, byte: int) -> None:
    document, config, weights, draft = read_all(golden / "tiny_fp8fp4")
    (table, *rest) = weights.engram
    bytes_of_part = np.asarray(getattr(table.wkv, part)).copy()
    bytes_of_part.view(np.uint8)[-1, -1] = byte
    broken = table.replace(wkv=table.wkv.replace(**{part: bytes_of_part}))
    with pytest.raises(CheckpointError, match=r"'layers\.1\.engram\.wkv\.weight'.*NaN"):
        write(tmp_path / "a", (document, config, replace(weights, engram=(broken, *rest)), draft))


def test_values_off_the_grid_are_rounded_to_it(golden: Path, tmp_path: Path, plain: Callable) -> None:
    document, config, weights, draft = plain(read_all(golden / "tiny_fp8fp4"))
    moved = jax.tree.map(lambda array: np.asarray(array) * np.float32(1.1), replace(weights, token_map=None))
    moved = replace(moved, token_map=weights.token_map)
    written = plain(read_all(write(tmp_path / "copy", (document, config, moved, draft)))[2])
    layer = written.layers["window"]
    values = moved.layers["window"].ffn.experts.w1
    groups = np.abs(values.reshape(-1, 32))
    error = np.abs(values - np.asarray(layer.ffn.experts.w1)).reshape(-1, 32)
    # A scale is below a third of the largest value, half the widest step of E2M1 is one scale.
    assert (error.max(axis=1) <= groups.max(axis=1) / 3).all() and error.max() > 0
    np.testing.assert_array_equal(moved.layers["window"].attn.attn_sink, np.asarray(layer.attn.attn_sink))


def test_folder_that_holds_weights_is_not_overwritten(golden: Path, tmp_path: Path) -> None:
    loaded = read_all(golden / "tiny_bf16")
    write(tmp_path / "copy", loaded)
    with pytest.raises(CheckpointError, match="already holds model-00001"):
        write(tmp_path / "copy", loaded)


def test_arguments_that_contradict_each_other_are_refused(golden: Path, tmp_path: Path) -> None:
    document, config, weights, draft = read_all(golden / "tiny_bf16")
    with pytest.raises(CheckpointError, match="describes another model"):
        write(tmp_path / "a", (document, replace(config, is_quantized=True), weights, draft))
    with pytest.raises(CheckpointError, match="2 draft stages, got no draft weights"):
        write(tmp_path / "a", (document, config, weights, None))
    with pytest.raises(CheckpointError, match=r"norm: got \[63\], expected \[64\]"):
        write(tmp_path / "a", (document, config, replace(weights, norm=weights.norm[:-1]), draft))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("model", ["tiny_bf16", "tiny_fp8fp4"])
def test_values_that_are_not_finite_are_refused_by_name(golden: Path, tmp_path: Path, model: str) -> None:
    document, config, weights, draft = read_all(golden / model)
    broken = replace(weights, norm=weights.norm.at[0].set(jnp.nan))
    with pytest.raises(CheckpointError, match=r"'norm\.weight' holds NaN"):
        write(tmp_path / "a", (document, config, broken, draft))
    assert not (tmp_path / "a" / "model.safetensors.index.json").exists()
