"""The structure of the house, as tests: who may import whom, and what no file may contain."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "moonpool"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70

# A room may import rooms of earlier lines only. `api` knows the head only by the protocol it
# declares itself, so the runtime that implements it stands above.
LEVELS = (
    {"types"},
    {"config", "metrics"},
    {"kvcache", "cost", "batching"},
    {"workers"},
    {"conductor"},
    {"messenger", "engine"},
    {"attention"},
    {"api"},
    {"trace"},
    {"runtime", "sim"},
    {"vllm"},
    {"replay"},
    {"report"},
    {"plan"},
    {"bench", "reproduce"},
    {"cli"},
    {"__main__"},
)
LEVEL_OF = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}

PURE_ROOMS = {
    "types",
    "config",
    "metrics",
    "kvcache",
    "cost",
    "batching",
    "workers",
    "conductor",
}
IMPURE_MODULES = {
    "asyncio",
    "concurrent",
    "ctypes",
    "datetime",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "uuid",
}
IMPURE_CALLS = {"open", "print", "input", "id", "breakpoint"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("asyncio", "create_subprocess_shell"),
}
MACHINE_PATH = re.compile(r"(?<![\w.:*])/(?:work|opt|home|root|Users|mnt)/")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".cfg", ".txt", ".cpp", ".h", ".yml", ".yaml", ".json", ""}

SOURCES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ALL = [*SOURCES, *TESTS]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name_of(path))


def room_of(module: str) -> str:
    """`a.b` of moonpool.a.b if that is a room by itself, else `a`."""
    parts = module.removeprefix("moonpool").strip(".").split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LEVEL_OF else parts[0]


def own_room(path: Path) -> str:
    return room_of(".".join(path.relative_to(SOURCE).with_suffix("").parts))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module imported, wherever in the file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in _own_modules() else node.module


@cache
def _own_modules() -> frozenset[str]:
    inside = (path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCES)
    return frozenset(".".join(p.parts).removesuffix(".__init__") for p in inside)


def calls_of(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 30 and len(TESTS) > 10


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_rooms_stand_on_what_they_import(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    room = own_room(path)
    assert room in LEVEL_OF, f"{room} is a new room: give it its place in LEVELS"
    for line, module in imports_of(path):
        if module.split(".")[0] != "moonpool" or module == "moonpool":
            continue
        other = room_of(module)
        allowed = other == room or LEVEL_OF[other] < LEVEL_OF[room]
        assert allowed, f"{name_of(path)}:{line}: {room} may not import {other}"


@pytest.mark.parametrize("path", [p for p in SOURCES if own_room(p) in PURE_ROOMS], ids=name_of)
def test_pure_rooms_are_pure(path: Path) -> None:
    for line, module in imports_of(path):
        top = module.split(".")[0]
        assert top not in IMPURE_MODULES, f"{name_of(path)}:{line}: imports {module}"
        assert module != "numpy.random", f"{name_of(path)}:{line}: imports {module}"
    for node in ast.walk(tree_of(path)):
        place = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"{place}: async"
        assert not isinstance(node, ast.Global), f"{place}: global"
    for call in calls_of(path):
        called = call.func.id if isinstance(call.func, ast.Name) else ""
        assert called not in IMPURE_CALLS, f"{name_of(path)}:{call.lineno}: calls {called}()"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_runs_what_it_is_sent(path: Path) -> None:
    for line, module in imports_of(path):
        top = module.split(".")[0]
        assert top not in UNSAFE_MODULES, f"{name_of(path)}:{line}: imports {module}"
    for call in calls_of(path):
        place = f"{name_of(path)}:{call.lineno}"
        if isinstance(call.func, ast.Name):
            assert call.func.id not in UNSAFE_CALLS, f"{place}: calls {call.func.id}()"
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            called = (call.func.value.id, call.func.attr)
            assert called not in UNSAFE_ATTRIBUTES, f"{place}: calls {'.'.join(called)}()"
        for keyword in call.keywords:
            shell = keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            )
            assert not shell, f"{place}: passes shell="


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_files_and_functions_fit_the_head(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{name_of(path)} has {num_lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            place = f"{name_of(path)}:{node.lineno}"
            assert num_lines <= MAX_FUNCTION_LINES, f"{place}: {node.name} has {num_lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_owns(path: Path) -> None:
    tree = tree_of(path)
    if tree.body:
        assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_no_stubs_and_no_leftovers(path: Path) -> None:
    assert path.name not in ("utils.py", "util.py", "helpers.py", "common.py", "misc.py")
    names = {n.id for n in ast.walk(tree_of(path)) if isinstance(n, ast.Name)}
    assert "NotImplementedError" not in names, f"{name_of(path)} has a stub"


def test_no_path_of_one_machine() -> None:
    folders = ("src", "tests", "benchmarks", "docs", "examples", ".ci", ".github")
    files = [p for name in folders for p in sorted((ROOT / name).rglob("*")) if p.is_file()]
    files += [p for p in sorted(ROOT.iterdir()) if p.is_file() and p.name != ".git"]
    checked = 0
    for path in files:
        if path.suffix not in TEXT_SUFFIXES or path.stat().st_size > 1 << 20:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        checked += 1
        for number, line in enumerate(text.splitlines(), 1):
            assert not MACHINE_PATH.search(line), f"{name_of(path)}:{number}: {line.strip()}"
    assert checked > 50


def test_no_two_test_modules_share_a_name() -> None:
    """pytest could not import both; it can with `conftest.py`."""
    alone = [p for p in TESTS if not (p.parent / "__init__.py").exists()]
    alone = [p for p in alone if p.name != "conftest.py"]
    names = Counter(path.name for path in alone)
    assert [name for name, count in names.items() if count > 1] == []
