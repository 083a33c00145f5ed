from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer_jax.checkpoint import CheckpointError, SafetensorsFile

TYPES = {
    **{"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I8": np.int8, "U8": np.uint8},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
}


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(start: int, stop: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    arrays = {
        name: np.arange(12).astype(np.uint8).view(np.uint8).astype(np.float32).astype(dtype).reshape(3, 4)
        for name, dtype in TYPES.items()
        if name != "F8_E8M0"
    }
    arrays["F8_E8M0"] = np.arange(6, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).reshape(2, 3)
    arrays["empty"] = np.zeros((0, 4), np.float32)
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert file.tensors.keys() == arrays.keys()
    for name, expected in arrays.items():
        got = file.read(name)
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()


def test_tensors_are_views_of_one_map(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"x": entry(0, 4), "y": entry(4, 8, "F32", [1])}, bytes(8))
    file = SafetensorsFile(path)
    assert not file.read("x").flags.writeable
    assert np.shares_memory(file.read("y"), file.read("y"))


@pytest.mark.parametrize("kept", [0, 5, 8, 30, -1], ids=lambda kept: f"{kept}_bytes")
def test_truncated_file_is_named(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "cut.safetensors", {"x": entry(0, 40)}, bytes(40))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors.*truncated"):
        SafetensorsFile(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors.*does not exist"):
        SafetensorsFile(tmp_path / "gone.safetensors")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"x": ', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([], "JSON list, expected an object"),
        ({"x": 3}, "entry 'x' is 3"),
        ({"x": {"dtype": "U8", "shape": [8]}}, "two data_offsets"),
        ({"x": entry(0, 8, "F4")}, "dtype 'F4'"),
        ({"x": entry(0, 8, "F32", [3])}, "spans 8 bytes, expected 12"),
        ({"x": entry(0, 8, "U8", [-8])}, "expected numbers from 0"),
        ({"x": entry(0, 4), "y": entry(5, 8)}, "'y' starts at byte 5, expected 4"),
        ({"x": entry(0, 5), "y": entry(4, 8)}, "'y' starts at byte 4, expected 5"),
        ({"x": entry(0, 7)}, "holds 8 data bytes, expected 7"),
        ({"x": entry(0, 9)}, "holds 8 data bytes, expected 9"),
        (b'{"x": 1, "x": 2}', "more than once"),
    ],
)
def test_corrupt_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsFile(path)
    assert "bad.safetensors" in str(error.value)


def test_golden_file_agrees_with_an_independent_reader(golden: Path, raw_tensors: Callable) -> None:
    file = SafetensorsFile(golden / "tiny_fp8fp4" / "model.safetensors")
    raw = raw_tensors(golden / "tiny_fp8fp4")
    assert file.tensors.keys() == raw.keys()
    for name, expected in raw.items():
        got = file.read(name)
        assert got.dtype == TYPES[expected.dtype] and list(got.shape) == expected.shape
        assert got.tobytes() == expected.data
