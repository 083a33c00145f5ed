"""Golden folders and edited copies of them, written byte by byte without the code under test."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from deepinfer_jax.arrays import QuantArray
from deepinfer_jax.checkpoint.formats import dequantize

GOLDEN = Path(__file__).parents[1] / "golden"


class RawTensor(NamedTuple):
    """A tensor as a safetensors file holds it."""

    dtype: str
    shape: list[int]
    data: bytes


def read_raw(path: Path) -> dict[str, RawTensor]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: RawTensor(entry["dtype"], entry["shape"], content[start + first : start + last])
        for name, entry in header.items()
        for first, last in [entry["data_offsets"]]
    }


def write_raw(path: Path, tensors: dict[str, RawTensor]) -> None:
    header, position = {}, 0
    for name, tensor in tensors.items():
        offsets = [position, position + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header).encode()
    data = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def golden() -> Path:
    return GOLDEN


@pytest.fixture
def raw_tensors() -> Callable[[Path], dict[str, RawTensor]]:
    """Read every tensor of a folder, whatever its files are called."""

    def read(folder: Path) -> dict[str, RawTensor]:
        return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in read_raw(path).items()}

    return read


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copy a golden folder with its tensors changed, in one file or in several with an index."""

    def make(
        edit: Callable[[dict[str, RawTensor]], object] = lambda tensors: None,
        source: str = "tiny_fp8fp4",
        shards: int = 0,
    ) -> Path:
        folder = tmp_path / f"{source}_{len(list(tmp_path.iterdir()))}"
        shutil.copytree(GOLDEN / source, folder)
        tensors = read_raw(folder / "model.safetensors")
        edit(tensors)
        (folder / "model.safetensors").unlink()
        if shards == 0:
            write_raw(folder / "model.safetensors", tensors)
            return folder
        places = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(tensors.items())[shard::shards])
            write_raw(folder / name, part)
            places.update(dict.fromkeys(part, name))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder

    return make


@pytest.fixture
def plain() -> Callable[[Any], Any]:
    """Replace the quantised weights of a tree by their float32 values, on the host."""

    def decode(leaf: Any) -> Any:
        if not isinstance(leaf, QuantArray):
            return leaf
        payload, scales = np.asarray(leaf.payload), np.asarray(leaf.scales)
        values = np.empty(leaf.shape, np.float32)
        for index in np.ndindex(leaf.shape[:-2]):
            values[index] = dequantize(leaf.storage, payload[index], scales[index], "w")
        return values

    return lambda tree: jax.tree.map(decode, tree, is_leaf=lambda leaf: isinstance(leaf, QuantArray))
