"""Traces as CSV files: Azure (2023, 2024, multimodal), BurstGPT, Vidur, and logs of one's own.

No such table has hashes. A log of one's own needs a column each for the arrival, the tokens of the
prompt and the tokens of the answer, under one of the usual names (`LOG_COLUMNS`).
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from math import isfinite

import msgspec

from moonpool.trace.row import MAX_LENGTH_TOKENS, LineError, ParsedRow, damage
from moonpool.types import Struct

AZURE_UNITS_PER_S = 10_000_000
"""Azure writes seven fractional digits; integers of this unit keep all digits."""


class TableFormat(Struct, frozen=True):
    """The columns of a publisher's files."""

    name: str
    time: str
    input_tokens: str
    output_tokens: str
    session: str | None = None
    others: tuple[str, ...] = ()
    is_dated: bool = False
    units_per_s: float = 1.0
    """The unit of numeric times."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns all known columns."""
        named = (self.time, self.input_tokens, self.output_tokens)
        return (*named, *((self.session,) if self.session else ()), *self.others)


TABLE_FORMATS = (
    TableFormat(
        name="azure",
        time="TIMESTAMP",
        input_tokens="ContextTokens",
        output_tokens="GeneratedTokens",
        others=("NumImages",),
        is_dated=True,
    ),
    TableFormat(
        name="burstgpt",
        time="Timestamp",
        input_tokens="Request tokens",
        output_tokens="Response tokens",
        session="Session ID",
        others=("Elapsed time", "Model", "Total tokens", "Log Type"),
    ),
    TableFormat(
        name="vidur",
        time="arrived_at",
        input_tokens="num_prefill_tokens",
        output_tokens="num_decode_tokens",
        others=("total_tokens", "pd_ratio"),
    ),
)


LOG_COLUMNS = {
    "timestamp": ("timestamp", "time", "arrival_time", "arrived_at", "arrival", "start_time"),
    "input_length": ("input_length", "input_tokens", "prompt_tokens", "num_prefill_tokens"),
    "output_length": ("output_length", "output_tokens", "completion_tokens", "num_decode_tokens"),
    "session_id": ("session_id", "session", "conversation_id", "chat_id"),
}
"""Names of the columns of a log of one's own, small or capital, with spaces or underscores."""
CLASS_COLUMN = "slo_class"
"""Any file may also have this column: the SLO class of each request."""
EPOCH_S, _EPOCH_MS = 10**9, 10**11
"""Smaller times count from the log's start. Larger ones count from 1970: in seconds up to the
second value, and in ms, us and ns up to a thousand times as much each."""


class TableParser:
    """Parses the rows of a CSV file with a given header."""

    block_tokens = 0
    header_lines = 1

    def __init__(self, table: TableFormat, header: list[str], ignored: tuple[str, ...]) -> None:
        self.format = table.name
        self.ignored = ignored
        self.units_per_s = float(AZURE_UNITS_PER_S if table.is_dated else table.units_per_s)
        self._num_columns = len(header)
        self._time = header.index(table.time)
        self._input = header.index(table.input_tokens)
        self._output = header.index(table.output_tokens)
        has_session = table.session is not None and table.session in header
        self._session = header.index(table.session) if has_session and table.session else -1
        plain = [_plain(column) for column in header]
        self._slo_class = plain.index(CLASS_COLUMN) if CLASS_COLUMN in plain else -1
        self._columns = header
        self._read_time: Callable[[bytes], float] = DatedTime() if table.is_dated else _number

    def parse(self, line: bytes) -> ParsedRow | None:
        """Raises LineError for another number of columns than the header has, and for a cell that
        is not the number or date it must be."""
        cells = _cells(line)
        if len(cells) != self._num_columns:
            found = damage(line)
            raise LineError(
                found or f"the row has {len(cells)} columns, the header {self._num_columns}"
            )
        time = self._read_time(cells[self._time])
        num_input = self._tokens(cells, self._input)
        num_output = self._tokens(cells, self._output)
        if num_input == 0 or num_output == 0:
            return None
        session, slo_class = _name(cells, self._session), _name(cells, self._slo_class).strip()
        return ParsedRow(time, num_input, num_output, (), session, slo_class=slo_class)

    def _tokens(self, cells: list[bytes], column: int) -> int:
        cell = cells[column]
        if cell.isdigit() and len(cell) <= 10:
            tokens = int(cell)
        else:
            name = self._columns[column]
            try:
                number = float(cell)  # programs write 12.0 for a column that has empty cells
            except ValueError:
                raise LineError(f"{name} is {_shown(cell)}; it must be an integer") from None
            if not number.is_integer():
                raise LineError(f"{name} is {_shown(cell)}; it must be an integer")
            tokens = int(number)
        if not 0 <= tokens <= MAX_LENGTH_TOKENS:
            raise LineError(
                f"{self._columns[column]} is {_shown(cell)};"
                f" it must be between 0 and {MAX_LENGTH_TOKENS}"
            )
        return tokens


class DatedTime:
    """Parses dates to units of 100 ns since 1970. Caches the last minute, which most rows share."""

    def __init__(self) -> None:
        self._minute = b""
        self._minute_units = 0

    def __call__(self, cell: bytes) -> float:
        text, zone = cell, b""
        if len(cell) > 19:
            for mark in (b"+", b"Z", b"-"):
                at = cell.find(mark, 19)
                if at > 0:
                    text, zone = cell[:at], cell[at:]
                    break
        minute = text[:16] + zone
        if minute != self._minute:
            self._minute_units = _minute_units(cell, text[:16], zone)
            self._minute = minute
        seconds, _, fraction = text[17:].partition(b".")
        is_right = text[16:17] == b":" and seconds.isdigit() and len(seconds) == 2
        if not is_right or int(seconds) > 60 or (fraction and not fraction.isdigit()):
            raise _bad_date(cell)
        tenths_us = int((fraction + b"0000000")[:7])
        return self._minute_units + int(seconds) * AZURE_UNITS_PER_S + tenths_us


def _minute_units(cell: bytes, minute: bytes, zone: bytes) -> int:
    try:
        text = minute.decode("ascii") + ":00" + (zone.decode("ascii") or "+00:00")
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _bad_date(cell) from None
    return int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()) * AZURE_UNITS_PER_S


def _bad_date(cell: bytes) -> LineError:
    return LineError(f"{_shown(cell)} is not a time; it must look like 2023-11-16 18:15:46.6805900")


def _number(cell: bytes) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = float("nan")
    if not isfinite(number) or number < 0:
        raise LineError(f"the time is {_shown(cell)}; it must be a finite number, 0 or more")
    return number


def _name(cells: list[bytes], column: int) -> str:
    """`column` is -1 if there is no such column."""
    return "" if column < 0 else cells[column].decode("utf-8", "replace")


def _plain(column: str) -> str:
    return column.lower().replace(" ", "_")


def _shown(cell: bytes) -> str:
    return repr(cell.decode("utf-8", "replace")[:40])


def _cells(line: bytes) -> list[bytes]:
    return line.rstrip(b"\r\n").split(b",") if b'"' not in line else _quoted(line)


def _quoted(line: bytes) -> list[bytes]:
    try:
        cells = next(csv.reader([line.decode("utf-8")], strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LineError(damage(line) or f"the quotes of this row are wrong: {error}") from None
    return [cell.strip("\r\n").encode() for cell in cells]


def table_parser(header_line: bytes, name: str, first_rows: Sequence[bytes] = ()) -> TableParser:
    """The parser for a file with this header. `name` is the name of a format, or "auto". The unit
    of a log's times is derived from `first_rows`. Raises LineError."""
    found = damage(header_line)
    if found is not None:
        raise LineError(found)
    text = header_line.decode("utf-8").rstrip("\r\n")
    header = [column.strip().strip('"') for column in text.split(",")]
    if len(set(header)) != len(header):
        raise LineError("a column appears twice in the header; rename one")
    others = [column for column in header if _plain(column) != CLASS_COLUMN]
    log = _log_table(header)
    is_published = any(set(header) >= set(table.columns[:3]) for table in TABLE_FORMATS)
    if log is not None and (name == "log" or (name == "auto" and not is_published)):
        ignored = tuple(column for column in others if column not in log.columns)
        return TableParser(_with_times(log, header, first_rows), header, ignored)
    if name == "log":
        raise LineError(_no_header(header))
    formats = [table for table in TABLE_FORMATS if name in ("auto", table.name)]
    table = max(formats, key=lambda table: len(set(header) & set(table.columns)))
    missing = [c for c in (table.time, table.input_tokens, table.output_tokens) if c not in header]
    unknown = [column for column in others if column not in table.columns]
    if len(missing) == 3 and name == "auto":
        raise LineError(_no_header(header))
    if table.time in missing and len(missing) == 1 and table.name == "vidur":
        raise LineError(
            "the file has lengths without arrivals; add a column arrived_at, or make a trace with"
            " `moonpool trace generate`"
        )
    absent = [column for column in table.columns if column not in header]
    for column in unknown:
        near = difflib.get_close_matches(column, absent, n=1)
        if near:
            raise LineError(
                f"unknown column {column!r} in a {table.name} file; did you mean {near[0]}?"
            )
    if missing:
        raise LineError(
            f"the file has no column {' and no column '.join(missing)}; {table.name} files need it"
        )
    return TableParser(table, header, tuple(unknown))


def _log_table(header: Sequence[str]) -> TableFormat | None:
    """The columns of a log of one's own. Returns None if one of the three that it needs
    is missing."""
    plain = {_plain(column): column for column in reversed(header)}
    found = {
        role: plain[next(name for name in names if name in plain)]
        for role, names in LOG_COLUMNS.items()
        if not plain.keys().isdisjoint(names)
    }
    session = found.pop("session_id", None)
    if len(found) < 3:
        return None
    return TableFormat(
        name="log",
        time=found["timestamp"],
        input_tokens=found["input_length"],
        output_tokens=found["output_length"],
        session=session,
    )


def _with_times(
    table: TableFormat, header: Sequence[str], first_rows: Sequence[bytes]
) -> TableFormat:
    """Returns `table` with the unit of its times.

    The times are dates or numbers. Times since 1970 tell their unit by their size. Others are
    milliseconds as in Mooncake's files, unless some have fractions.
    """
    column = header.index(table.time)
    try:
        cells = [row[column] for row in map(_cells, first_rows) if len(row) > column]
        times = [float(cell) for cell in cells]
    except LineError:
        return table  # the first pass reports the faulty row
    except ValueError:
        return msgspec.structs.replace(table, is_dated=True)
    latest = max(filter(isfinite, times), default=0.0)
    if latest >= EPOCH_S:
        units_per_s = float(units_since_1970(latest))
    else:
        units_per_s = float(units_since_start(times))
    return msgspec.structs.replace(table, units_per_s=units_per_s)


def units_since_1970(time: float) -> int:
    """Returns how many of its units a second has, for a time that counts from 1970."""
    return next((units for units in (1, 10**3, 10**6) if time < _EPOCH_MS * units), 10**9)


def units_since_start(times: Iterable[float]) -> int:
    """Returns the unit of times that count from the log's start: milliseconds as in Mooncake's
    files, unless some have fractions."""
    finite = (time for time in times if isfinite(time))
    return 1 if any(not float(time).is_integer() for time in finite) else 1000


def _no_header(header: list[str]) -> str:
    columns = [table.columns for table in TABLE_FORMATS]
    near = [
        match
        for column in header
        for known in columns
        for match in difflib.get_close_matches(column, known, n=1)
    ]
    hint = f"did you mean {near[0]}? " if near else ""
    known = " or ".join(",".join(table.columns[:3]) for table in TABLE_FORMATS)
    return (
        f"the columns {','.join(header)[:60]!r} match no known format; {hint}"
        f"name them timestamp,prompt_tokens,completion_tokens; also known are {known}"
    )
