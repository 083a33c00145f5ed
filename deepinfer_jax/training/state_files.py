"""A training state on disk in few small files, so that a run resumes on another machine.

Separate from the trainer because it handles host arrays only and never needs JAX.
Read next: `lm.py`, which decides what is in the state.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_FILE_BYTES = 14 * 2**20
"""Size of a full file; the limit is 15 MiB, and the margin is for the eye that reads `ls`."""

MAX_STATE_BYTES = 60 * 2**20
"""Size of all files together (spec: at most 60 MiB of state between commands)."""

KINDS = ("parameter", "first_moment", "second_moment", "exact")
"""How an array is stored.

parameter, second_moment: bfloat16 (second moments span more powers of ten than fp8 has).
first_moment: float8_e4m3fn with one float32 scale a row (last axis), as its noise is far above 4 bits.
exact: bytes unchanged; integers, counters, random keys, small float32 arrays.
"""

MANIFEST = "state.json"
_FORMAT = 1
_META_KEYS = ("step", "seed", "config_hash", "loss_history")


class StateError(ValueError):
    """A state that is refused: what, got, expected, how to fix."""


def config_hash(document: Mapping[str, Any]) -> str:
    """Hash a configuration document independent of key order, 16 hex digits."""
    text = json.dumps(document, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save_state(
    folder: str | Path,
    arrays: Mapping[str, np.ndarray],
    kinds: Mapping[str, str],
    meta: Mapping[str, Any],
) -> None:
    """Write a state beside the previous one, switch over by one rename, then remove the previous.

    Args:
        folder: made if needed; only this state's files belong there.
        arrays: host arrays by name; all but exact ones are converted to float32 first.
        kinds: one of `KINDS` for every name.
        meta: JSON values; `step`, `seed`, `config_hash` and `loss_history` are required.

    Raises:
        StateError: names that differ, an unknown kind, a missing meta key, a value that is not
            finite, or more than `MAX_STATE_BYTES`. Nothing is written then.
    """
    missing = [key for key in _META_KEYS if key not in meta]
    if missing:
        raise StateError(f"state meta: got no {missing}, expected {list(_META_KEYS)}; add them")
    if set(arrays) != set(kinds):
        different = sorted(set(arrays) ^ set(kinds))
        raise StateError(
            f"state names: got {different[:5]} in only one of arrays and kinds; name each in both"
        )
    entries, stream = _encode_all(arrays, kinds)
    if len(stream) > MAX_STATE_BYTES:
        raise StateError(
            f"state size: got {len(stream)} bytes, expected at most {MAX_STATE_BYTES}; keep fewer second "
            "moments (an optimizer without them), or a smaller model"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    files = [
        _write_part(target, stream[start : start + MAX_FILE_BYTES])
        for start in range(0, len(stream), MAX_FILE_BYTES)
    ]
    manifest = {"format": _FORMAT, "meta": dict(meta), "files": files, "arrays": entries}
    # Until this rename a reader finds the previous manifest and all its files; names are content
    # hashes, so writing never touches a file that the previous state still needs.
    _write_renamed(target / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    for old in target.glob("state-*.bin*"):
        if old.name not in files:
            old.unlink()


def load_state(
    folder: str | Path, expected_config: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a state written by `save_state`.

    Args:
        folder: where it is.
        expected_config: `config_hash` of the run that resumes, or None to accept any.

    Returns:
        Arrays by name (float32, exact ones in their own dtype) and the meta values.

    Raises:
        StateError: no state, another configuration's, or a missing or damaged file.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise StateError(
            f"training state {str(folder)!r}: got no {MANIFEST}, expected a saved state; do not resume"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        meta, found_format = manifest["meta"], manifest["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(
            f"training state {str(path)!r}: got {error!r}, expected JSON; copy it again"
        ) from error
    if found_format != _FORMAT:
        raise StateError(
            f"training state format: got {found_format}, expected {_FORMAT}; retrain with this version"
        )
    if expected_config is not None and meta["config_hash"] != expected_config:
        raise StateError(
            f"training state {str(folder)!r}: got config {meta['config_hash']}, expected {expected_config}; "
            "resume with the configuration it was saved with, or use another folder"
        )
    stream = b"".join(_read_part(Path(folder), name) for name in manifest["files"])
    return {entry["name"]: _decode(entry, stream) for entry in manifest["arrays"]}, meta


def _encode_all(
    arrays: Mapping[str, np.ndarray], kinds: Mapping[str, str]
) -> tuple[list[dict[str, Any]], bytes]:
    entries: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    offset = 0
    for name in sorted(arrays):
        value, kind = np.asarray(arrays[name]), kinds[name]
        if kind not in KINDS:
            raise StateError(f"state kind of {name!r}: got {kind!r}, expected one of {KINDS}; correct it")
        if kind != "exact" or np.issubdtype(value.dtype, np.floating):
            if not np.all(np.isfinite(np.asarray(value, np.float32))):
                raise StateError(
                    f"state array {name!r}: got NaN or infinity, expected finite values; the run diverged, "
                    "resume from the state before"
                )
        parts = _encode(value, kind)
        size = sum(len(part) for part in parts)
        entries.append(
            {"name": name, "kind": kind, "dtype": value.dtype.name, "shape": value.shape, "offset": offset}
        )
        chunks += parts
        offset += size
    return entries, b"".join(chunks)


def _encode(value: np.ndarray, kind: str) -> list[bytes]:
    if kind == "exact":
        return [value.tobytes()]
    wide = np.asarray(value, np.float32)
    if kind != "first_moment":
        return [wide.astype(ml_dtypes.bfloat16).tobytes()]
    rows = wide.reshape(-1, _row_length(wide.shape))
    largest = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    scale = np.max(np.abs(rows), axis=1, keepdims=True, initial=0.0) / np.float32(largest)
    scale = np.where(scale > 0, scale, np.float32(1))
    return [scale.tobytes(), (rows / scale).astype(ml_dtypes.float8_e4m3fn).tobytes()]


def _decode(entry: Mapping[str, Any], stream: bytes) -> np.ndarray:
    shape, kind, offset = tuple(entry["shape"]), entry["kind"], entry["offset"]
    count = math.prod(shape)
    if kind == "exact":
        dtype = np.dtype(entry["dtype"])
        return np.frombuffer(stream, dtype, count, offset).reshape(shape).copy()
    if kind != "first_moment":
        return np.frombuffer(stream, ml_dtypes.bfloat16, count, offset).astype(np.float32).reshape(shape)
    length = _row_length(shape)
    num_rows = count // length
    scale = np.frombuffer(stream, np.float32, num_rows, offset)
    codes = np.frombuffer(stream, ml_dtypes.float8_e4m3fn, count, offset + scale.nbytes)
    return (codes.astype(np.float32).reshape(num_rows, length) * scale[:, None]).reshape(shape)


def _row_length(shape: tuple[int, ...]) -> int:
    return max(shape[-1], 1) if shape else 1


def _write_part(folder: Path, content: bytes) -> str:
    name = f"state-{hashlib.sha256(content).hexdigest()[:16]}.bin"
    _write_renamed(folder / name, content)
    return name


def _write_renamed(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _read_part(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise StateError(f"training state file {str(path)!r}: got no such file; copy the whole folder again")
    content = path.read_bytes()
    found = f"state-{hashlib.sha256(content).hexdigest()[:16]}.bin"
    if found != name:
        raise StateError(
            f"training state file {str(path)!r}: got content of {found}, expected that of its name; "
            "copy it again"
        )
    return content
