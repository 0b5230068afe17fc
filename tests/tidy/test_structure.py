"""Tests the structure of the code base: which room may import which, and what no file may contain.

A room is a folder or module directly under one of the three packages, such as `conductor`,
`engine/transfer` or `lab/replay`, or one of `benchmarks`, `papers` and `website` beside them. Each
test collects all violations and reports them together.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.house import (
    ALLOWED,
    PACKAGES,
    borders,
    circles,
    core_files,
    modules,
    nodes_of,
    size_of,
    sources,
)

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 600
MAX_MODULES_PER_FOLDER = 30
MAX_FUNCTION_LINES = 70

# A room may import rooms of earlier lines only. `api` knows the head only by the protocol that
# `api` declares, so the head that implements it has a later line.
LEVELS = (
    {"types", "distributions"},
    {"config", "refusal", "request_record"},
    {
        "cores",
        "framing",
        "gc_tuning",
        "http_client",
        "installation",
        "log_limit",
        "pages",
        "retry_delays",
        "server_events",
    },
    {"children"},
    {"kvcache", "cost", "text"},
    {"protocol", "discovery"},
    {"scheduler.attention_pools"},
    {"scheduler", "conductor", "link"},
    {"host_pool.block_space"},
    {"host_pool.pool_group", "host_pool"},
    {"plugins"},
    {"vllm_connector"},
    {"rewind", "trace"},
    {"engine/transfer", "engine/engine"},
    {"engine/storage"},
    {"engine/attention_offload"},
    {"engine/worker"},
    {"engine/host_pool", "engine/vllm"},
    {"engine/sglang"},
    {
        "engine/attention_offload.worker_process",
        "engine/package",
        "engine/commands",
        "engine/checks",
    },
    {"api", "sim.hardware"},
    {"head", "sim"},
    {"vllm.block_names", "vllm.pooled_blocks"},
    {"vllm.known_cache", "vllm.slot_table"},
    {"vllm.actions"},
    {"vllm.instance"},
    {"vllm"},
    {"epp"},
    {"ray.replicas"},
    {"ray"},
    {"sim.report"},
    {"plan"},
    {"studies"},
    {"cli"},
    {"engine/cli"},
    {"lab/replay", "lab/oracle", "lab/plots", "lab/commands", "lab/solo"},
    {"lab/demo"},
    {"lab/trial", "lab/profiling"},
    {"lab/forecast"},
    {"lab/cli"},
    {"benchmarks", "papers"},
    {"website"},
    {"__main__"},
)
LEVEL_OF = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}

PURE_ROOMS = {
    "types",
    "distributions",
    "config",
    "refusal",
    "request_record",
    "retry_delays",
    "server_events",
    "kvcache",
    "cost",
    "protocol",
    "scheduler.attention_pools",
    "scheduler",
    "conductor",
    "host_pool.block_space",
    "host_pool.pool_group",
    "sim.hardware",
    "vllm.actions",
    "vllm.block_names",
    "vllm.pooled_blocks",
    "vllm.known_cache",
    "vllm.slot_table",
    "vllm.instance",
    "ray.replicas",
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
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {
    *(("yaml", each) for each in ("load", "load_all", "full_load", "unsafe_load", "Loader")),
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("yaml", "full_load"),
    ("yaml", "unsafe_load"),
    ("asyncio", "create_subprocess_shell"),
}
MACHINE_PATH = re.compile(r"(?<![\w.:*])/(?:work|opt|home|root|Users|mnt)/")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".cfg", ".txt", ".cpp", ".h", ".yml", ".yaml", ".json", ""}

SOURCES = [path for package in PACKAGES for path in sources(package)]
BESIDE_ROOMS = ("benchmarks", "papers", "website")
BESIDE = sorted(p for room in BESIDE_ROOMS for p in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ALL = [*SOURCES, *BESIDE, *TESTS]


MOST_PARTS = 8
"""The most parameters of a constructor, because a reader cannot keep more in mind. Classes of data,
without an `__init__` of their own, do not count."""
FEWER_PARTS = {"RequestLifecycle": 6, "AttemptPlanner": 5, "Simulation": 3}

MOST_PRIVATE_USES = 29
"""The number of private names of other objects that tests use. Such a use ties a test to an
implementation, so that the implementation can no longer change. Lower this number when there are
fewer uses. Never raise it: test the behaviour, or give the tested part a public name."""
# public methods and fields of each NamedTuple, in spite of their names
NOT_OURS = {"_replace", "_asdict", "_fields", "_make"}
NOT_OURS |= {"_repr_html_"}  # of notebooks
NOT_OURS |= {"_attn_implementation", "_experts_implementation"}  # of transformers

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"

STAND_ALONE = {folder / "__init__.py" for folder in PACKAGES.values()}
STAND_ALONE |= set((ROOT / "benchmarks").glob("*.py"))


@pytest.fixture(scope="module", autouse=True)
def trees_of_this_file_alone() -> Iterator[None]:
    """The trees of all files are millions of objects. Garbage collection ignores these objects,
    while they are made and later."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    _said.cache_clear()
    gc.enable()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    tree = nodes_of(path)[0]
    assert isinstance(tree, ast.Module)
    return tree


def room_of(module: str) -> str:
    """Returns the room of a module: for moonpool.a.b, `a.b` if that is a room, else `a`; for
    moonpool_lab.a, `lab/a`."""
    parts = module.split(".")
    part = ""
    if parts[0] in PACKAGES:
        part = parts[0].removeprefix("moonpool").removeprefix("_")
        parts = parts[1:]
    prefix = f"{part}/" if part else ""
    deep = prefix + ".".join(parts[:2])
    return deep if deep in LEVEL_OF else prefix + parts[0]


def own_room(path: Path) -> str:
    for folder in PACKAGES.values():
        if path.is_relative_to(folder):
            return room_of(".".join(path.relative_to(folder.parent).with_suffix("").parts))
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields line and full name of every module that the file imports, including imports within
    functions."""
    for node in nodes_of(path):
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
    beside = [path.relative_to(ROOT).with_suffix("") for path in BESIDE]
    return frozenset((*modules(), *(".".join(p.parts).removesuffix(".__init__") for p in beside)))


def calls_of(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes_of(path) if isinstance(node, ast.Call))


def report(violations: Iterable[str]) -> None:
    found = sorted(violations)
    assert not found, "\n".join(found)


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 30 and len(TESTS) > 10 and len(BESIDE) > 10


def test_rooms_stand_on_what_they_import() -> None:
    report(v for path in [*SOURCES, *BESIDE] for v in _import_violations(path))


def _import_violations(path: Path) -> Iterator[str]:
    if path in STAND_ALONE:
        return
    room = own_room(path)
    if room not in LEVEL_OF:
        yield f"{name_of(path)}: {room} is a new room: give it its place in LEVELS"
        return
    for line, module in imports_of(path):
        top = module.split(".")[0]
        if top not in (*PACKAGES, *BESIDE_ROOMS) or module in PACKAGES:
            continue
        other = room_of(module)
        if other != room and LEVEL_OF[other] >= LEVEL_OF[room]:
            yield f"{name_of(path)}:{line}: {room} may not import {other}"


def test_packages_know_each_other_one_way() -> None:
    """`moonpool` must use the engine and the lab by entry points alone."""
    wrong = {pair: count for pair, count in borders().items() if pair not in ALLOWED}
    assert wrong == {}


def test_no_modules_import_each_other() -> None:
    """The rule includes imports through other modules, within functions, and for types only."""
    report(", ".join(circle) for circle in circles())


def test_the_core_stays_small() -> None:
    size = size_of(core_files())
    assert size.lines <= 7_500 and size.files <= 30, size


def test_pure_rooms_are_pure() -> None:
    report(v for p in SOURCES if own_room(p) in PURE_ROOMS for v in _impurities(p))


def _impurities(path: Path) -> Iterator[str]:
    for line, module in imports_of(path):
        if module.split(".")[0] in IMPURE_MODULES or module == "numpy.random":
            yield f"{name_of(path)}:{line}: imports {module}"
    for node in nodes_of(path):
        place = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            yield f"{place}: async"
        if isinstance(node, ast.Global):
            yield f"{place}: global"
    for call in calls_of(path):
        called = call.func.id if isinstance(call.func, ast.Name) else ""
        if called in IMPURE_CALLS:
            yield f"{name_of(path)}:{call.lineno}: calls {called}()"


def test_no_source_executes_data() -> None:
    report(v for path in SOURCES for v in _unsafe_calls(path))


def _unsafe_calls(path: Path) -> Iterator[str]:
    for line, module in imports_of(path):
        if module.split(".")[0] in UNSAFE_MODULES:
            yield f"{name_of(path)}:{line}: imports {module}"
    for call in calls_of(path):
        place = f"{name_of(path)}:{call.lineno}"
        if isinstance(call.func, ast.Name) and call.func.id in UNSAFE_CALLS:
            yield f"{place}: calls {call.func.id}()"
        elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            called = (call.func.value.id, call.func.attr)
            if called in UNSAFE_ATTRIBUTES:
                yield f"{place}: calls {'.'.join(called)}()"
        for keyword in call.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "shell" and not is_false:
                yield f"{place}: passes shell="


def test_no_wait_swallows_its_cancellation() -> None:
    """No code may call `asyncio.wait_for`: in Python 3.11, it can lose a cancellation if its task
    ends in the same turn. `asyncio.timeout` cannot."""
    report(
        f"{name_of(path)}:{call.lineno}: calls wait_for(): use asyncio.timeout"
        for path in SOURCES
        for call in calls_of(path)
        if ast.unparse(call.func) == "asyncio.wait_for"
    )


def test_files_and_functions_stay_short() -> None:
    report(v for path in ALL for v in _too_long(path))


def _too_long(path: Path) -> Iterator[str]:
    num_lines = len(path.read_text().splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{name_of(path)} has {num_lines} lines"
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{name_of(path)}:{node.lineno}: {node.name} has {num_lines} lines"


def test_no_folder_is_flat_and_wide() -> None:
    modules = Counter(path.parent for path in [*SOURCES, *BESIDE])
    report(
        f"{name_of(folder)} has {count} modules, more than {MAX_MODULES_PER_FOLDER}"
        for folder, count in modules.items()
        if count > MAX_MODULES_PER_FOLDER
    )


def test_no_public_class_name_stands_in_two_files() -> None:
    places: dict[str, list[str]] = {}
    for path in [*SOURCES, *BESIDE]:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    report(f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1)


def test_every_module_has_a_docstring() -> None:
    report(
        name_of(path)
        for path in [*SOURCES, *BESIDE]
        if tree_of(path).body and not ast.get_docstring(tree_of(path))
    )


def test_no_stubs_and_no_leftovers() -> None:
    vague = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    report(f"{name_of(path)}: name it after its noun" for path in ALL if path.name in vague)
    report(
        f"{name_of(path)}:{node.lineno}: a stub"
        for path in ALL
        for node in nodes_of(path)
        if isinstance(node, ast.Name) and node.id == "NotImplementedError"
    )


def test_no_path_of_one_machine() -> None:
    folders = (
        "src",
        "engine",
        "lab",
        "tests",
        *BESIDE_ROOMS,
        "docs",
        "deploy",
        "examples",
        ".ci",
        ".github",
    )
    files = [p for name in folders for p in sorted((ROOT / name).rglob("*")) if p.is_file()]
    # leaves out files that installers write
    files = [p for p in files if p.parent.suffix != ".egg-info"]
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
    """pytest cannot import two test files of the same name, except `conftest.py`."""
    alone = [p for p in TESTS if not (p.parent / "__init__.py").exists()]
    alone = [p for p in alone if p.name != "conftest.py"]
    names = Counter(path.name for path in alone)
    assert [name for name, count in names.items() if count > 1] == []


def test_constructors_have_few_parts() -> None:
    report(
        f"{name_of(path)}:{line}: {name} has {number} parts: join those that belong together"
        for path in SOURCES
        for name, line, number in _constructors(nodes_of(path))
        if number > FEWER_PARTS.get(name, MOST_PARTS)
    )


def test_the_parts_are_counted() -> None:
    tree = ast.parse("class A:\n    def __init__(self, a, /, b, *, c=1): ...\n")
    assert list(_constructors(ast.walk(tree))) == [("A", 1, 3)]


def _constructors(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int, int]]:
    """Yields name, line and number of parts of each class with an `__init__` of its own."""
    for node in nodes:
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                given = each.args
                parts = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                yield node.name, node.lineno, len(parts) - 1


def test_uses_of_private_names_only_fall() -> None:
    uses = [f"{name_of(p)}:{use}" for p in TESTS for use in _private_uses(nodes_of(p))]
    listed = "\n".join(uses)
    assert len(uses) <= MOST_PRIVATE_USES, f"{MOST_PRIVATE_USES} are allowed:\n{listed}"
    assert len(uses) == MOST_PRIVATE_USES, f"there are fewer: set MOST_PRIVATE_USES to {len(uses)}"


def test_a_private_name_of_another_object_or_module_is_a_use() -> None:
    text = "from a import _b\nself._c\ncls._d\nx._e._f\nself.x._g\ny._replace(z=1)\nw.__dict__\n"
    found = sorted(use.rpartition(" ")[2] for use in _private_uses(ast.walk(ast.parse(text))))
    assert found == ["_b", "self.x._g", "x._e", "x._e._f"]


def _private_uses(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields line and expression of each use of a private name. An object may use its own private
    names."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            found = [name.name for name in node.names if _is_private(name.name)]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found = [] if own else [ast.unparse(node)]
        else:
            continue
        yield from (f"{node.lineno}: {name}" for name in found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NOT_OURS


def _explained() -> list[str]:
    """Returns the quoted messages of the second table of the page on errors, in which `...` stands
    for the parts that differ."""
    table = TROUBLESHOOTING.read_text().partition("## By the words of an error")[2]
    return re.findall(r"^\| `([^`]+)` \|", table, re.M)


def test_errors_are_explained() -> None:
    assert len(_explained()) > 10


@pytest.mark.parametrize("text", _explained())
def test_an_error_that_is_explained_is_said(text: str) -> None:
    pattern = ".{0,40}".join(re.escape(part) for part in text.split("..."))
    assert re.search(pattern, _said()), text


@cache
def _said() -> str:
    """Returns all strings of the sources, with `\\0` for each value within one."""
    parts = []
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.JoinedStr):
                each = (x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
                parts.append("".join(map(str, each)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(re.sub(r"%[-.0-9]*[a-z]", "\0", node.value))
    return "\n".join(parts)
