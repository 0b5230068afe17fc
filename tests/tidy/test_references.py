"""Tests that every file, test, module and name exists that comments, docstrings and pages
mention."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from test_structure import BESIDE, BESIDE_ROOMS, LEVELS, ROOT, SOURCES, TESTS

from benchmarks.house import PACKAGES, native_sources
from moonpool.config.schema import schema_of
from moonpool.config.tables import Config

SUFFIXES = "py|md|cpp|h|toml|html|jinja|lock|yml|yaml|service|ipynb|svg|mjs|sh"
PATH = re.compile(
    rf"(?<![\w/.~{{}}<>$*:-])((?:[\w.-]+/)+[\w.-]+\.(?:{SUFFIXES}))(?:::(\w+))?(?![\w/*{{])"
)
BARE = re.compile(r"(?<![\w/.~{}<>$*:-])([\w-]+\.(?:py|cpp|h))(?:::(\w+))?(?![\w/*{(])")
ROOMS = sorted({room.rpartition("/")[2] for rooms in LEVELS for room in rooms} - {"__main__"})
_ROOM = "|".join(map(re.escape, ROOMS))
DOTTED = re.compile(rf"`(?:moonpool(?:_engine|_lab)?\.)?((?:{_ROOM})(?:\.\w+)+)(?:\(\))?`")

OF_OTHERS = {
    "asm-generic/socket.h",
    "linux/tcp.h",
    "llama.cpp",
    "ik_llama.cpp",
    "config.json",
}
"""Files of other projects, and projects whose names look like files."""
FOLDERS = (
    *("benchmarks", "deploy", "docs", "engine", "examples", "lab", "papers", "src", "tests"),
    "website",
)
GENERATED = ("build", "__pycache__", ".egg-info")


class Text(NamedTuple):
    """Holds a comment, a docstring or a page, and its first line."""

    path: Path
    line: int
    text: str

    def at(self, found: re.Match[str]) -> str:
        line = self.line + self.text.count("\n", 0, found.start())
        return f"{self.path.relative_to(ROOT)}:{line}: {found.group()}"


@cache
def texts_of_sources() -> tuple[Text, ...]:
    """Returns the comments and docstrings of Python files that name something, and whole C++
    files."""
    examples = [*(ROOT / "examples").glob("*.py"), *ROOT.glob("*.py")]
    found = []
    for path in [*SOURCES, *BESIDE, *TESTS, *examples]:
        source = path.read_text()
        if not _names(source):
            continue
        if any("#" in line and _names(line) for line in source.splitlines()):
            for token in tokenize.generate_tokens(io.StringIO(source).readline):
                if token.type == tokenize.COMMENT:
                    found.append(Text(path, token.start[0], token.string))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found.append(Text(path, node.lineno, str(node.value.value)))
    return (*found, *(Text(path, 1, path.read_text()) for path in native_sources()))


def _names(text: str) -> bool:
    """Whether the text names a file or a module. Most sources name none, and are not parsed, to
    save time."""
    return any(pattern.search(text) for pattern in (PATH, BARE, DOTTED))


def texts_of_pages() -> Iterator[Text]:
    deploy = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    pages += [path for folder in PACKAGES.values() for path in folder.rglob("*.md")]
    for path in [*pages, *deploy, ROOT / "Makefile"]:
        # The changelog may name what was removed.
        if path.name != "CHANGELOG.md":
            yield Text(path, 1, path.read_text())


@cache
def known() -> dict[str, Path]:
    """Maps each end of a file's path to the file, because a text may omit the first folders."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    found: dict[str, Path] = {}
    for path in files:
        parts = path.relative_to(ROOT).parts
        if not any(part.endswith(GENERATED) for part in parts):
            found |= {"/".join(parts[at:]): path for at in range(len(parts))}
    return found


def gone(text: Text, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yields the references to a file, or to a test or constant in it, that does not exist."""
    for found in pattern.finditer(text.text):
        name, test = found.groups()
        if name in OF_OTHERS or name.isupper() or name.startswith("FOLDER/"):
            continue
        beside = (text.path.parent / name).resolve()
        path = beside if beside.is_file() else known().get(name.removeprefix("./"))
        made = rf"(?m)\b(?:def|class) {test}\b|^{test}\b.* = "
        if path is None or (test and not re.search(made, path.read_text())):
            yield text.at(found)


def names_nothing(name: str) -> bool:
    """Whether this has the form of a name such as `kvcache.ssd_tier`, but names no module and no
    part of a module."""
    if name in schema_of(Config):  # the name is a key of the configuration
        return False
    parts = name.split(".")
    places = [ROOT] if parts[0] in BESIDE_ROOMS else list(PACKAGES.values())
    found = [at for at in places if (at / parts[0]).is_dir() or (at / f"{parts[0]}.py").is_file()]
    place = found[0] if found else places[0]
    while parts and (place / parts[0]).is_dir():
        place = place / parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place = place / f"{parts.pop(0)}.py"
    else:
        place = place / "__init__.py"
    if not parts:
        return False
    text = place.read_text() if place.is_file() else ""
    return not all(re.search(rf"\b{part}\b", text) for part in parts)


@pytest.mark.parametrize("texts", [texts_of_sources, texts_of_pages])
def test_files_that_are_named_exist(texts: object) -> None:
    assert callable(texts)
    found = [line for text in texts() for line in gone(text, PATH)]
    assert not found, "\n".join(found)


def test_files_that_sources_name_without_a_folder_exist() -> None:
    found = [line for text in texts_of_sources() for line in gone(text, BARE)]
    assert not found, "\n".join(found)


def test_modules_that_are_named_exist() -> None:
    files = re.compile(rf"\.(?:{SUFFIXES}|json)$")
    found = [
        text.at(match)
        for texts in (texts_of_sources, texts_of_pages)
        for text in texts()
        for match in DOTTED.finditer(text.text)
        if not files.search(match.group(1)) and names_nothing(match.group(1))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_gone"),
    [
        ("see engine/native/hand.py", True),
        ("see moonpool_engine/engine/runner.py, and docs/x.md.", True),
        ("see moonpool_engine/engine/runner.py and docs/architecture.md", False),
        ("tests/tidy/test_references.py::test_modules_that_are_named_exist", False),
        ("tests/tidy/test_references.py::test_nothing", True),
        ("https://host/engine/nothing.py and <folder>/nothing.py", False),
    ],
)
def test_a_file_that_is_gone_is_found(text: str, is_gone: bool) -> None:
    assert bool(list(gone(Text(ROOT / "page.md", 1, text), PATH))) is is_gone


@pytest.mark.parametrize(
    ("name", "is_nothing"),
    [
        ("kvcache.tiers", True),
        ("scheduler.ssd_load", True),
        ("kvcache.ssd_tier", False),
        ("engine.ops.Gate", False),
        ("engine.ops.NoSuchName", True),
        ("conductor.placement", False),
        ("benchmarks.suite", False),
        ("benchmarks.nothing", True),
    ],
)
def test_a_module_that_is_gone_is_found(name: str, is_nothing: bool) -> None:
    assert names_nothing(name) is is_nothing
