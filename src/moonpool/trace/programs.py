"""Which calls of a program wait for which, and when a program begins.

A row of a program starts not at a given time, but when the rows that it waits for have ended and
its tools have run. Rows are read in the order in which their programs begin, so that each row is
read before the rows that it waits for have ended. `CallOrder.place` gives each row the time of its
program. A row without a prompt or an answer is left out, and the calls that wait for it wait for
the calls before it instead.

A file may name the calls (`wait_for`), or only the session: then each row waits for the previous
one. If a file contains the ends of answers, like logs, the tools' time is the time from the end of
an answer to the next call. A call that began before the previous one had ended did not wait for it.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field

from moonpool.trace.row import (
    MAX_LENGTH_TOKENS,
    UNTIMED,
    LaterCallError,
    LineError,
    ParsedRow,
)

SESSION_BLOCK_TOKENS = 64
"""Block size of sessions whose file names no blocks."""


@dataclass(slots=True, eq=False)
class _Session:
    """The state of an agent while a file is read: its last call, and its context if the file gives
    it in parts."""

    time: float
    parent: str = ""
    call: str = ""
    ended: float | None = None
    num_calls: int = 0
    num_tokens: int = 0  # tokens of prompt and answer of the session's last call
    pause_s: float = 0.0  # time of the calls that were left out since the session's last one
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that the file names itself. Calls that wait for a call that is left out wait for the
    calls in `after` instead, and `delay_s` longer."""

    time: float
    session: str
    after: tuple[str, ...]
    delay_s: float
    is_left_out: bool


class CallOrder:
    """Reads the rows of a file once, in an order in which no row waits for a later one."""

    def __init__(
        self,
        units_per_s: float,
        block_tokens: int = SESSION_BLOCK_TOKENS,
        has_programs: bool = False,
    ) -> None:
        """`has_programs`: whether a previous pass has found programs. A call without a session is
        then the first of a session of its own."""
        self._units_per_s = units_per_s
        self._block_tokens = block_tokens or SESSION_BLOCK_TOKENS
        self._all_have_sessions = has_programs
        self._sessions: dict[str, _Session] = {}
        self._named: dict[str, _Call] = {}
        self.time = 0.0
        """The time of the row that was placed last, even if it was left out."""
        self.has_programs = False
        self.is_needed = False
        """Whether rows need this class because their lines alone lack their time, their prompt or
        the calls before them."""

    def place(self, row: ParsedRow) -> ParsedRow | None:
        """Returns the row with its time, its call, the calls that it waits for, its delay, and the
        whole prompt if the line has only a part of it. Returns None if it has no prompt or no
        answer. Raises LineError."""
        if not row.session and not row.call:
            if row.time == UNTIMED:
                raise LineError("this row has neither a timestamp nor a session_id or request_id")
            self.time = row.time
            return self._kept(row)
        session = self._sessions.get(row.session) if row.session else None
        after, delay_s = self._waits_for(row, session)
        self.time = time = self._time(row, session, after)
        if after:
            self.has_programs = True
        self.is_needed |= bool(after) or row.adds or row.time == UNTIMED
        return self._note(row, session, time, after, delay_s)

    def _kept(self, row: ParsedRow) -> ParsedRow | None:
        if row.input_tokens and row.output_tokens:
            return row
        self.is_needed = True
        return None

    def _waits_for(self, row: ParsedRow, session: _Session | None) -> tuple[tuple[str, ...], float]:
        """The calls that the row waits for, and how long its tools run then."""
        if row.after or row.alongside:
            return self._named_by(row)
        if session is None or not session.call:
            return (), 0.0
        # A row that has its own name tells what it waits for.
        if row.delay_s is not None or (row.time == UNTIMED and not row.call):
            return (session.call,), (row.delay_s or 0.0) + session.pause_s
        if session.ended is None or row.time < session.ended:
            return (), 0.0
        return (session.call,), (row.time - session.ended) / self._units_per_s

    def _named_by(self, row: ParsedRow) -> tuple[tuple[str, ...], float]:
        """The calls that a row names. A call that starts alongside others waits for the same calls
        as they do. A call that waits for a left-out call waits instead for the calls that the
        left-out one waited for."""
        found: dict[str, None] = {}
        earlier_s = 0.0
        for name in row.after or row.alongside:
            call = self._named.get(name)
            if call is None:
                raise LaterCallError(f"it waits for the call {name!r:.60}, which no line has")
            if row.after and not call.is_left_out:
                found[name] = None
                continue
            found |= dict.fromkeys(call.after)
            earlier_s = max(earlier_s, call.delay_s)
        return tuple(found), (row.delay_s or 0.0) + earlier_s

    def _time(self, row: ParsedRow, session: _Session | None, after: tuple[str, ...]) -> float:
        """Returns when the row's program begins; for a row that waits for nothing, returns its own
        start."""
        if row.time != UNTIMED and not after:
            return row.time
        times = [self._named[name].time for name in (*row.after, *row.alongside)]
        if session is not None and (after or not (times or session.call)):
            # without a kept call, the first calls of the session were left out
            times.append(session.time)
        if not times:
            return row.time if row.time != UNTIMED else 0.0
        return max(times) + (0.0 if after else (row.delay_s or 0.0) * self._units_per_s)

    def _note(
        self,
        row: ParsedRow,
        session: _Session | None,
        time: float,
        after: tuple[str, ...],
        delay_s: float,
    ) -> ParsedRow | None:
        """Notes the row as the last one of its session, and returns it as it is placed."""
        name = self._session_of(row)
        if session is None:
            session = _Session(time, row.parent or self._parent_of(row, name))
            if row.session:
                self._sessions[row.session] = session
        num_tokens = row.input_tokens
        if row.adds:
            num_tokens += session.num_tokens
        if num_tokens > MAX_LENGTH_TOKENS:
            raise LineError(f"the prompts of its session add up to {num_tokens:,} tokens")
        is_left_out = not num_tokens or not row.output_tokens
        if row.call:
            if row.call in self._named:
                raise LineError(
                    f"another row has the request_id {row.call!r:.60}; if the file was put together"
                    " of several, give the ids of each a prefix of their own"
                )
            self._named[row.call] = _Call(time, name, after, delay_s, is_left_out)
        if row.adds:
            session.num_tokens = num_tokens + (0 if is_left_out else row.output_tokens)
        ids = row.hash_ids
        if row.adds and row.session:
            ids = self._blocks(session, row, num_tokens)
        if is_left_out:
            session.pause_s = delay_s if after else 0.0
            self.is_needed = True
            return None
        session.num_calls += 1
        session.time, session.ended, session.pause_s = time, row.ended, 0.0
        session.call = call = row.call or f"{row.session}#{session.num_calls}"
        return row._replace(
            time=time,
            input_tokens=num_tokens,
            hash_ids=ids,
            session=name if row.session or after or self._all_have_sessions else "",
            call=call,
            after=after,
            delay_s=delay_s,
            parent=row.parent or session.parent,
        )

    def _session_of(self, row: ParsedRow) -> str:
        """A call without a session belongs to the session of the first call that it names."""
        return row.session or self._session_before(row) or row.call

    def _parent_of(self, row: ParsedRow, session: str) -> str:
        """An agent that begins after a call of another one is a sub-agent of that one."""
        before = self._session_before(row)
        return "" if before == session else before

    def _session_before(self, row: ParsedRow) -> str:
        names = row.after or row.alongside
        return self._named[names[0]].session if names else ""

    def _blocks(self, session: _Session, row: ParsedRow, num_tokens: int) -> tuple[int, ...]:
        """Returns the block ids of a prompt that continues the last one of its session. The row's
        `hash_ids` name the blocks of the text with which it begins, as far as known."""
        blocks, num_blocks = session.blocks, -(-num_tokens // self._block_tokens)
        if not blocks:
            blocks.extend(row.hash_ids[: row.input_tokens // self._block_tokens])
        for number in range(len(blocks), num_blocks):
            blocks.append(block_id(f"{row.session}/{number}".encode()))
        return tuple(blocks[:num_blocks])


def block_id(name: bytes) -> int:
    """The id of a block by a name that no other block has."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


@dataclass(slots=True, eq=False)
class _Row:
    time: float
    after: tuple[str, ...]
    session: str
    follows: bool  # whether the row waits for the previous row of its session


@dataclass(slots=True, eq=False)
class CallGraph:
    """An order of a file's rows, by their numbers, in which each row comes after the rows that it
    waits for. Files may have the rows that a row waits for in later lines.

    Rows without waits keep the order of their times. Rows that wait for the previous row of their
    session keep the session's order: by time if they have times, else as in the file.
    """

    _rows: list[_Row] = field(default_factory=list)
    _named: dict[str, int] = field(default_factory=dict)
    # maps each session to the time of its last row
    _times: dict[str, float] = field(default_factory=dict)

    def add(self, row: ParsedRow) -> None:
        """Adds the next row of the file."""
        time = self._times.get(row.session, UNTIMED) if row.time == UNTIMED else row.time
        self._times[row.session] = time
        names = (*row.after, *row.alongside)
        follows = not names and (not row.call or row.delay_s is not None)
        if row.call:
            self._named.setdefault(row.call, len(self._rows))
        self._rows.append(_Row(time, names, row.session, follows))

    def order(self) -> list[int]:
        """The rows in their order. Raises RowError."""
        followers: list[list[int]] = [[] for _ in self._rows]
        missing = [0] * len(self._rows)
        last: dict[str, int] = {}
        for number in sorted(range(len(self._rows)), key=lambda one: (self._rows[one].time, one)):
            row = self._rows[number]
            before = [self._place(name, number) for name in row.after]
            if row.session:
                before += [last[row.session]] if row.follows and row.session in last else []
                last[row.session] = number
            missing[number] = len(before)
            for one in before:
                followers[one].append(number)
        return self._sorted(followers, missing)

    def _place(self, name: str, number: int) -> int:
        if name not in self._named:
            raise RowError(
                number, LaterCallError(f"it waits for the call {name!r:.60}, which no line has")
            )
        return self._named[name]

    def _sorted(self, followers: list[list[int]], missing: list[int]) -> list[int]:
        ready = [(self._rows[one].time, one) for one in range(len(missing)) if not missing[one]]
        heapq.heapify(ready)
        found: list[int] = []
        while ready:
            _, number = heapq.heappop(ready)
            found.append(number)
            for one in followers[number]:
                missing[one] -= 1
                if not missing[one]:
                    heapq.heappush(ready, (self._rows[one].time, one))
        if len(found) < len(missing):
            number = next(one for one, count in enumerate(missing) if count)
            raise RowError(number, LineError("it waits for calls that wait for it"))
        return found


class RowError(Exception):
    """An error in a row, which it identifies by its number."""

    def __init__(self, number: int, error: LineError) -> None:
        super().__init__(str(error))
        self.number, self.error = number, error
