"""Memory-mapped reading of one safetensors file, its header validated before any data is touched.

Separate because the safetensors library (0.8) cannot read BF16, FP8 or E8M0 into NumPy.
Read next: `reader.py`, which combines the files of a checkpoint.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CheckpointError

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        **{"BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16},
        **{"I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64},
        **{"F16": np.float16, "F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16},
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
"""The format's words for element types and the NumPy dtypes of their views."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor.

    Args:
        dtype: element type, a key of `DTYPES`.
        shape: dimensions.
        start: first byte, counted from the end of the header.
        stop: byte after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One validated file; tensors are read as views of its memory map.

    Args:
        path: the file.

    Raises:
        CheckpointError: a file that is missing, truncated, or whose header contradicts itself.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{str(self.path)!r} does not exist; download the missing file")
        header = self._read_header()
        self.tensors = {name: self._parse_entry(name, entry) for name, entry in header.items()}
        self._check_layout()
        self._bytes: np.ndarray | None = None

    def read(self, name: str) -> np.ndarray:
        """View one tensor without copying it.

        Args:
            name: tensor name as in the file.

        Returns:
            A read-only array of the tensor's dtype and shape.
        """
        header = self.tensors[name]
        if header.start == header.stop:
            return np.empty(header.shape, DTYPES[header.dtype])
        if self._bytes is None:
            self._bytes = np.memmap(self.path, np.uint8, "r").view(np.ndarray)
        data = self._bytes[self._data_start + header.start : self._data_start + header.stop]
        return data.view(DTYPES[header.dtype]).reshape(header.shape)

    def _fail(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{str(self.path)!r}: {problem}; the file is truncated or not safetensors, download it again"
        )

    def _read_header(self) -> dict[str, Any]:
        size = self.path.stat().st_size
        if size < _LENGTH_BYTES:
            raise self._fail(f"has {size} bytes, expected at least {_LENGTH_BYTES} for the header's length")
        with self.path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if length > size - _LENGTH_BYTES:
                raise self._fail(f"header of {length} bytes in a file of {size} bytes, expected it to fit")
            text = stream.read(length)
        self._data_start = _LENGTH_BYTES + length
        self._data_bytes = size - self._data_start
        try:
            header = json.loads(text, object_pairs_hook=self._unique_keys)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._fail(f"header is not JSON ({error}), expected a JSON object") from error
        if not isinstance(header, dict):
            raise self._fail(f"header holds a JSON {type(header).__name__}, expected an object")
        header.pop("__metadata__", None)
        return header

    def _unique_keys(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise self._fail(f"header lists {repeated[:3]} more than once, expected each tensor once")
        return found

    def _parse_entry(self, name: str, entry: Any) -> TensorHeader:
        try:
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._fail(
                f"header entry {name!r} is {entry!r}, expected dtype, shape and two data_offsets"
            ) from error
        if dtype not in DTYPES:
            raise self._fail(f"tensor {name!r} has dtype {dtype!r}, expected one of {sorted(DTYPES)}")
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise self._fail(
                f"tensor {name!r} has shape {shape} and offsets {start}, {stop}, expected numbers from 0"
            )
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if stop - start != expected:
            raise self._fail(
                f"tensor {name!r} ({dtype} {list(shape)}) spans {stop - start} bytes, expected {expected}"
            )
        return TensorHeader(dtype, shape, start, stop)

    def _check_layout(self) -> None:
        position = 0
        for name, header in sorted(self.tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
            if header.start != position:
                raise self._fail(
                    f"tensor {name!r} starts at byte {header.start}, expected {position}: no gap, no overlap"
                )
            position = header.stop
        if position != self._data_bytes:
            raise self._fail(f"holds {self._data_bytes} data bytes, expected {position} by its header")
