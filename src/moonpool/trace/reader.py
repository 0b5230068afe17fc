"""Opens a trace of any known format as a stream of rows in order of time.

The reader passes over a file twice. The first pass checks every row, so that a long run does not
fail at a bad line, and determines facts about the whole file: its start, its unit of time, and
whether it is sorted. The second pass yields the rows. A sorted file needs constant memory. For an
unsorted file, an index (time, byte offset, line number) takes 24 bytes per row. If rows of agents
wait for later lines, a third pass finds an order first (`CallGraph`).

Ticks: some publishers round times. Mooncake's conversation trace is rounded to 3 s; replayed as it
is, it would measure bursts of ten. Rows of one tick are therefore spread evenly over it.
"""

from __future__ import annotations

import hashlib
import stat
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import BinaryIO, Literal, cast, get_args

from moonpool.config.tables import is_own_policy
from moonpool.plugins.objects import installed_names, own_name
from moonpool.trace.agent_graphs import GraphParser
from moonpool.trace.agent_rows import AgentParser
from moonpool.trace.gathered.rows import GatheredRows, Gatherer
from moonpool.trace.json_log import JsonLogParser
from moonpool.trace.jsonl import jsonl_parser
from moonpool.trace.own_format import KEY as OWN_FORMAT
from moonpool.trace.own_format import OwnParser
from moonpool.trace.programs import CallGraph, CallOrder, RowError
from moonpool.trace.row import (
    OTHER_LINE,
    LaterCallError,
    LineError,
    ParsedRow,
    Parser,
    ProgramParser,
    TraceError,
    TraceInfo,
    TraceRow,
)
from moonpool.trace.table import table_parser
from moonpool.trace.vllm_log import VllmLogParser, is_vllm_log

TraceFormat = Literal["auto", "mooncake", "bailian", "azure", "burstgpt", "vidur", "log", "vllm"]
LOG_PARSERS = (JsonLogParser, VllmLogParser)
NAMING_PARSERS = (AgentParser, GraphParser, OwnParser)
"""In these formats, rows may name later rows."""
_JSONL = ("mooncake", "bailian")
_HEAD_ROWS = 100  # number of rows from which the unit is inferred, seconds or milliseconds
_HEAD_BYTES = 32 << 20  # if rows are long, fewer of them decide

MAX_LINE_BYTES = 8 << 20
"""Longer than any row: a million block ids of seven digits each."""
MAX_PROGRAM_BYTES = 256 << 20
"""Limit of a line's length, above any line with a whole program: a thousand calls with a million
tokens each."""
MAX_OTHER_LINES, OTHER_LINES_PER_ROW = 10_000, 100
"""A log with more lines that are not requests is another kind of file."""
SAMPLE_ROWS = 8192
"""Rows of which the times decide about ticks."""
_MIN_ROWS_PER_TIME = 1.05  # below this, equal times are chance, or do not matter
_MIN_REGULAR = 0.95  # share of gaps that must be multiples of the tick
_TOLERANCE = 0.01  # tolerance as a share of a tick


class Trace(Iterator[TraceRow]):
    """Iterates over the rows of a file once, in order of time. `info` is known after opening."""

    def __init__(self, info: TraceInfo, rows: Iterator[TraceRow]) -> None:
        self.info = info
        self._rows = rows

    def __iter__(self) -> Iterator[TraceRow]:
        return self._rows

    def __next__(self) -> TraceRow:
        return next(self._rows)


class _Index:
    """Times, offsets and line numbers of the rows of an unsorted file, in order of time."""

    def __init__(self, times: array[float], offsets: array[int], numbers: array[int]) -> None:
        import numpy as np  # numpy is only imported for unsorted files

        order = np.argsort(np.frombuffer(times, dtype=np.float64), kind="stable")
        self.times = np.frombuffer(times, dtype=np.float64)[order]
        self.offsets = np.frombuffer(offsets, dtype=np.int64)[order]
        self.numbers = np.frombuffer(numbers, dtype=np.int64)[order]


class _Unsorted:
    """Collects the index, and the span of the rows in it."""

    def __init__(self) -> None:
        self._times, self._offsets, self._numbers = array("d"), array("q"), array("q")
        self._origin: float | None = None
        self._first, self._last = float("inf"), float("-inf")

    def add(self, time: float, offset: int, number: int, is_left_out: bool = False) -> None:
        """Adds a line. A line that is left out is still read, because others may wait for it."""
        if self._origin is None:
            self._origin = time
        elapsed = time - self._origin  # dated times are integers that a float cannot hold
        self._times.append(elapsed)
        self._offsets.append(offset)
        self._numbers.append(number)
        if not is_left_out:
            self._first, self._last = min(self._first, elapsed), max(self._last, elapsed)

    def finish(self, scan: _Scan) -> None:
        """Gives the scan its index and times, if it has rows."""
        if self._origin is None or not scan.num_rows:
            return
        scan.index = _Index(self._times, self._offsets, self._numbers)
        exact = int if isinstance(self._origin, int) else float
        scan.first_time = self._origin + exact(self._first)
        scan.last_time = self._origin + exact(self._last)
        scan.head_times = array("d", scan.index.times[:SAMPLE_ROWS].tolist())


class _Scan:
    """The result of the first pass."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.skipped_rows = 0
        self.other_lines = 0
        self.first_time = 0.0
        self.last_time = 0.0
        self.index: _Index | None = None
        self.head_times = array("d")
        self.has_programs = False
        # whether a line alone does not give the time and the prompt of its row
        self.needs_order = False


def open_trace(
    path: str | Path,
    *,
    format: str = "auto",
    spread_ticks: bool = True,
    limit: int | None = None,
    speed: float = 1.0,
) -> Trace:
    """Opens the trace at `path`. `arrived_s` counts from its first row and is divided by `speed`.

    `format` is a `TraceFormat`, "module:Name", or the name of an installed format.
    Rows without a prompt or an answer are skipped and counted, as are lines of a log that are not
    requests. Rows of a file with rounded times are spread evenly over its ticks, unless
    `spread_ticks` is False. `limit` is the largest number of rows that are read. Raises TraceError.
    """
    path = Path(path)
    if not (isfinite(speed) and speed > 0):
        raise TraceError(f"speed {speed} is not a positive number; use for example 2")
    if limit is not None and limit < 1:
        raise TraceError(f"a limit of {limit} rows leaves none; use 1 or more")
    parser = own_parser(format) or _parser_for(path, format)
    if isinstance(parser, Gatherer):
        return _gathered(path, parser, spread_ticks, limit, speed)
    scan = _scan(path, parser, keep_index=False)
    if scan is None:
        places = _places(path, parser) if isinstance(parser, NAMING_PARSERS) else None
        scan = _scan(path, parser, keep_index=True, places=places)
    assert scan is not None
    if scan.num_rows == 0:
        skipped = f"; {scan.skipped_rows} rows have no prompt or no answer and were skipped"
        if isinstance(parser, LOG_PARSERS) and not scan.skipped_rows:
            skipped = f": {parser.why_none()}"
        raise TraceError(f"{path} has no requests{skipped if _left_out(scan) else ''}")
    tick = 0.0 if scan.has_programs else find_tick(scan.head_times)
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
        other_lines=scan.other_lines,
        has_programs=scan.has_programs,
    )
    parsed = _parsed_rows(path, parser, scan)
    if spread_ticks and tick > 0:
        parsed = spread(parsed, tick)
    rows = _rows(parsed, scan.first_time, parser.units_per_s * speed)
    return Trace(info, rows if limit is None else islice(rows, limit))


def _gathered(
    path: Path, gatherer: Gatherer, spread_ticks: bool, limit: int | None, speed: float
) -> Trace:
    """A trace of which all rows are in memory. Raises TraceError."""
    with open_file(path) as file:
        for number, _, line in numbered_lines(file, path):
            try:
                gatherer.add(line)
            except LineError as problem:
                raise error_at(path, number, f"{problem}{cut_off(line)}") from problem
    try:
        found = GatheredRows(gatherer)
    except LineError as problem:
        raise TraceError(f"{path}: {problem}") from problem
    rows, units_per_s = found.rows, gatherer.units_per_s
    if not rows:
        raise TraceError(f"{path} has no requests: no call in it has both a prompt and an answer")
    tick = 0.0 if found.has_programs else find_tick(found.head_times(SAMPLE_ROWS))
    info = TraceInfo(
        path=str(path),
        format=gatherer.format,
        block_tokens=gatherer.block_tokens,
        num_rows=len(rows),
        skipped_rows=found.skipped_rows,
        duration_s=(rows[-1].time - rows[0].time) / units_per_s,
        tick_s=tick / units_per_s,
        is_sorted=found.is_sorted,
        other_lines=gatherer.other_lines,
        has_programs=found.has_programs,
    )
    parsed = spread(rows, tick) if spread_ticks and tick > 0 else iter(rows)
    return Trace(info, islice(_rows(parsed, rows[0].time, units_per_s * speed), limit))


def _left_out(scan: _Scan) -> int:
    return scan.skipped_rows + scan.other_lines


def own_parser(format: str) -> Parser | None:
    """Returns the parser of a format from outside the package, or None for a built-in one. Raises
    TraceError."""
    if format in get_args(TraceFormat):
        return None
    name = own_name(OWN_FORMAT, format)
    if not is_own_policy(name):
        known = ", ".join((*get_args(TraceFormat), *installed_names(OWN_FORMAT)))
        raise TraceError(f"unknown trace format {format!r}; use one of {known}, or MODULE:NAME")
    return OwnParser(name)


def _parser_for(path: Path, format: str) -> Parser | ProgramParser | Gatherer:
    with open_file(path) as file:
        lines = numbered_lines(file, path)
        head = list(islice(lines, 1))
        if not head:
            raise TraceError(f"{path} is empty; a trace needs at least one request")
        number, _, first = head[0]
        rows = _head(lines)
        if format == "vllm" or (format == "auto" and is_vllm_log([first, *rows])):
            return VllmLogParser()
        has_objects = any(line.lstrip().startswith(b"{") for line in (first, *rows))
        # A log may begin with lines of text, as a start prints them.
        is_log = format in ("auto", "log") and has_objects
        is_json = first.lstrip()[:1] in (b"{", b"[") or is_log
        suffix = path.suffix.lower()
        named_json = suffix in (".jsonl", ".json", ".ndjson")
        wants_json = format in _JSONL or is_log or (format == "auto" and (is_json or named_json))
        if wants_json and not is_json:
            what = f"the file is named {suffix}" if format == "auto" else f"the format is {format}"
            raise error_at(
                path, number, f"{what}, but this line is not a JSON object; rename the file"
            )
        if is_json and (not wants_json or suffix == ".csv"):
            what = f"the file is named {suffix}" if format == "auto" else f"the format is {format}"
            raise error_at(
                path,
                number,
                f"{what}, but this line is JSON, not CSV; rename the file",
            )
        try:
            if not wants_json:
                return table_parser(first, format, rows)
            return jsonl_parser([first, *rows], format)
        except LineError as problem:
            raise error_at(path, number, f"{problem}{cut_off(first)}") from None


def _head(lines: Iterator[tuple[int, int, bytes]]) -> list[bytes]:
    rows: list[bytes] = []
    num_bytes = 0
    for _, _, line in islice(lines, _HEAD_ROWS):
        rows.append(line)
        num_bytes += len(line)
        if num_bytes > _HEAD_BYTES:
            break
    return rows


def _parse(
    parser: Parser | ProgramParser, order: CallOrder | None, path: Path, number: int, line: bytes
) -> Sequence[ParsedRow | None]:
    """The rows of a line, in their places in the order of calls. Raises TraceError."""
    try:
        return _rows_of(parser, order, line)
    except LineError as problem:
        raise error_at(path, number, f"{problem}{cut_off(line)}") from problem


def _rows_of(
    parser: Parser | ProgramParser, order: CallOrder | None, line: bytes
) -> Sequence[ParsedRow | None]:
    """Raises LineError."""
    # A test with the protocol would take longer than the line.
    parse_program = getattr(parser, "parse_program", None)
    found: Sequence[ParsedRow | None]
    if parse_program is None:
        found = (cast("Parser", parser).parse(line),)
    else:
        found = parse_program(line) or (None,)
    if order is None:
        return found
    return [row if row is None or row is OTHER_LINE else order.place(row) for row in found]


def _places(path: Path, parser: Parser | ProgramParser) -> list[tuple[int, int]]:
    """Offsets and numbers of the lines, in an order in which no row waits for a later one."""
    graph, places = CallGraph(), list[tuple[int, int]]()
    with open_file(path) as file:
        for number, offset, line in numbered_lines(file, path):
            if number <= parser.header_lines:
                continue
            for row in _parse(parser, None, path, number, line):
                if row is not None and row is not OTHER_LINE:
                    graph.add(row)
                    places.append((offset, number))
    try:
        return [places[one] for one in graph.order()]
    except RowError as problem:
        raise error_at(path, places[problem.number][1], str(problem.error)) from None


def _lines_at(
    file: BinaryIO, path: Path, places: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, bytes]]:
    for offset, number in places:
        file.seek(offset)
        yield number, offset, read_line(file, path, number)


def _begin_pass(parser: Parser | ProgramParser) -> None:
    if not isinstance(parser, Parser):
        parser.begin()


def _scan(
    path: Path,
    parser: Parser | ProgramParser,
    keep_index: bool,
    places: Sequence[tuple[int, int]] | None = None,
) -> _Scan | None:
    """The first pass. Returns None if the file is not sorted, so that the pass must keep an index.
    `places`: the places of the lines, in the order in which to read them; without it, in the file's
    order."""
    scan = _Scan()
    order = CallOrder(parser.units_per_s, parser.block_tokens)
    unsorted = _Unsorted()
    origin: float | None = None
    last = float("-inf")
    _begin_pass(parser)
    with open_file(path) as file:
        lines = numbered_lines(file, path) if places is None else _lines_at(file, path, places)
        for number, offset, line in lines:
            if number <= parser.header_lines:
                continue
            try:
                found = _parse(parser, order, path, number, line)
            except TraceError as error:
                if places is None and isinstance(error.__cause__, LaterCallError):
                    return None
                raise
            rows = [row for row in found if row is not None]
            scan.skipped_rows += len(found) - len(rows)
            if not rows:
                if places is not None:
                    unsorted.add(order.time, offset, number, is_left_out=True)
                continue
            row = rows[0]
            if row is OTHER_LINE:
                scan.other_lines += 1
                if scan.other_lines > MAX_OTHER_LINES + OTHER_LINES_PER_ROW * scan.num_rows:
                    raise error_at(path, number, _not_a_log(parser, scan))
                continue
            scan.num_rows += len(rows)
            if keep_index:
                unsorted.add(row.time, offset, number)
                continue
            if origin is None:
                origin = row.time
            if row.time < last:
                return None
            last = row.time
            if scan.num_rows <= SAMPLE_ROWS:
                scan.head_times.append(row.time - origin)
    scan.has_programs, scan.needs_order = order.has_programs, order.is_needed
    scan.first_time, scan.last_time = origin or 0.0, last
    unsorted.finish(scan)
    return scan


def _not_a_log(parser: Parser | ProgramParser, scan: _Scan) -> str:
    counts = f"{scan.other_lines:,} lines so far are no requests, and {scan.num_rows:,} are"
    why = parser.why_none() if isinstance(parser, LOG_PARSERS) and not scan.num_rows else ""
    return f"{counts}; {why or 'keep the lines of requests only'}"


def _parsed_rows(path: Path, parser: Parser | ProgramParser, scan: _Scan) -> Iterator[ParsedRow]:
    index = scan.index
    order = None
    if scan.needs_order:
        order = CallOrder(parser.units_per_s, parser.block_tokens, scan.has_programs)
    _begin_pass(parser)
    with open_file(path) as file:
        if index is None:
            for number, _, line in numbered_lines(file, path):
                if number > parser.header_lines:
                    for row in _parse(parser, order, path, number, line):
                        if row is not None and row is not OTHER_LINE:
                            yield row
            return
        places = zip(map(int, index.offsets), map(int, index.numbers), strict=True)
        for number, _, line in _lines_at(file, path, places):
            for row in _parse(parser, order, path, number, line):
                if row is not None:
                    yield row


def _rows(parsed: Iterator[ParsedRow], first_time: float, units_per_s: float) -> Iterator[TraceRow]:
    for row in parsed:
        ids = row.hash_ids
        if row.tenant:
            ids = tuple(_of_tenant(row.tenant, number) for number in ids)
        yield TraceRow(
            (row.time - first_time) / units_per_s,
            row.input_tokens,
            row.output_tokens,
            ids,
            row.session,
            row.tenant,
            row.priority,
            row.call,
            row.after,
            row.delay_s or 0.0,
            row.parent,
            row.tool,
            row.slo_class,
        )


def _of_tenant(tenant: str, hash_id: int) -> int:
    """An id of this tenant alone: equal prompts of two tenants share no block."""
    digest = hashlib.blake2b(b"%d/%b" % (hash_id, tenant.encode()), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def error_at(path: Path, number: int, what: str) -> TraceError:
    """Returns the error about a line."""
    return TraceError(f"{path}:{number}: {what}")


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading, behind a byte-order mark. Raises TraceError."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise TraceError(f"{path} is not a regular file; save the trace to one, it is read twice")
    head = file.read(len(BOM_UTF8))
    if head.startswith(b"\x1f\x8b"):
        file.close()
        raise TraceError(f"{path} is compressed; unpack it with gunzip first")
    # spreadsheet programs write a byte-order mark
    file.seek(len(BOM_UTF8) if head == BOM_UTF8 else 0)
    return file


def read_line(file: BinaryIO, path: Path, number: int) -> bytes:
    """The next line with its newline; empty at the end of the file. Raises TraceError."""
    line = file.readline(MAX_LINE_BYTES + 1)
    limit = MAX_LINE_BYTES
    if len(line) > limit and line.lstrip().startswith(b"{") and b"\0" not in line:
        limit = MAX_PROGRAM_BYTES
        line += file.readline(limit + 1 - len(line))
    if len(line) > limit:
        raise error_at(
            path, number, f"the line is longer than {limit >> 20} MiB; this is not a trace"
        )
    return line


def numbered_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yields (line number, byte offset, line) from the current position, without blank lines."""
    number = 1
    offset = file.tell()
    while line := read_line(file, path, number):
        if not line.isspace():
            yield number, offset, line
        number += 1
        offset += len(line)


def cut_off(line: bytes) -> str:
    """The end of an error message about a line that may be the cut-off last line of a file."""
    if line.endswith(b"\n") or line.lstrip().startswith(b"["):
        return ""
    return " (the file ends here without a newline, so it may be cut off; download it again)"


def find_tick(times: Iterable[float]) -> float:
    """The step to which rising `times` were rounded, in their unit.

    Returns 0.0 if few rows share a time, or if the gaps are not multiples of one step.
    """
    num_rows = 0
    gaps: list[float] = []
    last: float | None = None
    for time in times:
        num_rows += 1
        if last is not None and time > last:
            gaps.append(time - last)
        last = time
    if len(gaps) < 2 or num_rows < _MIN_ROWS_PER_TIME * (len(gaps) + 1):
        return 0.0
    step = sorted(gaps)[len(gaps) // 100]
    single = [gap for gap in gaps if round(gap / step) == 1]
    step = sum(single) / len(single)
    regular = sum(_is_multiple(gap, step) for gap in gaps)
    return step if regular >= _MIN_REGULAR * len(gaps) else 0.0


def _is_multiple(gap: float, step: float) -> bool:
    return abs(gap - round(gap / step) * step) <= _TOLERANCE * step


def spread(rows: Iterable[ParsedRow], tick: float) -> Iterator[ParsedRow]:
    """Spaces the rows that share a time evenly over the tick that starts there, in file order.

    Even spacing needs no seed, keeps the order of the file, and adds no bursts. Memory holds the
    rows of one tick.
    """
    group: list[ParsedRow] = []
    for row in rows:
        if group and row.time != group[0].time:
            yield from _spaced(group, min(tick, row.time - group[0].time))
            group.clear()
        group.append(row)
    yield from _spaced(group, tick)


def _spaced(group: list[ParsedRow], span: float) -> Iterator[ParsedRow]:
    if len(group) == 1:
        yield group[0]
        return
    for index, row in enumerate(group):
        yield row._replace(time=row.time + span * index / len(group))
