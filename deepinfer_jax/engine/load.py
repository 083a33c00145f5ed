"""Load a model folder onto devices.

Separate because it joins checkpoint, tokenizer and mesh, which do not know each other.
Read next: `llm.py`, which runs what is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from ..assets import NANO_FOLDER
from ..checkpoint import load_weights
from ..config import ModelConfig
from ..config_json import read_config
from ..model.numerics import NUMERICS, Numerics
from ..model.weights import Weights
from ..sampling_params import RequestError
from ..sharding.layout import Layout
from ..sharding.mesh import MeshShape
from ..spec_decode.calibration import CALIBRATION_FILE, Calibration
from ..step import ONE_DEVICE, Target
from ..text.tokenizer import Tokenizer
from .platform import platform_of, suited
from .progress import working_on
from .target import make_target, put_on

type Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model.

    Attributes:
        config: the architecture.
        weights: in device memory.
        numerics: the choice of arithmetic.
        tokenizer: None for a checkpoint without one; prompts are token ids then.
        target: where the weights lie.
        name: of its folder.
        calibration: of the confidence in drafts, None where the folder has none.
        folder: where it was read from, None for one that was put together in this process.
    """

    config: ModelConfig
    weights: Weights
    numerics: Numerics
    tokenizer: Tokenizer | None
    target: Target = ONE_DEVICE
    name: str = "model"
    calibration: Calibration | None = None
    folder: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))

    def delete(self) -> None:
        """Give the memory of the weights back."""
        for leaf in jax.tree.leaves(self.weights):
            leaf.delete()

    @property
    def forbidden_ids(self) -> list[int]:
        """Ids that no request may get besides the image token: those of placeholders."""
        return [] if self.tokenizer is None else self.tokenizer.placeholder_ids()

    def encode(self, prompt: Prompt, which: str = "prompt") -> list[int]:
        """Turn a prompt into token ids.

        Args:
            prompt: a text or a list of token ids.
            which: names it in messages.

        Raises:
            RequestError: text for a model without a tokenizer, or empty text.
        """
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence):
                raise RequestError(
                    f"prompts: got {prompt!r} as one of them, expected texts or lists of token ids; put the "
                    "ids of one prompt into a list of their own"
                )
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError(
                f"{which}: got text, expected token ids as this model folder has no tokenizer.json; put one "
                "beside config.json or give token ids"
            )
        if not prompt:
            raise RequestError(f"{which}: got '', expected text; give a non-empty prompt")
        return self.tokenizer.encode(prompt)


def load(
    folder: str | Path | None = None,
    numerics: str = "official",
    batch_invariant: bool = True,
    cache_format: str | None = None,
    mesh: str | tuple[int, ...] | MeshShape | Mesh | None = None,
    layout: str | Layout | None = None,
    routing_counts: np.ndarray | None = None,
    redundant_experts: int = 0,
) -> Model:
    """Load a checkpoint folder, or the embedded nano model.

    Args:
        folder: config.json, safetensors, tokenizer.json or engram_token_map.npy, and the calibration of
            the draft stages if there is one; None or "nano" for the embedded model.
        numerics: "official" or "float32".
        batch_invariant: whether a request's tokens are the same whatever runs beside it; without it
            few sequences at a time run faster.
        cache_format: "fp4", "fp8", "bf16" or "float32": how the cache is rounded and stored; that of the
            numerics by default.
        mesh: grid of devices, such as "8", "2x4" or "data=2,model=4", or a mesh of JAX; one device by
            default.
        layout: what lies where on the mesh: a preset's name or a `Layout`; "data+expert" by default.
        routing_counts: [L, E], how often each layer's experts were chosen, for a balanced placement of
            the experts; in order by default.
        redundant_experts: further places that hold the most used experts once more; needs the counts.

    Returns:
        The model, ready to generate.

    Raises:
        ValueError: a refused configuration, checkpoint, calibration, numerics or layout, before any compute.
    """
    if numerics not in NUMERICS:
        raise RequestError(f"numerics: got {numerics!r}, expected one of {sorted(NUMERICS)}; choose one")
    use_compilation_cache()
    path = NANO_FOLDER if folder in (None, "nano") else Path(folder)
    config = read_config(path)
    chosen = replace(NUMERICS[numerics], batch_invariant=batch_invariant)
    if cache_format is not None:
        chosen = replace(chosen, cache_format=cache_format)
    target = make_target(config, mesh, layout, redundant_experts)
    chosen = suited(chosen, platform_of(target))
    calibration = read_calibration(path, config)
    with working_on(f"loading {path.name}"):
        weights = load_weights(path, config, chosen.compute_dtype)
        weights = put_on(weights, config, target, routing_counts, redundant_experts)
    has_tokenizer = (path / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_folder(path) if has_tokenizer else None
    return Model(config, weights, chosen, tokenizer, target, path.name, calibration, path)


def as_model(
    model: str | Path | Model | None,
    numerics: str = "official",
    batch_invariant: bool = True,
    cache_format: str | None = None,
    mesh: str | tuple[int, ...] | MeshShape | Mesh | None = None,
    layout: str | Layout | None = None,
) -> Model:
    """Give a loaded model as it is, and load anything else.

    Args:
        model: loaded, or what to load.
        numerics: as in `load`, as all that follow; to be left out for a loaded model.
        batch_invariant: as in `load`.
        cache_format: as in `load`.
        mesh: as in `load`.
        layout: as in `load`.

    Returns:
        The model.

    Raises:
        ValueError: as `load`; or a loaded model and how to load it.
    """
    given = (numerics, batch_invariant, cache_format, mesh, layout)
    if not isinstance(model, Model):
        return load(model, *given)
    if given != ("official", True, None, None, None):
        raise RequestError(
            "LLM: got a loaded model and how to load it, expected one of the two; give numerics, mesh and "
            "layout to `load`"
        )
    return model


def read_calibration(folder: Path, config: ModelConfig) -> Calibration | None:
    """Read the calibration of the confidence in drafts.

    Args:
        folder: of the checkpoint.
        config: the architecture.

    Returns:
        The calibration; None without the file, or without draft stages.

    Raises:
        CalibrationError: a damaged file, or one of another draft.
    """
    path = folder / CALIBRATION_FILE
    if not config.draft.num_stages or not path.is_file():
        return None
    return Calibration.load(path, config.draft.block_size)


def use_compilation_cache() -> Path:
    """Keep compiled programs on disk between processes, unless the user chose a place already.

    Returns:
        The folder in use.
    """
    configured = jax.config.jax_compilation_cache_dir
    if configured:
        return Path(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "deepinfer_jax" / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder
