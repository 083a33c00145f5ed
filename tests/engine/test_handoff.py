"""Prefilled requests as files: what is written comes back, and what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer_jax.engine import handoff
from deepinfer_jax.engine.handoff import FORMAT, HandoffError, PrefilledRequest, check_header

HEADER = {"model": "nano", "sliding_window": 32, "seed": 2**64 - 1, "shape": [2, 3], "eos": None}
DTYPES = [
    *(np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64),
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    *(ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn, ml_dtypes.int4),
]
SHAPES = [(), (0,), (1,), (5,), (2, 0, 3), (2, 3, 4)]


def make_array(dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """All bits that a type may have, in turn."""
    dtype_ = np.dtype(dtype)
    if dtype_.itemsize > 1:
        count = int(np.prod(shape)) * dtype_.itemsize
        return (np.arange(count) * 37 % 256).astype(np.uint8).view(dtype_).reshape(shape)
    return (np.arange(int(np.prod(shape))) % 2).astype(np.float32).astype(dtype_).reshape(shape)


def write_file(path: Path, document: object, **arrays: np.ndarray) -> Path:
    save_file(arrays, path, {handoff._METADATA_KEY: json.dumps(document)})
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_array_comes_back_bit_for_bit(dtype: type, tmp_path: Path) -> None:
    arrays = {f"array{number}": make_array(dtype, shape) for number, shape in enumerate(SHAPES)}
    PrefilledRequest({}, arrays).save(tmp_path / "x.safetensors")
    loaded = PrefilledRequest.load(tmp_path / "x.safetensors").arrays
    assert sorted(loaded) == sorted(arrays)
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_the_header_comes_back_with_the_format(tmp_path: Path) -> None:
    request = PrefilledRequest(HEADER, {})
    request.save(tmp_path / "x.safetensors")
    loaded = PrefilledRequest.load(tmp_path / "x.safetensors")
    assert loaded.header == request.header == {**HEADER, "format": FORMAT}
    assert PrefilledRequest({"shape": (2, 3)}, {}).header["shape"] == [2, 3]


def test_numbers_of_numpy_in_a_header_are_numbers() -> None:
    header = PrefilledRequest({"seed": np.int64(7), "ends": np.True_, "top_p": [np.float64(0.5)]}, {}).header
    assert header == {"seed": 7, "ends": True, "top_p": [0.5], "format": FORMAT}
    check_header(header, {"seed": np.uint8(7)})
    with pytest.raises(TypeError, match="header: got a set, expected JSON values"):
        PrefilledRequest({"a": {1}}, {})


def test_arrays_that_are_not_dense_are_stored_as_they_look(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.int32).reshape(4, 6)
    arrays = {"cut": whole[:, 1:3], "turned": whole.T, "cut_half": whole.astype(ml_dtypes.bfloat16)[::2, ::3]}
    PrefilledRequest({}, arrays).save(tmp_path / "x.safetensors")
    loaded = PrefilledRequest.load(tmp_path / "x.safetensors").arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_what_was_loaded_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    PrefilledRequest({}, {"a": np.arange(1000)}).save(path)
    loaded = PrefilledRequest.load(path)
    path.write_bytes(bytes(path.stat().st_size))
    np.testing.assert_array_equal(loaded.arrays["a"], np.arange(1000))


def test_saving_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for number in (1, 2):
        PrefilledRequest({"number": number}, {"a": np.arange(number)}).save(path)
    assert PrefilledRequest.load(path).header["number"] == 2
    assert [one.name for one in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_file_may_be_read_by_whoever_reads_other_files_here(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    PrefilledRequest({}, {"a": np.arange(3)}).save(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    PrefilledRequest({"number": 1}, {}).save(path)

    def fail(arrays: object, part: Path, metadata: object) -> None:
        part.write_bytes(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(handoff, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        PrefilledRequest({"number": 2}, {}).save(path)
    assert PrefilledRequest.load(path).header["number"] == 1
    assert [one.name for one in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_folder_or_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(HandoffError, match=r"got the folder '.*none', expected one that exists; create it"):
        PrefilledRequest({}, {}).save(tmp_path / "none" / "x.safetensors")
    for path in (tmp_path, tmp_path / "x.safetensors"):
        with pytest.raises(HandoffError, match="got no such file, expected one that an engine exported"):
            PrefilledRequest.load(path)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path, cut = tmp_path / "x.safetensors", tmp_path / "cut.safetensors"
    PrefilledRequest(HEADER, {"a": np.arange(10), "b": make_array(ml_dtypes.bfloat16, (3,))}).save(path)
    data = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(
            HandoffError, match=r"prefilled request cut.safetensors: got .*, expected a whole"
        ):
            PrefilledRequest.load(cut)


FOREIGN = {
    "no_metadata": None,
    "a_list": [],
    "no_header": {"dtypes": {}},
    "no_dtypes": {"header": {"format": FORMAT}},
    "array_that_is_not_there": {"header": {"format": FORMAT}, "dtypes": {"b": "bfloat16"}},
    "unknown_type": {"header": {"format": FORMAT}, "dtypes": {"a": "float5"}},
    "no_type": {"header": {"format": FORMAT}, "dtypes": {"a": "finfo"}},
    "type_of_another_size": {"header": {"format": FORMAT}, "dtypes": {"a": "bfloat16"}},
    "type_that_is_no_name": {"header": {"format": FORMAT}, "dtypes": {"a": 3}},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    if name == "no_metadata":
        save_file({"a": np.zeros(3, np.uint8)}, path)
    else:
        write_file(path, FOREIGN[name], a=np.zeros(3, np.uint8))
    with pytest.raises(HandoffError, match=r"prefilled request x.safetensors: got .*, expected a whole file"):
        PrefilledRequest.load(path)


def test_metadata_that_is_no_json_is_refused(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors", {handoff._METADATA_KEY: "{"})
    with pytest.raises(HandoffError, match="expected a whole file that an engine exported"):
        PrefilledRequest.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("version", [FORMAT + 1, None, "1"])
def test_another_format_is_refused(version: object, tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.safetensors", {"header": {"format": version}, "dtypes": {}})
    with pytest.raises(HandoffError, match=rf"format: got {version!r}, expected {FORMAT}; export it again"):
        PrefilledRequest.load(path)


def test_each_field_that_differs_is_named() -> None:
    header = PrefilledRequest(HEADER, {}).header
    check_header(header, {})
    check_header(header, {"model": "nano", "shape": (2, 3), "eos": None})
    with pytest.raises(HandoffError) as caught:
        check_header(
            header,
            {"sliding_window": 128, "model": "nano", "eos": 1, "numerics": None},
            "prefilled request x.safetensors",
        )
    assert str(caught.value) == (
        "prefilled request x.safetensors: sliding_window: got 32, expected 128; eos: got None, expected 1; "
        "numerics: got nothing, expected None; import it into an engine with the settings that exported it"
    )
