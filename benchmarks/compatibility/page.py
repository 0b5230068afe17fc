"""Makes docs/compatibility.md from the runs in benchmarks/results/compatibility.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.clients.page import RESULTS as CLIENTS
from benchmarks.compatibility.counterparts import COUNTERPARTS
from benchmarks.markdown import code, table
from benchmarks.peer_tests.table import RESULTS as PEER_TESTS

RESULTS = ROOT / "benchmarks" / "results" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
HEAD = """# Compatibility

This page is generated: `python -m benchmarks.compatibility NAME=WHERE ...` runs the tests against
the installations that it is given, and writes this page and
[compatibility.json](../benchmarks/results/compatibility.json). A version that is not here was not
tried, which does not mean that it fails. But the connector inside vLLM refuses a vLLM that it does
not know ([The pool inside vLLM](pool-in-vllm.md#what-makes-a-block-the-same)).

"""
HEADER = ("with", "version", "what runs", "passed", "failed", "skipped", "at")
CLIENTS_HEAD = """
## Clients and SDKs

Each was installed and run unmodified ([Clients](clients.md)). "Calls" are kinds of calls, such as
chat, streams and tools.

"""
PEERS_HEAD = """
## Server tests of other projects

Unchanged, against `moonpool serve` ([Clients](clients.md#server-tests-of-other-projects)).

"""
TAIL = """
## Run it

```sh
python -m benchmarks.compatibility \\
  vllm=/venvs/vllm/bin/python llama-server=/usr/local/bin/llama-server \\
  envoy=/venvs/envoy/bin/python kubernetes=/venvs/chart/bin/python ray=/venvs/ray/bin/python \\
  python torch --model /models/small
```

A name without a place takes the Python of the command. `--model` names a folder that vLLM can
serve. Results of a version take the place of its earlier ones. `--page` writes the page again, and
runs nothing.
"""


def page(found: dict[str, Any], clients: dict[str, Any], peers: dict[str, Any]) -> str:
    """The page that the results give."""
    order = [each.name for each in COUNTERPARTS]
    runs = sorted(found["runs"], key=lambda run: order.index(run["counterpart"]))
    notes: list[str] = []
    rows = [row for run in runs for row in _rows(run, notes)]
    text = HEAD + table(HEADER, rows)
    if notes:
        text += "\n" + "".join(f"- {note}\n" for note in notes)
    header = ("client", "version", "calls that work")
    text += CLIENTS_HEAD + table(header, map(_client_row, clients["clients"]))
    of_suites = ("tests of", "passed", "failed", "skipped, with a reason")
    return text + PEERS_HEAD + table(of_suites, map(_suite_row, peers["suites"])) + TAIL


def _rows(run: dict[str, Any], notes: list[str]) -> Iterator[list[str]]:
    title = next(each.title for each in COUNTERPARTS if each.name == run["counterpart"])
    version, *others = (f"{name} {found}" for name, found in run["versions"].items())
    if run["remark"]:
        notes.append(f"{version}: {run['remark']}.")
    about = f"{version} ({', '.join(others)})" if others else version
    for part, ended in run["parts"].items():
        skipped = sum(ended["skipped"].values())
        counts = [str(ended["passed"]), str(len(ended["failed"])), str(skipped)]
        yield [title, about, part, *counts, f"{ended['commit']}, {ended['machine']}"]
        for test, why in ended["failed"].items():
            notes.append(f"{version}: fails `{test}`: {code(why)}.")
        for why, number in ended["skipped"].items():
            notes.append(f"{version}, {part}: {number} skipped: {code(why)}.")


def _client_row(client: dict[str, Any]) -> tuple[str, ...]:
    works = sum(each["works"] for each in client["tries"])
    version = client["version"] or "the system's"
    return client["name"], version, f"{works} of {len(client['tries'])}"


def _suite_row(suite: dict[str, Any]) -> tuple[object, ...]:
    files = suite["files"]
    passed = sum(file["passed"] for file in files)
    failed = sum(len(file["failed"]) for file in files)
    skipped = sum(sum(file["skipped"].values()) for file in files)
    return suite["title"], passed, failed, skipped


def current() -> str:
    """The page that the committed results give."""
    return page(*(json.loads(path.read_text()) for path in (RESULTS, CLIENTS, PEER_TESTS)))
