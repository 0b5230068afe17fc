"""Every line of SECURITY.md's threat model names a test that exists; reliability.md is current."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks.reliability_page import PAGE, RESULTS, current

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
