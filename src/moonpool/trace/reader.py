"""Opens a trace of any known format as a stream of rows in order of time.

A file is gone through twice. The scan checks every row, so that a run of an hour does not end at a
bad line, and finds what needs the whole file: its start, its ticks, whether it is sorted. The
second pass hands out the rows. Memory does not grow with a sorted file; of an unsorted one only an
index (time, byte offset) is held, 20 bytes a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

from moonpool.trace.jsonl import jsonl_parser
from moonpool.trace.lines import cut_off, error_at, numbered_lines, open_file, read_line
from moonpool.trace.parsed import LineError, Parsed, Parser
from moonpool.trace.row import TraceError, TraceInfo, TraceRow
from moonpool.trace.table import table_parser
from moonpool.trace.ticks import SAMPLE_ROWS, find_tick, spread

TraceFormat = Literal["auto", "mooncake", "bailian", "azure", "burstgpt", "vidur"]
_JSONL = ("mooncake", "bailian")
_HEAD_ROWS = 100  # how many rows may tell seconds from milliseconds


class Trace(Iterator[TraceRow]):
    """The rows of one file, once, in order of time; `info` is known before the first."""

    def __init__(self, info: TraceInfo, rows: Iterator[TraceRow]) -> None:
        self.info = info
        self._rows = rows

    def __iter__(self) -> Iterator[TraceRow]:
        return self._rows

    def __next__(self) -> TraceRow:
        return next(self._rows)


class _Index:
    """Where the rows of an unsorted file lie; three parallel columns in order of time."""

    def __init__(self, times: array[float], offsets: array[int], numbers: array[int]) -> None:
        import numpy as np  # only here: a sorted file does without

        order = np.argsort(np.frombuffer(times, dtype=np.float64), kind="stable")
        self.times = np.frombuffer(times, dtype=np.float64)[order]
        self.offsets = np.frombuffer(offsets, dtype=np.int64)[order]
        self.numbers = np.frombuffer(numbers, dtype=np.int64)[order]


class _Scan:
    """What one pass over all rows found."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.skipped_rows = 0
        self.first_time = 0.0
        self.last_time = 0.0
        self.index: _Index | None = None
        self.head_times = array("d")


def open_trace(
    path: str | Path,
    *,
    format: TraceFormat = "auto",
    spread_ticks: bool = True,
    limit: int | None = None,
    speed: float = 1.0,
) -> Trace:
    """Rows of the trace at `path`, `arrived_s` counted from its first row and divided by `speed`.

    Rows without a prompt or an answer are skipped and counted. Where times were rounded to ticks,
    rows are spread evenly over them, unless `spread_ticks` is False. Raises TraceError.
    """
    path = Path(path)
    if format not in get_args(TraceFormat):
        raise TraceError(
            f"there is no trace format {format!r}; use {', '.join(get_args(TraceFormat))}"
        )
    if not (isfinite(speed) and speed > 0):
        raise TraceError(f"speed {speed} is no positive number")
    if limit is not None and limit < 1:
        raise TraceError(f"limit {limit} leaves no rows; use 1 or more")
    parser = _parser_for(path, format)
    scan = _scan(path, parser, keep_index=False) or _scan(path, parser, keep_index=True)
    assert scan is not None
    if scan.num_rows == 0:
        skipped = f"; {scan.skipped_rows} rows have no prompt or no answer"
        raise TraceError(f"{path} has no requests{skipped if scan.skipped_rows else ''}")
    tick = find_tick(scan.head_times)
    info = TraceInfo(
        path=str(path),
        format=parser.format,
        block_tokens=parser.block_tokens,
        num_rows=scan.num_rows,
        skipped_rows=scan.skipped_rows,
        duration_s=(scan.last_time - scan.first_time) / parser.units_per_s,
        tick_s=tick / parser.units_per_s,
        is_sorted=scan.index is None,
        ignored=parser.ignored,
    )
    parsed = _parsed_rows(path, parser, scan.index)
    if spread_ticks and tick > 0:
        parsed = spread(parsed, tick)
    rows = _rows(parsed, scan.first_time, parser.units_per_s * speed)
    return Trace(info, rows if limit is None else islice(rows, limit))


def _parser_for(path: Path, format: TraceFormat) -> Parser:
    with open_file(path) as file:
        lines = numbered_lines(file, path)
        head = list(islice(lines, 1))
        if not head:
            raise TraceError(f"{path} is empty")
        number, _, first = head[0]
        is_json = first.lstrip()[:1] in (b"{", b"[")
        suffix = path.suffix.lower()
        named_json = suffix in (".jsonl", ".json", ".ndjson")
        wants_json = format in _JSONL or (format == "auto" and (is_json or named_json))
        if wants_json and not is_json:
            what = f"named {suffix}" if format == "auto" else f"said to be {format}"
            raise error_at(path, number, f"{what}, but this line is no JSON object")
        if is_json and (not wants_json or suffix == ".csv"):
            what = f"named {suffix}" if format == "auto" else f"said to be {format}"
            raise error_at(path, number, f"{what}, but this line is JSON, not csv; rename it")
        try:
            if not wants_json:
                return table_parser(first, format)
            return jsonl_parser(
                [first, *(line for _, _, line in islice(lines, _HEAD_ROWS))], format
            )
        except LineError as problem:
            raise error_at(path, number, f"{problem}{cut_off(first)}") from None


def _parse(parser: Parser, path: Path, number: int, line: bytes) -> Parsed | None:
    try:
        return parser.parse(line)
    except LineError as problem:
        raise error_at(path, number, f"{problem}{cut_off(line)}") from None


def _scan(path: Path, parser: Parser, keep_index: bool) -> _Scan | None:
    """None: the file is not sorted, and an index must be kept."""
    scan = _Scan()
    times, offsets, numbers = array("d"), array("q"), array("q")
    origin: float | None = None
    last = float("-inf")
    with open_file(path) as file:
        for number, offset, line in numbered_lines(file, path):
            if number <= parser.header_lines:
                continue
            row = _parse(parser, path, number, line)
            if row is None:
                scan.skipped_rows += 1
                continue
            scan.num_rows += 1
            if origin is None:
                origin = row.time
            if keep_index:
                times.append(row.time - origin)
                offsets.append(offset)
                numbers.append(number)
                continue
            if row.time < last:
                return None
            last = row.time
            if scan.num_rows <= SAMPLE_ROWS:
                scan.head_times.append(row.time - origin)
    scan.first_time, scan.last_time = origin or 0.0, last
    if keep_index and origin is not None:
        scan.index = _Index(times, offsets, numbers)
        # Dated times are integers, too long for a float.
        exact = int if isinstance(origin, int) else float
        scan.first_time = origin + exact(scan.index.times[0])
        scan.last_time = origin + exact(scan.index.times[-1])
        scan.head_times = array("d", scan.index.times[:SAMPLE_ROWS].tolist())
    return scan


def _parsed_rows(path: Path, parser: Parser, index: _Index | None) -> Iterator[Parsed]:
    with open_file(path) as file:
        if index is None:
            for number, _, line in numbered_lines(file, path):
                if number > parser.header_lines:
                    row = _parse(parser, path, number, line)
                    if row is not None:
                        yield row
            return
        for offset, number in zip(index.offsets, index.numbers, strict=True):
            file.seek(offset)
            row = _parse(parser, path, int(number), read_line(file, path, int(number)))
            if row is not None:
                yield row


def _rows(parsed: Iterator[Parsed], first_time: float, units_per_s: float) -> Iterator[TraceRow]:
    for time, input_tokens, output_tokens, hash_ids, session in parsed:
        yield TraceRow(
            (time - first_time) / units_per_s, input_tokens, output_tokens, hash_ids, session
        )
