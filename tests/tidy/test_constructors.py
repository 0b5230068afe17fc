"""No constructor takes more parts than a reader can keep in mind. Values of data, which have no
`__init__` of their own, are not counted."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("src/moonpool", "lab/src/moonpool_lab", "engine/src/moonpool_engine")
MOST_PARTS = 8
FEWER = {"RequestLifecycle": 6, "AttemptPlanner": 5, "Simulation": 3}


def test_constructors_have_few_parts() -> None:
    too_many = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, line, number in _constructors(path):
                if number > FEWER.get(name, MOST_PARTS):
                    too_many.append(f"{path.relative_to(ROOT)}:{line}: {name} has {number} parts")
    assert not too_many, "\n".join(["join parts that belong together:", *too_many])


def test_the_parts_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text("class A:\n    def __init__(self, a, /, b, *, c=1): ...\n")
    assert _constructors(file) == [("A", 1, 3)]


def _constructors(path: Path) -> list[tuple[str, int, int]]:
    """Name, line and number of parts of each class with an `__init__` of its own."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ClassDef):
            continue
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                given = each.args
                parts = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                found.append((node.name, node.lineno, len(parts) - 1))
    return found
