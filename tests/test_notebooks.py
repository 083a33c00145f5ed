"""Every notebook runs from top to bottom as plain Python, and is stored without its output.

Separate because notebooks are no modules: nothing imports them.
Read next: `notebooks/`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_CELLS = 15
MOST_SECONDS = 600
"""Far above the minute that a notebook may take: the tests beside it use the same cores."""


def read(path: Path) -> list[dict[str, Any]]:
    """Give the cells of a notebook."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["nbformat"] == 4
    return document["cells"]


def code_of(path: Path) -> list[str]:
    """Give the text of each code cell."""
    return ["".join(cell["source"]) for cell in read(path) if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path: Path) -> None:
    for cell in read(path):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
        assert cell["metadata"] == {} and "attachments" not in cell


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_defines_nothing(path: Path) -> None:
    cells = read(path)
    assert cells[0]["cell_type"] == "markdown"
    assert len(cells) < MOST_CELLS
    for code in code_of(path):
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert not any(isinstance(node, defined) for node in ast.walk(ast.parse(code)))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{path.stem}.py"
    program.write_text("\n\n".join(code_of(path)), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(FOLDER.parent)
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
