"""Tests the rows that the page of versions has for runs, and which rows a new run replaces."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkout import ROOT
from benchmarks.compatibility.__main__ import merged
from benchmarks.compatibility.counterparts import BY_NAME, COUNTERPARTS, Counterpart, Part
from benchmarks.compatibility.page import page
from benchmarks.compatibility.running import PlaceError, endings, run_part, versions_of

REPORT = """<testsuites><testsuite>
<testcase classname="tests.live.a" name="one"/>
<testcase classname="tests.live.a" name="two"><failure message="assert 1 == 2"/></testcase>
<testcase classname="tests.live.a" name="three"><skipped message="needs a vLLM"/></testcase>
<testcase classname="tests.live.a" name="four"><error message="in /tmp/x/y"/></testcase>
</testsuite></testsuites>"""
OURS = Counterpart("python", "Python", "environment", (), ())


def run(version: str, **parts: dict[str, Any]) -> dict[str, Any]:
    about = {"counterpart": "vllm", "versions": {"vllm": version, "torch": "2"}, "remark": ""}
    return about | {"parts": parts}


def ended(passed: int = 1, **failed: str) -> dict[str, Any]:
    counts = {"passed": passed, "failed": failed, "skipped": {}}
    return counts | {"commit": "abc", "machine": "m"}


def test_endings_are_those_of_the_report() -> None:
    assert endings(REPORT) == {
        "passed": 1,
        "failed": {"tests.live.a::two": "assert 1 == 2", "tests.live.a::four": "in (a path)"},
        "skipped": {"needs a vLLM": 1},
    }


def test_a_part_replaces_that_of_the_same_version_alone() -> None:
    known = [run("0.32", pool=ended(1), front=ended(2)), run("0.31", pool=ended(3))]
    new, old = sorted(merged(known, run("0.32", pool=ended(9))), key=lambda r: -len(r["parts"]))
    assert (new["parts"]["pool"]["passed"], new["parts"]["front"]["passed"]) == (9, 2)
    assert old["parts"]["pool"]["passed"] == 3


def test_the_page_names_failures_and_versions() -> None:
    found = {"runs": [run("0.32", pool=ended(7, **{"a::b": "it | broke"}))]}
    text = page(found, {"clients": []}, {"suites": []})
    assert "| vLLM | vllm 0.32 (torch 2) | pool | 7 | 1 | 0 | abc, m |" in text
    assert "vllm 0.32: fails `a::b`: `it / broke`." in text


def test_tests_are_run_and_counted() -> None:
    part = Part("", ("tests/unit/test_log_limit.py",))
    found = run_part(OURS, part, sys.executable, {})
    assert found["passed"] > 0
    assert not found["failed"]


def test_no_report_is_a_failure() -> None:
    found = run_part(OURS, Part("", ("tests/there/is/none",)), sys.executable, {})
    assert found["failed"]


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    silent = tmp_path / "program"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o700)
    for name, place in (
        ("vllm", tmp_path / "python"),
        ("ray", silent),
        ("ray", "/bin/false"),
        ("llama-server", silent),
        ("llama-server", tmp_path / "none"),
    ):
        with pytest.raises(PlaceError):
            versions_of(BY_NAME[name], str(place))


def test_files_of_all_parts_exist() -> None:
    files = [file for each in COUNTERPARTS for part in each.parts for file in part.tests]
    assert all((ROOT / file).exists() for file in files)
