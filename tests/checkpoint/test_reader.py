from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.arrays import QuantArray, Storage, spec_leaves
from deepinfer_jax.checkpoint import (
    Checkpoint,
    CheckpointError,
    SafetensorsFile,
    load_checkpoint,
    load_weights,
)
from deepinfer_jax.config_json import read_config
from deepinfer_jax.model.draft_weights import draft_weight_specs
from deepinfer_jax.model.weights import Weights, weight_specs

SCALE = "layers.0.attn.wq_a.scale"
PAYLOAD = "layers.0.attn.wq_a.weight"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def load(folder: Path, dtype=jnp.float32, **options) -> Weights:
    return load_checkpoint(folder, read_config(folder), dtype, **options).weights


def leaves(tree: Any) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QuantArray))


def assert_same(first: Any, second: Any) -> None:
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def decode(tensors: dict, name: str, storage: Storage) -> np.ndarray:
    """Decode a golden tensor in another way than the code under test."""
    tensor = tensors[name]
    if tensor.dtype == "F32":
        return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    codes = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)
    if tensor.dtype == "I8":
        values = np.empty((codes.shape[0], 2 * codes.shape[1]), np.float32)
        values[:, 0::2], values[:, 1::2] = E2M1[codes % 16], E2M1[codes // 16]
    else:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = tensors[name.removesuffix("weight") + "scale"]
    exponents = np.frombuffer(scale.data, np.uint8).reshape(scale.shape).astype(int) - 127
    i, j = np.indices(values.shape)
    return np.ldexp(values, exponents[i // 32 if storage is Storage.FP8_BLOCK else i, j // 32])


@pytest.mark.parametrize("model", ["tiny_bf16", "tiny_fp8fp4"])
def test_every_value_of_backbone_and_draft_is_the_stored_one(
    golden: Path, raw_tensors: Callable, plain: Callable, model: str
) -> None:
    config, raw = read_config(golden / model), raw_tensors(golden / model)
    checkpoint = Checkpoint.open(golden / model)
    assert checkpoint.check(config) == ()
    seen = 0
    for specs in (weight_specs(config), draft_weight_specs(config)):
        loaded = checkpoint.load(specs, config.is_quantized, jnp.float32)
        arrays, values = leaves(loaded), leaves(plain(loaded))
        for (_, spec), array, value in zip(spec_leaves(specs), arrays, values, strict=True):
            assert isinstance(array, QuantArray) == (spec.storage.is_quantized and config.is_quantized)
            assert array.shape == spec.stacked_shape and value.dtype == np.float32
            for index, name in spec.tensors():
                np.testing.assert_array_equal(np.asarray(value)[index], decode(raw, name, spec.storage), name)
                seen += 1
    assert seen == len([name for name in raw if not name.endswith(".scale")])


def test_quantised_tensors_are_resident_as_the_bytes_of_the_file(golden: Path, raw_tensors: Callable) -> None:
    config, raw = read_config(golden / "tiny_fp8fp4"), raw_tensors(golden / "tiny_fp8fp4")
    specs = weight_specs(config)
    for (path, spec), array in zip(spec_leaves(specs), leaves(load(golden / "tiny_fp8fp4")), strict=False):
        if not spec.storage.is_quantized:
            continue
        is_mxfp4 = spec.storage is Storage.MXFP4
        assert (array.storage, array.axes) == (spec.storage, spec.axes), path
        assert array.payload.dtype == (jnp.uint8 if is_mxfp4 else jnp.float8_e4m3fn), path
        assert array.scales.dtype == jnp.uint8, path
        payload, scales = np.asarray(array.payload), np.asarray(array.scales)
        for index, name in spec.tensors():
            assert payload[index].tobytes() == raw[name].data, name
            assert scales[index].tobytes() == raw[name.removesuffix("weight") + "scale"].data, name


def test_device_bytes_of_the_nano_model_are_those_of_its_files(raw_tensors: Callable) -> None:
    folder = resources.files("deepinfer_jax") / "assets" / "nano"
    with resources.as_file(folder) as path:
        config, raw = read_config(path), raw_tensors(path)
        weights = load_weights(path, config, jnp.bfloat16).replace(token_map=None)
    assert config.is_quantized and config.draft.num_stages == 3
    device_bytes = sum(array.nbytes for array in jax.tree.leaves(weights))
    assert device_bytes == sum(len(tensor.data) for tensor in raw.values())
    quantised = [leaf for leaf in leaves(weights) if isinstance(leaf, QuantArray)]
    assert sum(leaf.num_bytes for leaf in quantised) > device_bytes / 2


def test_compute_dtype_changes_only_what_is_stored_as_bf16(golden: Path) -> None:
    exact, rounded = load(golden / "tiny_fp8fp4"), load(golden / "tiny_fp8fp4", jnp.bfloat16)
    specs = spec_leaves(weight_specs(read_config(golden / "tiny_fp8fp4")))
    for (path, spec), left, right in zip(specs, leaves(exact), leaves(rounded), strict=False):
        if spec.storage.is_quantized:
            assert_same(left, right)
            continue
        assert right.dtype == (jnp.float32 if spec.storage is Storage.F32 else jnp.bfloat16), path
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right).astype(np.float32), path)


def test_token_map_comes_with_the_weights(golden: Path) -> None:
    expected = np.load(golden / "engram_constants.npz")["token_map"]
    token_map = load(golden / "tiny_bf16").token_map
    assert token_map.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(token_map), expected)


@pytest.mark.parametrize("shards", [1, 3])
def test_index_and_single_file_hold_the_same_weights(golden: Path, edited: Callable, shards: int) -> None:
    assert_same(load(edited(shards=shards)), load(golden / "tiny_fp8fp4"))


@pytest.mark.parametrize("shards", [0, 2])
def test_model_prefix_on_all_names_is_dropped(golden: Path, edited: Callable, shards: int) -> None:
    def add_prefix(tensors: dict) -> None:
        renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    assert_same(load(edited(add_prefix, shards=shards)), load(golden / "tiny_fp8fp4"))


def test_model_prefix_on_some_names_is_refused(edited: Callable) -> None:
    folder = edited(lambda tensors: tensors.update({"model.norm.weight": tensors.pop("norm.weight")}))
    with pytest.raises(CheckpointError, match=r"missing \(1\): norm\.weight.*\n.*extra \(1\): model\.norm"):
        load(folder)


def restore_scales(dtype: str) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".scale"):
                data = tensor.data
                if dtype == "F32":
                    data = np.ldexp(np.float32(1), np.frombuffer(data, np.uint8).astype(int) - 127).tobytes()
                tensors[name] = tensor._replace(dtype=dtype, data=data)

    return edit


@pytest.mark.parametrize("dtype", ["U8", "F32"])
def test_bc50_same_weights_from_three_storages_of_the_scales(
    golden: Path, edited: Callable, dtype: str
) -> None:
    assert_same(load(edited(restore_scales(dtype))), load(golden / "tiny_fp8fp4"))


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [("F8_E8M0", b"\xff"), ("U8", b"\xff"), ("F32", np.float32(np.nan).tobytes())],
)
def test_bc50_nan_scale_names_tensor_and_file(edited: Callable, dtype: str, bad: bytes) -> None:
    def edit(tensors: dict) -> None:
        restore_scales(dtype)(tensors)
        tensors[SCALE] = tensors[SCALE]._replace(data=tensors[SCALE].data[: -len(bad)] + bad)

    with pytest.raises(CheckpointError, match=rf"'{SCALE}' in model\.safetensors"):
        load(edited(edit))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (PAYLOAD, b"\x7f"),
        (PAYLOAD, b"\xff"),
        ("norm.weight", b"\x80\x7f"),
        ("layers.0.attn.attn_sink", np.float32(-np.inf).tobytes()),
    ],
)
def test_values_that_are_not_finite_name_tensor_and_file(edited: Callable, name: str, bad: bytes) -> None:
    def edit(tensors: dict) -> None:
        tensors[name] = tensors[name]._replace(data=bad + tensors[name].data[len(bad) :])

    with pytest.raises(CheckpointError, match=rf"'{name}' in model\.safetensors: .*NaN"):
        load(edited(edit))


def add_five(tensors: dict) -> None:
    tensors.update({f"layers.{layer}.attn.surprise": tensors["norm.weight"] for layer in range(5)})


def test_bc52_five_extra_tensors_are_listed(edited: Callable) -> None:
    with pytest.raises(CheckpointError, match=r"extra \(5\)") as error:
        load(edited(add_five))
    message = str(error.value)
    assert all(f"layers.{layer}.attn.surprise in model.safetensors" in message for layer in range(5))
    assert "ignore_extra=True" in message


def test_bc52_override_returns_what_was_skipped(golden: Path, edited: Callable) -> None:
    folder = edited(add_five)
    loaded = load_checkpoint(folder, read_config(folder), jnp.float32, ignore_extra=True)
    assert loaded.skipped == tuple(f"layers.{layer}.attn.surprise" for layer in range(5))
    assert_same(loaded.weights, load(golden / "tiny_fp8fp4"))


@pytest.mark.parametrize("ignore_extra", [False, True])
def test_bc52_five_missing_tensors_are_listed(edited: Callable, ignore_extra: bool) -> None:
    gone = [f"layers.{layer}.ffn.gate.bias_vl" for layer in range(5)]
    folder = edited(lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(CheckpointError, match=r"missing \(5\)") as error:
        load(folder, ignore_extra=ignore_extra)
    assert all(f"{name} (F32 [6])" in str(error.value) for name in gone)


def test_bc52_missing_draft_tensor_is_refused_though_it_is_not_loaded(edited: Callable) -> None:
    folder = edited(lambda tensors: tensors.pop("mtp.1.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): mtp\.1\.norm\.weight"):
        load(folder)


def test_bc57_bias_and_bias_vl_go_to_their_own_arrays(golden: Path, raw_tensors: Callable) -> None:
    raw = raw_tensors(golden / "tiny_bf16")
    layer = load(golden / "tiny_bf16").layers["window"]
    for part in ("bias", "bias_vl"):
        expected = np.frombuffer(raw[f"layers.1.ffn.gate.{part}"].data, np.float32)
        np.testing.assert_array_equal(np.asarray(getattr(layer.ffn, part))[1], expected)
    assert not np.array_equal(np.asarray(layer.ffn.bias), np.asarray(layer.ffn.bias_vl))


def break_headers(tensors: dict) -> None:
    tensors["norm.weight"] = tensors["norm.weight"]._replace(shape=[32, 2])
    tensors["head.weight"] = tensors["head.weight"]._replace(dtype="F16")
    tensors["extra"] = tensors.pop("embed.weight")


def test_all_header_faults_come_in_one_error_before_data_is_read(
    edited: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edited(break_headers, shards=2)
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name: pytest.fail("data was read"))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    message = str(error.value)
    assert "missing (1): embed.weight (BF16 [128, 64])" in message
    assert "extra (1): extra in model-0000" in message
    assert "wrong shape (1): norm.weight in model-0000" in message
    assert "got [32, 2], expected [64]" in message
    assert "wrong dtype (1): head.weight in model-0000" in message
    assert "got F16, expected BF16" in message


def test_long_lists_are_cut_with_a_count(golden: Path) -> None:
    config = replace(read_config(golden / "tiny_bf16"), is_quantized=True)
    with pytest.raises(CheckpointError, match=r"missing \(309\): .*; and 299 more") as error:
        Checkpoint.open(golden / "tiny_bf16").check(config)
    assert len(str(error.value)) < 4000


def test_missing_shard_is_named(edited: Callable) -> None:
    folder = edited(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 files.*model-00002-of-00003"):
        load(folder)


def test_truncated_shard_is_named(edited: Callable) -> None:
    folder = edited(shards=2)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*truncated"):
        load(folder)


def test_index_that_names_tensors_the_files_lack_is_refused(edited: Callable) -> None:
    folder = edited(shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["phantom"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="names 1 tensors that their files lack: phantom"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_damaged_index_is_refused(edited: Callable, content: str) -> None:
    folder = edited()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="is no index"):
        load(folder)


def test_index_cannot_name_files_outside_the_folder(edited: Callable) -> None:
    folder = edited()
    outside = {"weight_map": {"a": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(outside))
    with pytest.raises(CheckpointError, match="lacks 1 of the 1 files"):
        load(folder)


def test_tensor_in_two_files_is_refused(edited: Callable) -> None:
    folder = edited(shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    kept = {name: place for name, place in places.items() if place == first.name}
    name = next(iter(kept))
    index.write_text(json.dumps({"weight_map": kept | {name: second.name}}))
    with pytest.raises(CheckpointError, match="expected it once"):
        load(folder)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor"):
        Checkpoint.open(tmp_path)


def test_no_token_map_and_no_tokenizer_is_refused(edited: Callable) -> None:
    folder = edited()
    (folder / "engram_token_map.npy").unlink()
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor engram_token_map\.npy"):
        load(folder)


def test_vision_tensors_are_allowed_only_with_a_vision_tower(edited: Callable) -> None:
    def add_vision(tensors: dict) -> None:
        tensors.update({name: tensors["norm.weight"] for name in ("vision.norm.weight", "image_start")})

    folder = edited(add_vision)
    config = read_config(folder)
    assert Checkpoint.open(folder).check(replace(config, has_vision=True)) == ()
    with pytest.raises(CheckpointError, match=r"extra \(2\): image_start .*; vision\.norm\.weight"):
        Checkpoint.open(folder).check(config)


def test_progress_counts_every_tensor(golden: Path) -> None:
    calls = []
    load(golden / "tiny_bf16", progress=lambda done, total: calls.append((done, total)))
    total = calls[-1][1]
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_compute_dtype_that_could_overflow_is_refused(golden: Path) -> None:
    folder = golden / "tiny_bf16"
    with pytest.raises(CheckpointError, match="expected bfloat16 or float32"):
        load_weights(folder, read_config(folder), jnp.float16)
