"""The loss picture is a PNG, with and without phases, from lists as JSON gives them.

Separate as it needs matplotlib.
Read next: `deepinfer_jax/training/plots.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_jax.training.plots import plot_losses


def test_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    training = {"stories": [[i, 8.0 - i / 100] for i in range(300)], "chat": []}
    held_out = {"stories": [(0, 8.0), (299, 5.1)], "chat": [(299, 4.0)]}
    plot_losses(tmp_path / "new" / "loss.png", training, held_out, {"mix": 90, "top-k": 180})
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot_losses(tmp_path / "empty.png", {}, {"stories": [(0, 8.0)]})


def test_matplotlib_is_imported_late() -> None:
    code = "import sys, deepinfer_jax.training.plots; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
