"""Holds a trace in memory, read from a file or made by the caller."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

from moonpool.studies.result_table import ResultTable
from moonpool.trace.reader import Trace, open_trace
from moonpool.trace.row import TraceError, TraceInfo, TraceRow
from moonpool.trace.transform import parse_share, scale_trace


class TraceRows:
    """Requests in order of arrival. `block_tokens` is the size of the blocks that `hash_ids` name,
    or 0 if no request has `hash_ids`."""

    def __init__(
        self, rows: Iterable[TraceRow], block_tokens: int = 0, name: str = "trace"
    ) -> None:
        """Checks the rows. Raises TraceError."""
        self.rows = tuple(rows)
        self.block_tokens = block_tokens
        self.name = name
        if not self.rows:
            raise TraceError(f"{name} has no requests")
        if strange := next((row for row in self.rows if not isinstance(row, TraceRow)), None):
            raise TraceError(f"{name} has {strange!r:.60}, which is no moonpool.TraceRow")
        times = [row.arrived_s for row in self.rows]
        if sorted(times) != times:
            raise TraceError(f"{name} is not in order of arrival: sort its rows by arrived_s")
        if not block_tokens and any(row.hash_ids for row in self.rows):
            raise TraceError(f"{name} has hash_ids: give the block_tokens of their blocks, too")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TraceRow]:
        return iter(self.rows)

    def __repr__(self) -> str:
        duration_s = self.rows[-1].arrived_s
        return f"<TraceRows of {self.name}: {len(self):,} requests in {duration_s:,.0f} s>"

    @property
    def table(self) -> ResultTable:
        """A table with the columns arrived_s, input_tokens, output_tokens, blocks and session."""
        names = ("arrived_s", "input_tokens", "output_tokens", "blocks", "session")
        return ResultTable.from_rows(
            names,
            [
                (r.arrived_s, r.input_tokens, r.output_tokens, len(r.hash_ids), r.session)
                for r in self.rows
            ],
        )

    def faster(self, speed: float, limit: int | None) -> Trace:
        """Returns the first `limit` requests, which arrive `speed` times as fast. Raises
        TraceError."""
        if limit is not None and limit < 1:
            raise TraceError(f"a limit of {limit} requests leaves none; use 1 or more")
        chosen = self.rows[:limit]
        info = TraceInfo(
            path=self.name,
            format="rows",
            block_tokens=self.block_tokens,
            num_rows=len(chosen),
            skipped_rows=0,
            duration_s=chosen[-1].arrived_s,
            tick_s=0.0,
            is_sorted=True,
        )
        return Trace(info, (row.faster(speed) for row in chosen))


def as_trace(trace: str | Path | TraceRows | Iterable[TraceRow]) -> str | Path | TraceRows:
    """Returns a file's name or `TraceRows`; makes `TraceRows` of plain requests. Raises
    TraceError."""
    return trace if isinstance(trace, str | Path | TraceRows) else TraceRows(trace)


def read_trace(
    path: str | Path,
    *,
    requests: int | None = None,
    speed: float = 1.0,
    scale_tokens: str | float | Fraction = 1,
    trace_format: str = "auto",
) -> TraceRows:
    """Reads a trace of any known format, or of the caller's own format.

    `requests` keeps only the first requests, `speed` shortens the time between requests, and
    `scale_tokens` keeps a share of their tokens. Raises TraceError.
    """
    trace = open_scaled(path, requests, speed, as_share(scale_tokens), trace_format)
    return TraceRows(trace, trace.info.block_tokens, Path(path).name)


def open_scaled(
    trace: str | Path | TraceRows,
    requests: int | None,
    speed: float,
    share: Fraction,
    trace_format: str = "auto",
) -> Trace:
    """Opens the requests of a file or of rows in memory as a stream. Raises TraceError."""
    if isinstance(trace, TraceRows):
        return scale_trace(trace.faster(speed, requests), share)
    found = open_trace(trace, format=trace_format, limit=requests, speed=speed)
    return scale_trace(found, share)


def as_share(share: str | float | Fraction) -> Fraction:
    """Reads a share such as "1/16". Raises TraceError."""
    try:
        return parse_share(str(share))
    except ValueError as error:
        raise TraceError(str(error)) from None


def named_trace(trace: str | Path | TraceRows) -> dict[str, str]:
    """Returns a trace's name and digest, for the figures of a run."""
    if isinstance(trace, TraceRows):
        return {"trace": trace.name, "trace_sha256": ""}
    return {"trace": Path(trace).name, "trace_sha256": trace_digest(trace)}


def trace_digest(trace_file: str | Path) -> str:
    """Returns a digest of the file's bytes, or "" if there is no such file."""
    path = Path(trace_file)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
