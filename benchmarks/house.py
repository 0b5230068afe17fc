"""Counts the code base: lines and files of each package, imports across their borders, circles.

python -m benchmarks.house      # or `make house`
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "moonpool": ROOT / "src" / "moonpool",
    "moonpool_engine": ROOT / "engine" / "src" / "moonpool_engine",
    "moonpool_lab": ROOT / "lab" / "src" / "moonpool_lab",
}
ALLOWED = {
    ("moonpool_engine", "moonpool"),
    ("moonpool_lab", "moonpool"),
    ("moonpool_lab", "moonpool_engine"),
}
"""Which package may import which."""
CORE = ("conductor", "scheduler", "kvcache")
"""Folders of `moonpool`. The modules of these rooms always run; their sub-folders hold options."""


@dataclass(frozen=True, slots=True)
class Size:
    files: int
    lines: int


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def core_files() -> list[Path]:
    """The modules that always run."""
    folders = [PACKAGES["moonpool"] / name for name in CORE]
    return [path for folder in folders for path in sorted(folder.glob("*.py")) if _lines(path)]


def native_sources() -> list[Path]:
    folder = PACKAGES["moonpool_engine"] / "engine" / "native"
    return [*folder.glob("*.cpp"), *folder.glob("*.h")]


def size_of(paths: list[Path]) -> Size:
    return Size(len(paths), sum(map(_lines, paths)))


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def modules() -> Mapping[str, Path]:
    """Returns all modules of the three packages, by their full names."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sources(package):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"), path.name)))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Returns the modules of the three packages that a module imports anywhere in its file,
    including within functions and for types only."""
    found = set()
    for node in nodes_of(modules()[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = whole & modules().keys()
            found |= inner
            if inner != whole:
                found.add(node.module)
    return frozenset(name for name in found if name in modules()) - {module}


def borders() -> dict[tuple[str, str], int]:
    """Returns how many imports go from each package to each other package."""
    counts: dict[tuple[str, str], int] = {}
    for module in modules():
        for other in imports_of(module):
            pair = module.partition(".")[0], other.partition(".")[0]
            if pair[0] != pair[1]:
                counts[pair] = counts.get(pair, 0) + 1
    return counts


def circles() -> list[tuple[str, ...]]:
    """Modules that import each other, directly or through others (Tarjan's components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(module: str) -> Iterator[str]:
        """Yields the modules to visit first."""
        number[module] = low[module] = len(number)
        open_.append(module)
        for other in sorted(imports_of(module)):
            if other not in number:
                yield other
            if other in open_:
                low[module] = min(low[module], low[other])
        if low[module] == number[module]:
            place = open_.index(module)
            found.append(tuple(sorted(open_[place:])))
            del open_[place:]

    for module in sorted(modules()):
        stack = [] if module in number else [visit(module)]
        while stack:
            try:
                stack.append(visit(next(stack[-1])))
            except StopIteration:
                stack.pop()
    return [each for each in found if len(each) > 1]


def main() -> None:
    """Prints the table of packages and imports."""
    rows = {package: size_of(sources(package)) for package in PACKAGES}
    rows["the core of moonpool"] = size_of(core_files())
    rows["C++ of moonpool_engine"] = size_of(native_sources())
    for name, size in rows.items():
        print(f"{name:<24} {size.lines:>7,} lines {size.files:>5} files")
    for (one, other), count in sorted(borders().items()):
        wrong = "" if (one, other) in ALLOWED else "   NOT ALLOWED"
        print(f"{one:<15} imports {other:<15} {count:>4} times{wrong}")
    found = circles()
    print(f"{len(found)} circles of imports")
    for circle in found:
        print("  " + ", ".join(circle))


if __name__ == "__main__":
    main()
