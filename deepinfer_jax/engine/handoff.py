"""A prefilled request as one file: what one process computed of a prompt, for another to go on from.

Separate because a file outlives the engine that wrote it: its header says what it is of, and whoever
reads it compares before anything reaches a device. No JAX here.
Read next: `pages.py`, the pages whose content such a file carries.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

FORMAT = 2
"""Version of the file; another one is refused."""

_METADATA_KEY = "deepinfer_jax.prefilled_request"

_STORED_DTYPES = frozenset(
    np.dtype(dtype)
    for dtype in (
        *(np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64),
        *(np.float16, np.float32, np.float64),
    )
)


class HandoffError(ValueError):
    """A prefilled request that is refused: what, got, expected, how to fix."""


@dataclass(frozen=True, slots=True)
class PrefilledRequest:
    """Header and arrays of a prefilled request.

    Args:
        header: what the arrays are of, as JSON values by name; "format" is added.
        arrays: by name; of NumPy's numbers, or of `ml_dtypes`' such as bfloat16 and float8.
    """

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", _as_json({**self.header, "format": FORMAT}))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; whoever looks sees the whole file or none.

        Args:
            path: where; a file that is there is replaced.

        Raises:
            HandoffError: a folder that does not exist.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise HandoffError(
                f"prefilled request {path.name}: got the folder {str(path.parent)!r}, expected one that "
                "exists; create it first"
            )
        stored = {name: _to_stored(array) for name, array in self.arrays.items()}
        dtypes = {name: array.dtype.name for name, array in self.arrays.items() if not _is_stored(array)}
        metadata = {_METADATA_KEY: json.dumps({"header": self.header, "dtypes": dtypes})}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            # The library makes files that nobody else may read, whatever the user's mask allows.
            partial.touch()
            mode = partial.stat().st_mode
            save_file(stored, partial, metadata)
            partial.chmod(mode)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> PrefilledRequest:
        """Read what `save` wrote.

        Args:
            path: the file.

        Returns:
            The request; check its header before its arrays are used.

        Raises:
            HandoffError: a file that is missing, cut off, not of a prefilled request, or of another format.
        """
        path = Path(path)
        if not path.is_file():
            raise HandoffError(
                f"prefilled request {str(path)!r}: got no such file, expected one that an engine exported; "
                "check the path"
            )
        try:
            document, stored = _read(path)
        except Exception as error:  # the library raises several kinds
            raise _foreign(path, str(error)) from error
        return cls._from_document(path, document, stored)

    @classmethod
    def _from_document(cls, path: Path, document: Any, stored: dict[str, np.ndarray]) -> PrefilledRequest:
        header = document.get("header") if isinstance(document, dict) else None
        dtypes = document.get("dtypes") if isinstance(document, dict) else None
        if not isinstance(header, dict) or not isinstance(dtypes, dict):
            raise _foreign(path, "a file without the header of one")
        if header.get("format") != FORMAT:
            raise HandoffError(
                f"prefilled request {path.name}: format: got {header.get('format')!r}, expected {FORMAT}; "
                "export it again with this version"
            )
        if not set(dtypes) <= set(stored):
            raise _foreign(path, f"no arrays {sorted(set(dtypes) - set(stored))}")
        try:
            arrays = {name: _from_stored(array, dtypes.get(name)) for name, array in stored.items()}
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            raise _foreign(path, f"an array of a type that is not known ({error})") from error
        return cls(header, arrays)


def check_header(header: dict[str, Any], expected: dict[str, Any], which: str = "prefilled request") -> None:
    """Refuse a prefilled request that an engine cannot go on from.

    Args:
        header: of the request.
        expected: the fields that matter, with the engine's own values; others are not compared.
        which: names the request in messages, such as "prefilled request x.safetensors".

    Raises:
        HandoffError: fields that are missing or differ, all of them named.
    """
    differences = [
        f"{name}: got {repr(header[name]) if name in header else 'nothing'}, expected {value!r}"
        for name, value in _as_json(expected).items()
        if name not in header or header[name] != value
    ]
    if differences:
        raise HandoffError(
            f"{which}: {'; '.join(differences)}; import it into an engine with the settings that exported it"
        )


def _read(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    # Without the mapping that is the default, nothing depends on the file any more afterwards.
    with safe_open(path, framework="np", backend="pread") as file:
        text = (file.metadata() or {}).get(_METADATA_KEY)
        if text is None:
            return None, {}
        return json.loads(text), {name: file.get_tensor(name) for name in file.keys()}


def _foreign(path: Path, got: str) -> HandoffError:
    return HandoffError(
        f"prefilled request {path.name}: got {got}, expected a whole file that an engine exported; copy or "
        "export it again"
    )


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Give the values that come back from a file: lists for tuples, plain numbers for NumPy's."""
    return json.loads(json.dumps(fields, default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"header: got a {type(value).__name__}, expected JSON values; convert it first")


def _is_stored(array: np.ndarray) -> bool:
    return array.dtype.newbyteorder("=") in _STORED_DTYPES


def _to_stored(array: np.ndarray) -> np.ndarray:
    """Give an array as the format has it: what it lacks as bytes, in one more dimension."""
    dense = np.asarray(array, order="C")
    if _is_stored(array):
        return dense
    assert hasattr(ml_dtypes, array.dtype.name), f"an array of {array.dtype} cannot be stored"
    return dense[..., None].view(np.uint8)


def _from_stored(array: np.ndarray, dtype: str | None) -> np.ndarray:
    return array if dtype is None else array.view(np.dtype(getattr(ml_dtypes, dtype)))[..., 0]
