"""Turn finished master weights into the shipped checkpoint, and say what the rounding cost.

Separate because it runs once, at the end of the last command.
Read next: `../checkpoint/writer.py`, `lm.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ..assets import NANO_FOLDER
from ..checkpoint import write_checkpoint
from ..config import ModelConfig
from ..model.weights import Weights
from .optimizer import compute_weights

EVALUATION_FILE = "evaluation.json"


def export_checkpoint(weights: Weights, config: ModelConfig, document: dict[str, Any], folder: Path) -> None:
    """Write the checkpoint in the official mixed layout, with its tokenizer beside it.

    The weights pass the storage's rounding first, exactly as the last phase of training saw them.

    Args:
        weights: float32 master weights with a token map.
        config: the architecture.
        document: its config document.
        folder: target; made if needed, must hold no checkpoint.
    """
    rounded = compute_weights(weights, config, jnp.float32, is_quantized=True)
    write_checkpoint(folder, document, rounded.replace(token_map=None), config)
    shutil.copyfile(NANO_FOLDER / "tokenizer.json", folder / "tokenizer.json")


def write_evaluation(results: dict[str, Any], folder: Path) -> None:
    """Write held-out losses as JSON beside the checkpoint."""
    (folder / EVALUATION_FILE).write_text(json.dumps(results, indent=2) + "\n")
