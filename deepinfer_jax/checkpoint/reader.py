"""Opens a checkpoint folder, checks every header against the configuration, loads stacked arrays.

Separate because the order matters: all headers are compared before any data is read.
Quantised tensors stay bytes: the device holds what the files hold.
Read next: `names.py` (what is expected), `formats.py` (what the bytes mean).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Array, ArraySpec, QuantArray, Storage, is_spec, spec_leaves
from ..config import ModelConfig
from ..model.draft_weights import all_weight_specs
from ..model.weights import Weights
from .errors import CheckpointError, shorten
from .formats import check_quantized, scale_bytes
from .names import is_vision_tensor, scale_name, tensor_table
from .safetensors_file import SafetensorsFile
from .token_map import read_token_map

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

type Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Weights and what was left out of them.

    Args:
        weights: the backbone, and the draft stages if there are any.
        skipped: names of tensors that the configuration does not know, ignored on request.
    """

    weights: Weights
    skipped: tuple[str, ...]


class Checkpoint:
    """The validated files of one folder; nothing but headers is read before `load`.

    Args:
        folder: the folder, for messages.
        tensors: file and name in it of each tensor, by official name.
    """

    def __init__(self, folder: Path, tensors: dict[str, tuple[SafetensorsFile, str]]) -> None:
        self.folder = folder
        self.tensors = tensors

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Open the files named by the index, or the single `model.safetensors`.

        A `model.` in front of all names is dropped.

        Args:
            folder: the checkpoint folder.

        Returns:
            The checkpoint with all headers parsed.

        Raises:
            CheckpointError: no files, a missing or damaged one, or an index that contradicts them.
        """
        folder = Path(folder)
        if (folder / INDEX_FILE).is_file():
            files = _open_indexed(folder)
        elif (folder / SINGLE_FILE).is_file():
            files = [SafetensorsFile(folder / SINGLE_FILE)]
        else:
            raise CheckpointError(
                f"{str(folder)!r}: got neither {INDEX_FILE} nor {SINGLE_FILE}, expected one of them; "
                "pass the folder of a downloaded checkpoint"
            )
        tensors: dict[str, tuple[SafetensorsFile, str]] = {}
        for file in files:
            for name in file.tensors:
                if name in tensors:
                    raise CheckpointError(
                        f"tensor {name!r} is in {tensors[name][0].path.name} and in {file.path.name}, "
                        "expected it once; remove the stale file or download the checkpoint again"
                    )
                tensors[name] = (file, name)
        if tensors and all(name.startswith(_PREFIX) for name in tensors):
            tensors = {name.removeprefix(_PREFIX): place for name, place in tensors.items()}
        return cls(folder, tensors)

    def check(self, config: ModelConfig, ignore_extra: bool = False) -> tuple[str, ...]:
        """Compare all headers with the table of the configuration.

        Args:
            config: the architecture.
            ignore_extra: whether tensors that the configuration does not know are skipped.

        Returns:
            The names of the skipped tensors.

        Raises:
            CheckpointError: every missing, extra or differing tensor, in one message.
        """
        table = tensor_table(config)
        extra = tuple(
            name
            for name in self.tensors
            if name not in table and not (config.has_vision and is_vision_tensor(name))
        )
        missing = [
            f"{name} ({tensor.dtype} {list(tensor.shape)})"
            for name, tensor in table.items()
            if name not in self.tensors
        ]
        shapes, dtypes = [], []
        for name in table.keys() & self.tensors.keys():
            file, stored_name = self.tensors[name]
            got, expected = file.tensors[stored_name], table[name]
            where = f"{name} in {file.path.name}"
            if got.shape != expected.shape:
                shapes.append(f"{where}: got {list(got.shape)}, expected {list(expected.shape)}")
            if got.dtype not in expected.accepted_dtypes:
                dtypes.append(f"{where}: got {got.dtype}, expected {' or '.join(expected.accepted_dtypes)}")
        listed = [] if ignore_extra else [f"{name} in {self.tensors[name][0].path.name}" for name in extra]
        self._refuse({"missing": missing, "extra": listed, "wrong shape": shapes, "wrong dtype": dtypes})
        return extra

    def _refuse(self, problems: dict[str, list[str]]) -> None:
        if not any(problems.values()):
            return
        lines = [
            f"{kind} ({len(found)}): {shorten(sorted(found))}" for kind, found in problems.items() if found
        ]
        only_extra = not any(found for kind, found in problems.items() if kind != "extra")
        hint = (
            "pass ignore_extra=True to load without them, or use the checkpoint's own config.json"
            if only_extra
            else "use the config.json that came with these files, or download the files again"
        )
        raise CheckpointError(
            f"checkpoint {str(self.folder)!r} does not fit its configuration; expected exactly "
            "the tensors that the configuration implies, got\n  " + "\n  ".join(lines) + f"\n{hint}"
        )

    def load(
        self, specs: Any, is_quantized: bool, compute_dtype: Any, progress: Progress | None = None
    ) -> Any:
        """Read a tree of declarations; `check` must have passed.

        Args:
            specs: a pytree of `ArraySpec`.
            is_quantized: whether the checkpoint uses the released mixed storage.
            compute_dtype: bfloat16 or float32, dtype of the arrays neither quantised nor stored as F32.
            progress: told after each tensor, or None.

        Returns:
            The same tree with arrays, stacked as declared; `QuantArray` for what is stored quantised.

        Raises:
            CheckpointError: a value that is not finite, or a scale that its format does not have.
        """
        if np.dtype(compute_dtype) not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
            raise CheckpointError(
                f"compute dtype {compute_dtype}, expected bfloat16 or float32; others overflow"
            )
        total = sum(len(spec.tensors()) for _, spec in spec_leaves(specs))
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        def load_stack(spec: ArraySpec) -> Array | QuantArray:
            if spec.storage.is_quantized and is_quantized:
                return self._load_quantized(spec, count)
            return self._load_plain(spec, spec.memory_dtype(compute_dtype), count)

        return jax.tree.map(load_stack, specs, is_leaf=is_spec)

    def _load_plain(self, spec: ArraySpec, dtype: Any, count: Callable[[], None]) -> Array:
        stack = np.empty(spec.stacked_shape, dtype)
        for index, name in spec.tensors():
            stored, where = self._read(name)
            if not np.isfinite(stored).all():
                raise CheckpointError(
                    f"{where}: holds NaN or infinity, expected finite values; "
                    "the file is damaged, download it again"
                )
            stack[index] = stored
            count()
        return jnp.asarray(stack)

    def _load_quantized(self, spec: ArraySpec, count: Callable[[], None]) -> QuantArray:
        payload_shape, scale_shape = spec.resident_shapes
        is_mxfp4 = spec.storage is Storage.MXFP4
        payload = np.empty(payload_shape, np.uint8 if is_mxfp4 else jnp.float8_e4m3fn)
        scales = np.empty(scale_shape, np.uint8)
        for index, name in spec.tensors():
            stored, where = self._read(name)
            bytes_of_scales = scale_bytes(*self._read(scale_name(name)))
            check_quantized(spec.storage, stored, bytes_of_scales, where)
            payload[index] = stored.view(payload.dtype)
            scales[index] = bytes_of_scales
            count()
        return QuantArray(jnp.asarray(payload), jnp.asarray(scales), spec.storage, spec.axes)

    def _read(self, name: str) -> tuple[np.ndarray, str]:
        file, stored_name = self.tensors[name]
        return file.read(stored_name), f"tensor {name!r} in {file.path.name}"


def _open_indexed(folder: Path) -> list[SafetensorsFile]:
    path = folder / INDEX_FILE
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(places.values()))
        is_inside = {name: Path(name).name == name for name in file_names}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{str(path)!r} is no index ({error!r}), expected a JSON object with a weight_map from tensor "
            "names to file names; download it again"
        ) from error
    absent = [name for name in file_names if not (is_inside[name] and (folder / name).is_file())]
    if absent:
        raise CheckpointError(
            f"{str(folder)!r} lacks {len(absent)} of the {len(file_names)} files that {INDEX_FILE} names: "
            f"{shorten(absent)}; download them into the folder"
        )
    files = {name: SafetensorsFile(folder / name) for name in file_names}
    lost = [f"{name} in {place}" for name, place in places.items() if name not in files[place].tensors]
    if lost:
        raise CheckpointError(
            f"{str(path)!r} names {len(lost)} tensors that their files lack: {shorten(lost)}; index and "
            "files come from different checkpoints, download both again"
        )
    return list(files.values())


def load_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    compute_dtype: Any,
    progress: Progress | None = None,
    ignore_extra: bool = False,
) -> LoadedCheckpoint:
    """Check a checkpoint folder and load its backbone and draft stages.

    Vision tensors are checked by their headers and not loaded.

    Args:
        folder: the checkpoint folder.
        config: its architecture, from `read_config`.
        compute_dtype: bfloat16 or float32, dtype of the arrays neither quantised nor stored as F32.
        progress: called with (tensors done, tensors in all), or None.
        ignore_extra: whether tensors that the configuration does not know are skipped and reported.

    Returns:
        Weights on the default device, with the token map, and the names of what was skipped.

    Raises:
        CheckpointError: a folder that does not fit the configuration, or damaged data.
    """
    checkpoint = Checkpoint.open(folder)
    skipped = checkpoint.check(config, ignore_extra)
    token_map = jnp.asarray(read_token_map(folder, config)) if config.engram_layer_ids else None
    weights = checkpoint.load(all_weight_specs(config), config.is_quantized, compute_dtype, progress)
    return LoadedCheckpoint(replace(weights, token_map=token_map), skipped)


def load_weights(
    folder: str | Path, config: ModelConfig, compute_dtype: Any, progress: Progress | None = None
) -> Weights:
    """Load a checkpoint that fits its configuration exactly; see `load_checkpoint`.

    Args:
        folder: the checkpoint folder.
        config: its architecture, from `read_config`.
        compute_dtype: bfloat16 or float32, dtype of the arrays neither quantised nor stored as F32.
        progress: called with (tensors done, tensors in all), or None.

    Returns:
        Weights on the default device, with the token map.

    Raises:
        CheckpointError: a folder that does not fit the configuration, or damaged data.
    """
    return load_checkpoint(folder, config, compute_dtype, progress).weights
