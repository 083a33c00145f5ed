"""Models that several files share.

Separate so that no file has its own idea of the golden folder or of a random model.
Read next: `test_golden.py`, `test_equivalence.py`.
"""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from deepinfer_jax.model.weights import Weights
from deepinfer_jax.testing.presets import TINY, random_weights


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def tiny_weights() -> Weights:
    """Random float32 weights of `TINY`."""
    return random_weights(TINY, jax.random.key(1))


@pytest.fixture(scope="session")
def released_folder(tmp_path_factory: pytest.TempPathFactory, golden_folder: Path) -> Path:
    """A checkpoint folder with nothing in it but the released `config.json`."""
    folder = tmp_path_factory.mktemp("released")
    (folder / "config.json").write_bytes((golden_folder / "released_config.json").read_bytes())
    return folder
