"""Writes docs/wrong-answers.md from benchmarks/results/wrong-answers/*.json, one file for each row.

`python -m benchmarks.wrong_answers_page` writes the page. `--add FILE --system NAME --version V`
first makes a row of what `moonpool trial --json FILE` found. A row holds `system`, `version`,
`origin` (command, version, commit, machine), and the figures of one server of a trial: `model`,
`quiet`, `load`, `proven`. Further keys are kept and not shown.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.markdown import table

ROWS = ROOT / "benchmarks" / "results" / "wrong-answers"
PAGE = ROOT / "docs" / "wrong-answers.md"
NEEDED = ("system", "version", "origin", "model", "quiet", "load", "proven")
HEAD = """# Wrong answers

This page is generated: `python -m benchmarks.wrong_answers_page` writes it from [one file for each
row](../benchmarks/results/wrong-answers). Each row is one server, asked by `moonpool trial`
([reliability.md](reliability.md)): conversations with planted codes and shared, forked prefixes,
first one by one, then under load with evictions, cache resets and clients that leave. Each greedy
answer is compared with what the same server answered in quiet.

- **Wrong** answers differ at a token that was not a near-tie. **Near-ties** are differences that
  rounding explains: two tokens within half a nat. **Unclear** ones gave no logprobs to tell.
- **Foreign** answers contain a code that was planted in another conversation.
- **Lost** are planted codes that the answer in quiet names, and the one under load does not.
- **Not whole** are answers that were cut off, failed or hung. Refusals with a status are not
  counted.
- **Proven** says what chance does not explain (P < 0.01).

"""
HEADER = (
    *("system", "version", "model", "answers compared", "wrong", "near-ties", "unclear"),
    *("foreign", "lost", "not whole", "proven", "measured by"),
)
NOT_WHOLE = ("cut", "hung", "error")


def page(rows: list[dict[str, Any]]) -> str:
    asked: dict[str, list[str]] = {}
    for row in rows:
        command = f"`{row['origin']['command']}`, on {row['origin']['machine']}"
        asked.setdefault(command, []).append(row["system"])
    commands = [f"- {'; '.join(systems)}: {command}" for command, systems in asked.items()]
    text = HEAD + table(HEADER, map(_cells, rows))
    return text + "\n## Commands\n\n" + "\n".join(commands) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    phases = row["quiet"], row["load"]

    def kind(*names: str) -> str:
        return f"{sum(phase['kinds'].get(name, 0) for phase in phases for name in names):,}"

    lost, facts = row["load"]["facts_lost"], row["load"]["facts"]
    failed = sum(phase["failed"].get(name, 0) for phase in phases for name in NOT_WHOLE)
    origin = row["origin"]
    return (
        row["system"],
        row["version"],
        row["model"],
        f"{sum(phase['answered'] for phase in phases):,}",
        kind("wrong", "missing", "doubled"),
        kind("near_tie"),
        kind("unclear"),
        f"{sum(phase['foreign'] for phase in phases):,}",
        f"{lost:,} of {facts:,}" if facts else "-",
        f"{failed:,}",
        "; ".join(row["proven"]) or "nothing",
        f"moonpool {origin['version']}, {origin['commit']}",
    )


def rows_of(found: dict[str, Any], system: str, version: str) -> list[dict[str, Any]]:
    """The rows of what `moonpool trial --json` wrote: one for each server that was asked."""
    servers = found["servers"]
    figures = list(servers.values()) if isinstance(servers, dict) else servers
    kept = ("model", "quiet", "load", "proven", "disturbances", "references", "seconds")
    return [
        {"system": system, "version": version, "origin": found["origin"]}
        | {name: one[name] for name in kept if name in one}
        for one in figures
    ]


def read_rows(folder: Path = ROWS) -> list[dict[str, Any]]:
    """All rows, in order of the names of their files. Raises ValueError, which names the file."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text())
        lacking = [name for name in NEEDED if name not in row]
        if lacking:
            raise ValueError(f"{path} has no {', '.join(lacking)}: see {__name__}")
        rows.append(row)
    return rows


def add(path: Path, system: str, version: str, folder: Path = ROWS) -> list[Path]:
    """Writes the rows of a trial's file; a system's former row of that version and model is
    replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for row in rows_of(json.loads(path.read_text()), system, version):
        name = re.sub(r"[^a-z0-9.]+", "-", f"{system} {version} {row['model']}".lower()).strip("-")
        written.append(folder / f"{name}.json")
        written[-1].write_text(json.dumps(row, indent=1) + "\n")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--add", type=Path, help="a file of `moonpool trial --json`")
    parser.add_argument("--system", help="the server that was asked, such as vLLM with LMCache")
    parser.add_argument("--version", help="its version")
    given = parser.parse_args()
    if given.add is not None:
        if not given.system or not given.version:
            parser.error("--add needs --system and --version")
        add(given.add, given.system, given.version)
    PAGE.write_text(page(read_rows()))


if __name__ == "__main__":
    main()
