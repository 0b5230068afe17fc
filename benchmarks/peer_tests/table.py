"""The table of a run, and its results as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.peer_tests.running import FileResult
from benchmarks.peer_tests.suites import Suite


def table(suite: Suite, results: Sequence[FileResult], left_out: dict[str, str]) -> str:
    """`left_out`: whole files that were not run, with the reason."""
    lines = [f"{suite.title}", "", "file | run | passed | failed | skipped", "--- | --- | --- | ---"]
    for r in results:
        run = r.passed + len(r.failed)
        skipped = ", ".join(f"{n} {reason}" for reason, n in r.skipped.items())
        lines.append(f"{r.file} | {run} | {r.passed} | {len(r.failed)} | {skipped or '-'}")
    for reason, number in Counter(left_out.values()).most_common():
        lines.append(f"{number} files | not run | | | {reason}")
    for r in results:
        lines += [f"FAILED {test}: {remark}" for test, remark in r.failed.items()]
    return "\n".join(lines)


def figures(results: Sequence[FileResult], left_out: dict[str, str]) -> dict[str, Any]:
    files = [
        {"file": r.file, "passed": r.passed, "skipped": r.skipped, "failed": r.failed}
        for r in results
    ]
    return {"files": files, "left_out": left_out}
