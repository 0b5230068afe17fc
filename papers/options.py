"""Options of an experiment: the seed, the folders of traces, and the progress callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.trace.download import PUBLIC_TRACES

DOWNLOADS = {
    "conversation": "mooncake-conversation",
    "toolagent": "mooncake-toolagent",
    "synthetic": "mooncake-synthetic",
    "mooncake": "mooncake-arxiv",
    "azure-conv": "azure-conversation",
}
"""The papers' short names of traces, and those that `moonpool trace download` knows them by."""
TRACE_FILES = {short: PUBLIC_TRACES[name].file_name for short, name in DOWNLOADS.items()}
TRACE_REQUESTS = {
    "conversation": 12_031,
    "toolagent": 23_608,
    "synthetic": 3_993,
    "mooncake": 23_608,
    "azure-conv": 19_366,
}
"""Requests of each whole trace, as published."""
TRACE_FOLDER = "traces"


class ExperimentError(ValueError):
    """An experiment cannot be run; the text says what is missing and what to do."""


class MissingTraceError(ExperimentError):
    """A trace that the experiment needs is not here."""


def _silent(text: str) -> None:
    del text


@dataclass(frozen=True, slots=True)
class Options:
    """`trace`, if given, replaces any trace that an experiment asks for; otherwise traces are
    looked for in `folders`. `quick`: fewer requests, for a first impression. `progress` receives
    short texts about the present work. `parts` receives each workload of which only a part was run.
    Verdicts are then withheld."""

    seed: int = 0
    quick: bool = False
    trace: Path | None = None
    folders: tuple[Path, ...] = (Path(TRACE_FOLDER), Path())
    progress: Callable[[str], None] = field(default=_silent)
    parts: list[str] = field(default_factory=list)

    def check_whole(self, name: str, num_rows: int) -> None:
        """Notes in `parts` that these rows are not all of the public trace."""
        whole = TRACE_REQUESTS[name]
        if num_rows != whole:
            self.parts.append(f"{num_rows:,} requests stand for the {whole:,} of the {name} trace")

    def find_trace(self, name: str) -> Path:
        """Returns the file of the trace with this name. Raises MissingTraceError."""
        if self.trace is not None:
            if not self.trace.is_file():
                raise MissingTraceError(f"there is no file {self.trace}; check --trace")
            return self.trace
        for folder in self.folders:
            path = folder / TRACE_FILES[name]
            if path.is_file():
                return path
        raise MissingTraceError(
            f"the {name} trace is not here: get it by `moonpool trace download "
            f"{DOWNLOADS[name]} --to {TRACE_FOLDER}`, or name the file by --trace or its folder by "
            "MOONPOOL_TRACES"
        )
