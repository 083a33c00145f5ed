"""The file of results: one writer, whole lines, nothing changed before it must be.

Separate from the records' content; real processes are killed in `tests/cli/test_batch_killed.py`.
Read next: `deepinfer_jax/text/record_file.py`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deepinfer_jax.sampling_params import RequestError
from deepinfer_jax.text.jsonl import request_key
from deepinfer_jax.text.record_file import OutputError, RecordFile
from deepinfer_jax.text.records import error_record

KEY = request_key(b"one", "")
RECORD = error_record(1, KEY, "line 1: wrong")
KEYS = [int(KEY, 16), 5]


def test_records_are_added_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for record in (b"a\n", b"b\n"):
        with RecordFile(path) as file:
            file.write(record)
    assert path.read_bytes() == b"a\nb\n"


def test_each_record_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: written.append(bytes(data)) or write(file, data))
    with RecordFile(tmp_path / "out.jsonl") as file:
        file.write(b"x" * 100_000 + b"\n")
    assert written == [b"x" * 100_000 + b"\n"]


def test_a_write_that_the_system_cuts_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    with RecordFile(tmp_path / "out.jsonl") as file:
        file.write(b"01234567\n")
    assert (tmp_path / "out.jsonl").read_bytes() == b"01234567\n"


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RecordFile(tmp_path / "out.jsonl") as file:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OutputError, match=r"out.jsonl: got No space left on device, expected .*; free"):
            file.write(b"a\n")


def test_half_a_record_stays_until_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(RECORD + RECORD[:9])
    with RecordFile(path) as file:
        done = file.done(KEYS, in_order=True)
        assert path.read_bytes() == RECORD + RECORD[:9]
        file.cut(done.size)
        file.write(b"next\n")
    assert path.read_bytes() == RECORD + b"next\n"


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "out.jsonl"
    with RecordFile(path) as first:
        with pytest.raises(RequestError, match=r"got a file that another process writes to, expected"):
            RecordFile(path)
        first.write(b"a\n")
    with RecordFile(path) as second:
        second.write(b"b\n")
    assert path.read_bytes() == b"a\nb\n"


@pytest.mark.parametrize("place", ["missing/out.jsonl", "."])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(RequestError, match=r"^output .*: got .*, expected a file that can be written; give"):
        RecordFile(tmp_path / place)


def test_a_device_is_refused() -> None:
    with pytest.raises(RequestError, match="got a device or pipe, expected a file that can be continued"):
        RecordFile(os.devnull)
