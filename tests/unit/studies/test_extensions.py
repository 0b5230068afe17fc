"""Tests policies and trace formats that an installed package names, or that a module has."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.forked.commands import run_command

POLICIES = """
import json
from moonpool import LineError, TraceRow

class First:
    def __call__(self, context):
        return int(context.possible.nonzero()[0][0])

class Nobody:
    def __call__(self, context):
        return "nobody is served today"

class Lines:
    header_lines = 1
    units_per_s = 10
    def parse(self, line):
        time, prompt, answer = line.split(b";")
        if answer.strip() == b"-":
            return None
        if prompt == b"?":
            raise LineError("the prompt is unknown; log it")
        return int(time), int(prompt), int(answer)

class Rows:
    header_lines = 1
    units_per_s = 1000
    block_tokens = 512
    def parse(self, line):
        time, prompt, answer = line.split(b";")
        ids = tuple(range(-(-int(prompt) // 512)))
        return None if answer.strip() == b"-" else TraceRow(
            int(time) / 10, int(prompt), int(answer), ids, session="s", tenant="t", priority=1
        )

def huge(line):
    return TraceRow("noon", 1, 1)

def broken(line):
    return line.index(b"#")

def short(line):
    return (1.0, 2)

def negative(line):
    return (1.0, -2, 3)
"""
ENTRY_POINTS = """
[moonpool.placement]
always-first = own_things:First
[moonpool.admission]
nobody = own_things:Nobody
[moonpool.eviction]
again-lru = moonpool.kvcache.eviction.policies:LruEviction
[moonpool.trace_format]
semicolons = own_things:Lines
rows = own_things:Rows
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder like site-packages, with a package that names its classes as entry points."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "own_things.py").write_text(POLICIES)
    info = folder / "own_things-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-things\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "log.csv").write_text("time;prompt;answer\n20;900;5\n10;800;6\n30;700;-\n")
    return folder


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, timeout_s=120, folder=installed)


def simulate(installed: Path, *flags: str, trace_format: str = "semicolons") -> dict[str, object]:
    line = ("--trace", "log.csv", "--trace-format", trace_format, "--json", "figures.json")
    done = run(installed, "simulate", *line, *flags)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads((installed / "figures.json").read_text())
    return found


def test_installed_names_are_like_built_in_ones(installed: Path) -> None:
    found = simulate(installed, "--placement", "always-first")
    assert found["requests"] == 2 and found["completed"] == 2
    assert found["run"]["trace_format"] == "semicolons"  # type: ignore[index]
    assert found["config"]["conductor"]["placement"] == "own_things:First"  # type: ignore[index]
    refused = simulate(installed, "--admission", "nobody")
    assert refused["rejected"] == 2


def test_installed_names_work_in_files(installed: Path) -> None:
    (installed / "cluster.toml").write_text('[conductor]\nadmission = "nobody"\n')
    assert simulate(installed, "--config", "cluster.toml")["rejected"] == 2


def test_a_format_may_return_rows_in_seconds(installed: Path) -> None:
    run(installed, "trace", "info", "log.csv", "--format", "rows", "--json", "rows.json")
    run(installed, "trace", "info", "log.csv", "--format", "semicolons", "--json", "tuples.json")
    rows, tuples = (json.loads((installed / f"{n}.json").read_text()) for n in ("rows", "tuples"))
    assert rows["requests"] == 2 and rows["duration_s"] == tuples["duration_s"] == 1.0
    assert simulate(installed, trace_format="rows")["trace_has_hashes"]


def test_a_format_may_stand_in_a_module(installed: Path) -> None:
    found = simulate(installed, trace_format="own_things:Lines")
    assert found["requests"] == 2
    done = run(installed, "trace", "info", "log.csv", "--format", "semicolons")
    assert done.returncode == 0 and "own_things:Lines" in done.stdout


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--placement", "always-frist"), "'kvcache-centric', 'always-first', nor MODULE:CLASS"),
        (("--trace-format", "colons"), "vidur, log, vllm, semicolons, rows, or MODULE:NAME"),
        (("--trace-format", "own_things:broken"), "log.csv:1: own_things:broken fails with Value"),
        (("--trace-format", "own_things:short"), "log.csv:1: own_things:short returned tuple"),
        (("--trace-format", "own_things:huge"), "returned the time 'noon', which is no number"),
        (("--trace-format", "own_things:negative"), "returned -2 tokens of prompt: give"),
        (("--trace-format", "own_things:none"), "own_things.py defines no 'none'"),
    ],
)
def test_a_mistake_is_one_line(installed: Path, flags: tuple[str, str], text: str) -> None:
    done = run(installed, "simulate", "--trace", "log.csv", *flags)
    assert done.returncode != 0
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_line_that_the_parser_refuses_is_named(installed: Path) -> None:
    (installed / "unknown.csv").write_text("time;prompt;answer\n1;5;5\n2;?;5\n")
    flags = ("--trace", "unknown.csv", "--trace-format", "semicolons")
    done = run(installed, "simulate", *flags)
    assert "unknown.csv:3: the prompt is unknown; log it" in done.stderr
