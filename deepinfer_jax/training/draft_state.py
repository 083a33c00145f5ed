"""What a training run of the draft carries between commands, and the checkpoint it ends in.

Separate from `draft.py` because neither needs samples or a compiled step.
Read next: `state_files.py` (the files), `export.py` (the trunk's own export).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Array
from ..assets import NANO_FOLDER
from ..checkpoint import write_checkpoint
from ..model.draft_weights import draft_weight_specs
from ..model.weights import Weights
from .draft_steps import DraftRun, initial_draft, make_optimizer
from .optimizer import cast_as_stored
from .state_files import config_hash, load_state, save_state

EVALUATION_FILE = "draft_evaluation.json"


class DraftState:
    """Master weights and optimizer state of a run between steps.

    Args:
        run: the run.
        final_norm: [D], the trunk's, for the initial weights.
        num_steps: steps of the whole run.
    """

    def __init__(self, run: DraftRun, final_norm: Array, num_steps: int) -> None:
        self.run, self.num_steps, self.step = run, num_steps, 0
        self.weights = initial_draft(final_norm, run=run)
        self.moments: Any = jax.jit(make_optimizer().init)(self.weights)
        self.history: dict[str, list[Any]] = {"train": [], "held_out": []}

    def fit(self, asked: int, seconds: float, step_seconds: float, stride: int, settled: float) -> None:
        """Let the run end within some seconds, unless the rate falls already.

        Args:
            asked: steps of the whole run, if time allows.
            seconds: left for steps.
            step_seconds: what a step takes.
            stride: steps of a call, of which the new length is a multiple.
            settled: part of the steps after which the length stays.
        """
        if self.step >= settled * self.num_steps:
            return
        calls = max(1, int(seconds / (step_seconds * stride)))
        self.num_steps = min(asked, self.step + calls * stride)

    def _hash(self, document: dict[str, Any]) -> str:
        run = self.run
        sizes = {"batch_rows": run.batch_rows, "anchors": run.anchors, "is_quantized": run.is_quantized}
        return config_hash({"config": document, "seed": run.seed, "numerics": run.numerics.name, **sizes})

    def save(self, folder: Path, document: dict[str, Any]) -> None:
        """Write the state files; the master weights are kept exactly."""
        entries = _state_entries((self.weights, self.moments))
        meta = {"step": self.step, "seed": self.run.seed, "config_hash": self._hash(document)}
        save_state(
            folder,
            {name: np.asarray(value) for name, value, _ in entries},
            {name: kind for name, _, kind in entries},
            {**meta, "loss_history": self.history, "num_steps": self.num_steps},
        )

    def restore(self, folder: Path, document: dict[str, Any]) -> None:
        """Read the state files over the initial state, the length of the run included.

        Raises:
            StateError: no state there, another run's, or a damaged one.
        """
        arrays, meta = load_state(folder, self._hash(document))
        self.step, self.num_steps, self.history = meta["step"], meta["num_steps"], meta["loss_history"]
        trees = (self.weights, self.moments)
        names = [name for name, _, _ in _state_entries(trees)]
        leaves, structure = jax.tree.flatten(trees)
        restored = [
            jnp.asarray(arrays[name], leaf.dtype).reshape(leaf.shape)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        self.weights, self.moments = jax.tree.unflatten(structure, restored)


def _state_entries(trees: Any) -> list[tuple[str, Array, str]]:
    """List (name, array, kind of rounding in the state files) of everything a run carries."""
    entries = []
    for path, value in jax.tree_util.tree_flatten_with_path(trees)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        kinds = {".mu.": "first_moment", ".nu.": "second_moment"}
        kind = next((kind for part, kind in kinds.items() if part in name), "exact")
        entries.append((name, value, kind))
    return entries


def export_draft(state: DraftState, document: dict[str, Any], trunk: Weights, folder: Path) -> None:
    """Write the trunk as it was loaded and the draft, rounded as training saw it, as one checkpoint.

    Args:
        state: of the run.
        document: the config document with the draft's keys.
        trunk: the loaded trunk; its bytes are written as they are.
        folder: target; made if needed, must hold no checkpoint.
    """
    config = state.run.config
    draft = cast_as_stored(draft_weight_specs(config), state.weights, jnp.float32, is_quantized=True)
    write_checkpoint(folder, document, trunk.replace(token_map=None, draft=draft), config)
    shutil.copyfile(NANO_FOLDER / "tokenizer.json", folder / "tokenizer.json")
    results = {
        "step": state.step,
        "steps": state.num_steps,
        "batch_rows": state.run.batch_rows,
        "anchors": state.run.anchors,
        "seed": state.run.seed,
        "held_out": state.history["held_out"][-1][1] if state.history["held_out"] else None,
    }
    (folder / EVALUATION_FILE).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
