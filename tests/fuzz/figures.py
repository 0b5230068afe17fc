"""Keeps the counts of findings by reader in a file, to which each run adds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moonpool.cli.output import origin
from tests.fuzz.harness import Finding

KINDS = ("crashes", "hangs", "tracebacks", "errors_5xx", "growth", "other")


def kind_of(finding: Finding) -> str:
    """Returns the count to which a finding adds."""
    what = finding.what
    if what.startswith("the process ended"):
        return "crashes"
    if what.startswith("no end within") or what.endswith("s of CPU"):
        return "hangs"
    if "status 5" in what:
        return "errors_5xx"
    if "Traceback" in what:
        return "tracebacks"
    return "growth" if "MiB" in what else "other"


@dataclass
class Counts:
    """Holds the counts of one reader, over all runs."""

    inputs: int = 0
    crashes: int = 0
    hangs: int = 0
    tracebacks: int = 0
    errors_5xx: int = 0
    growth: int = 0
    other: int = 0
    seconds: float = 0.0

    @property
    def num_findings(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)

    def add(self, inputs: int, findings: Sequence[Finding]) -> None:
        self.inputs += inputs
        for finding in findings:
            kind = kind_of(finding)
            setattr(self, kind, getattr(self, kind) + 1)


class Figures:
    """Holds the counts of all readers."""

    def __init__(self, readers: dict[str, Counts]) -> None:
        self.readers = readers

    @classmethod
    def read(cls, path: Path | None) -> Figures:
        """Returns the counts in the file so far, or no counts if there is no file."""
        if path is None or not path.exists():
            return cls({})
        found = json.loads(path.read_text())["readers"]
        return cls({name: Counts(**counts) for name, counts in found.items()})

    def of(self, reader: str) -> Counts:
        return self.readers.setdefault(reader, Counts())

    def write(self, path: Path | None) -> None:
        if path is None:
            return
        readers = {name: asdict(counts) for name, counts in self.readers.items()}
        for counts in readers.values():
            counts["seconds"] = round(counts["seconds"], 1)
        total = sum(counts.inputs for counts in self.readers.values())
        made = origin() | {"command": "python -m tests.fuzz " + " ".join(sys.argv[1:])}
        found = {"readers": readers, "inputs": total, "origin": made}
        path.write_text(json.dumps(found, indent=1) + "\n")
