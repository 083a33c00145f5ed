"""Rules of style that a parser can check: docstrings, sizes, leftovers, traces of somebody's machine.

Separate from the linters because these are rules of this project.
Read next: `CONTRIBUTING.md`.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "deepinfer_jax").rglob("*.py"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

# The brackets keep the patterns from matching themselves.
MACHINE_TRACE = re.compile(r"(?<![\w./-])/(?:work|root|tmp)\b|python[h]osted|pypi[.]org|registry[.]npmjs")
LEFTOVER = re.compile(r"\bTO[D]O\b|\bFIX[M]E\b|\bXX[X]\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

each_module = pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in MODULES]
)


def public_definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Yield the public classes and functions of a module, and the public methods of those classes."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def missing_docstrings(source: str) -> list[str]:
    """List what lacks a docstring: the module, or a public definition."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else ["module"]
    return found + [
        f"{node.name} (line {node.lineno})"
        for node in public_definitions(tree.body)
        if not ast.get_docstring(node) and not is_overload(node)
    ]


def is_overload(node: ast.AST) -> bool:
    """Tell a typing overload, whose docstring is the implementation's."""
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(name, ast.Name) and name.id == "overload" for name in decorators)


def long_functions(source: str) -> list[str]:
    """List the functions over the limit, decorators and docstring included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or first) - first + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{node.name} (line {node.lineno}): {lines} lines")
    return found


def project_files() -> list[Path]:
    """List the files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def matching_lines(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """List "file:line: text" of every match in the files that are text."""
    found = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


@each_module
def test_public_names_have_docstrings(path: Path) -> None:
    assert missing_docstrings(path.read_text()) == []


@each_module
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    if "pallas" not in path.parts:
        assert long_functions(source) == []


def test_no_leftovers() -> None:
    sources = [path for path in project_files() if path.suffix in (".py", ".toml", ".md", ".ipynb")]
    assert matching_lines(LEFTOVER, sources) == []


def test_no_trace_of_a_machine() -> None:
    assert matching_lines(MACHINE_TRACE, project_files()) == []


def test_the_checks_can_fail() -> None:
    undocumented = "class A:\n    def b(self): ...\ndef _c(): ..."
    assert missing_docstrings(undocumented) == ["module", "A (line 1)", "b (line 2)"]
    assert long_functions("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES) == ["f (line 1): 81 lines"]
    for trace in ("'/" + "tmp/x'", "cd /" + "work/main", "/" + "root"):
        assert MACHINE_TRACE.search(trace)
    for innocent in ("../work/main", "home/tmp", "/workers", "x /tmpfile"):
        assert not MACHINE_TRACE.search(innocent)
    assert LEFTOVER.search("# TO" + "DO later")
