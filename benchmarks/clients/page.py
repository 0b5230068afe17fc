"""Makes docs/clients.md from benchmarks/results/clients.json."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.markdown import code, table
from benchmarks.peer_tests.table import section

RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
PAGE = ROOT / "docs" / "clients.md"
COLUMNS = ("chat", "stream", "tools", "structured output", "embeddings", "logprobs")
HEAD = """# Clients

This page is generated: `python -m benchmarks.clients` installs each client in an environment of its
own, runs it unmodified against `moonpool serve`, and writes this page and
[clients.json](../benchmarks/results/clients.json). The versions are pinned in
[clients.toml](../benchmarks/clients/clients.toml). What each of them is asked stands in
[scripts](../benchmarks/clients/scripts/probe.py).

**Set up** a client with the base URL `http://HOST:PORT/v1` (Anthropic's: `http://HOST:PORT`), any
key unless the server has keys, and a model's name from `/v1/models`.

In the table, "yes" means that the call succeeded and its answer had the expected form. A dash means
that the client has no such call, or that it was not tried. The model is small: the table says what
the API does, not how good answers are.

"""


def page(found: dict[str, Any]) -> str:
    """The page that a result gives."""
    header = ("client", "version", *COLUMNS, "also")
    notes: list[str] = []
    parts = [HEAD, table(header, [_cells(row, notes) for row in found["clients"]])]
    if notes:
        parts += ["\n## Notes\n\n", "\n".join(f"- {note}" for note in notes), "\n"]
    origin = found["origin"]
    parts.append(
        f"\nThe server ran `moonpool serve {' '.join(found['flags'])}` at {origin['commit']}.\n"
    )
    return "".join([*parts, section()])


def _cells(row: dict[str, Any], notes: list[str]) -> list[str]:
    name, version = row["name"], row["version"] or "the system's"
    if row["install_error"]:
        notes.append(f"{name}: not installed: {code(row['install_error'].rstrip('.'))}.")
        return [name, version, *(["not installed"] + ["-"] * len(COLUMNS))]
    tries = {each["feature"]: each for each in row["tries"]}
    for feature, each in tries.items():
        if each["remark"]:
            failed = "works" if each["works"] else "fails"
            notes.append(f"{name}, {feature}: {failed}; {code(each['remark'].rstrip('.'))}.")
    others = [_verdict(tries[f], f) for f in tries if f not in COLUMNS]
    verdicts = (_verdict(tries[f]) if f in tries else "-" for f in COLUMNS)
    return [name, version, *verdicts, ", ".join(others) or "-"]


def _verdict(each: dict[str, Any], name: str = "") -> str:
    if name:
        return name if each["works"] else f"**not** {name}"
    return "yes" if each["works"] else "**no**"


def current() -> str:
    """The page that the committed results give."""
    return page(json.loads(RESULTS.read_text()))
