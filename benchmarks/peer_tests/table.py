"""The tables of a run: on the terminal, and in docs/clients.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import markdown
from benchmarks.checkout import ROOT
from benchmarks.peer_tests.running import FileResult
from benchmarks.peer_tests.suites import OWN, Suite

COUNTS = ("run", "passed", "failed", "skipped")
RESULTS = ROOT / "benchmarks" / "results" / "peer-tests.json"
HEAD = """
## Server tests of other projects

`make peer-tests` fetches the server tests of vLLM and llama.cpp from the sdists that hold them, and
runs the files unchanged against `moonpool serve`: a real process, a real socket. It needs a
network, and is not part of `make test`. What is left out, and why, stands in
[vllm.toml](../benchmarks/peer_tests/vllm.toml) and
[llama_cpp.toml](../benchmarks/peer_tests/llama_cpp.toml). The model is small and has random
weights. The last run, [peer-tests.json](../benchmarks/results/peer-tests.json):
"""


def figures(
    suite: Suite, results: Sequence[FileResult], left_out: dict[str, str]
) -> dict[str, Any]:
    """Returns the figures of a run. `left_out`: whole files that were not run, each with the
    reason."""
    files = [
        {"file": r.file, "passed": r.passed, "skipped": r.skipped, "failed": r.failed}
        for r in results
    ]
    return {"title": suite.title, "files": files, "left_out": left_out}


def merged(known: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the known suites with the rows of the files that were run now in place of their
    earlier rows."""
    suites = {suite["title"]: suite for suite in known}
    for new in found:
        old = suites.get(new["title"], {"files": [], "left_out": {}})
        files = {f["file"]: f for f in [*old["files"], *new["files"]]}
        left_out = {f: r for f, r in old["left_out"].items() if f not in files} | new["left_out"]
        kept = [files[name] for name in sorted(files) if name not in left_out]
        suites[new["title"]] = new | {"files": kept, "left_out": dict(sorted(left_out.items()))}
    return list(suites.values())


def table(found: dict[str, Any]) -> str:
    """Returns one row for each file that was run, in Markdown, and why the other files were not
    run."""
    numbers = {file["file"].removesuffix(".py"): _numbers(file) for file in found["files"]}
    totals = Counter[str]()
    for each in numbers.values():
        totals.update(each)
    numbers[f"all {len(found['files'])} files"] = totals
    rows = [(name, *(each[key] for key in COUNTS)) for name, each in numbers.items()]
    text = markdown.table(("file", *COUNTS), rows)
    tests = Counter[str]()
    for file in found["files"]:
        for reason, number in file["skipped"].items():
            tests[OWN if reason.startswith(OWN) else reason] += number
    files = Counter(found["left_out"].values())
    if tests or files:
        reasons = sorted({*tests, *files}, key=lambda r: (-tests[r], -files[r], r))
        header = ("not run because", "tests of these files", "other files")
        text += "\n" + markdown.table(header, ((r, tests[r], files[r]) for r in reasons))
    return text.rstrip()


def _numbers(file: dict[str, Any]) -> Counter[str]:
    failed, skipped = len(file["failed"]), sum(file["skipped"].values())
    run = file["passed"] + failed
    counts = (run, file["passed"], failed, skipped)
    return Counter(dict(zip(COUNTS, counts, strict=True)))


def section() -> str:
    """The section of docs/clients.md that the committed results give."""
    found = json.loads(RESULTS.read_text())
    parts = [HEAD]
    for suite in found["suites"]:
        parts.append(f"\n**{suite['title']}.**\n\n{table(suite)}\n")
    return "".join(parts)
