"""Tests that every line of SECURITY.md's threat model names a test that exists, that its tables
equal the source's, and that reliability.md is up to date."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.reliability_page import PAGE, RESULTS, current
from moonpool.api.access.route_rules import RULES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
TABLE = TEXT[TEXT.index("## Threats and their tests") :].split("\n## ")[0]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ")][2:]


def test_there_are_threats() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS)
def test_a_threat_names_a_test_that_exists(row: str) -> None:
    named = re.search(r"\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", row)
    assert named is not None, row
    tree = ast.parse((ROOT / named[1]).read_text())
    functions = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert named[2] in functions, row


def test_the_page_of_faults_is_what_the_results_give() -> None:
    assert RESULTS.exists()
    assert PAGE.read_text() == current(), "run `moonpool bench faults`"


def table(heading: str) -> list[list[str]]:
    """Returns the cells of the rows below a heading of SECURITY.md."""
    text = TEXT[TEXT.index(f"\n## {heading}\n") + 1 :].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_the_page_says_of_each_route_who_may_call_it() -> None:
    expected = [[f"`{rule.path.replace(':path}', '}')}`", *rule.words] for rule in RULES.values()]
    assert table("Who may call what") == expected


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}


@pytest.mark.parametrize("row", table("What clients share"), ids=lambda row: row[0])
def test_the_page_says_how_much_clients_may_fill(row: list[str]) -> None:
    named = re.fullmatch(r"`(?:engine/)?src/([\w/]+)\.py::(\w+)`", row[3])
    assert named is not None, row
    bound = getattr(import_module(named[1].replace("/", ".")), named[2])
    told = re.match(r"(\d+)(?: (KiB|MiB))?\b", row[1])
    if told is None:
        assert row[1] == "as many as connections"
    else:
        assert bound == int(told[1]) * UNITS.get(told[2], 1)
