"""Leaves out the skipped tests of a suite, and writes how each test ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_tests.suites import read_suite

SUITE = "PEER_TESTS_SUITE"
RESULTS = "PEER_TESTS_RESULTS"
ALL = "PEER_TESTS_ALL"
"""Environment variable; if it is set, the skipped tests run, too."""

_endings: dict[str, dict[str, str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    suite = read_suite(os.environ[SUITE])
    for item in items:
        _endings[item.nodeid] = {"ending": "not run"}
        skip = suite.skip(item.nodeid)
        if skip is not None and not os.environ.get(ALL):
            item.add_marker(pytest.mark.skip(reason=skip.reason), append=False)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _endings[report.nodeid] = {"ending": "failed", "remark": _last_line(report.longreprtext)}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    known = _endings.setdefault(report.nodeid, {"ending": "not run"})
    if report.failed:
        known.update(ending="failed", remark=_last_line(report.longreprtext))
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.wasxfail
        known.update(ending="skipped", remark=reason.removeprefix("Skipped: "))
    elif report.when == "call" and known["ending"] == "not run":
        known.update(ending="passed")


def _last_line(text: str) -> str:
    """Returns the line of a failure that shows the wrong value."""
    lines = [line for line in text.splitlines() if line.startswith("E ")] or [text]
    return lines[0].removeprefix("E").strip()[:300]


def pytest_sessionfinish() -> None:
    found: dict[str, Any] = {"tests": _endings}
    Path(os.environ[RESULTS]).write_text(json.dumps(found))
