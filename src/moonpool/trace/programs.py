"""Which calls of a program wait for which, and when a program begins.

A row of a program has no time of its own: it starts when the rows that it waits for have ended and
its tools have run. Rows are read in the order in which their programs begin, so that a row is known
before those are over that it waits for; `CallOrder.place` gives it the time of its program.

A file may name the calls (`wait_for`), or only the session: then each row waits for the one before
it. Where a file tells when answers ended, as logs do, tools ran for the time from the end of one
answer to the next call. A call that began before the one before it had ended did not wait for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from moonpool.trace.row import MAX_LENGTH_TOKENS, UNTIMED, LineError, ParsedRow, TraceRow

SESSION_BLOCK_TOKENS = 64
"""Block size of sessions whose file names no blocks."""


@dataclass(slots=True, eq=False)
class _Session:
    """What is known of an agent: its last call, and its context as far as a file gives parts."""

    time: float
    call: str = ""
    ended: float | None = None
    num_calls: int = 0
    num_tokens: int = 0  # prompt and answer of its last call
    blocks: list[int] = field(default_factory=list)


class CallOrder:
    """Reads the rows of a file in the file's order, or in that of `time`, once."""

    def __init__(self, units_per_s: float) -> None:
        self._units_per_s = units_per_s
        self._sessions: dict[str, _Session] = {}
        self._named: dict[str, float] = {}  # calls that the file itself names, and their times
        self.has_programs = False

    def place(self, row: ParsedRow) -> ParsedRow:
        """The row with its time, its call, what it waits for, its delay, and with its whole prompt
        if it only gave a part of it. Raises LineError."""
        if not row.session and not row.call:
            if row.time == UNTIMED:
                raise LineError("this row has neither a timestamp nor a session_id or request_id")
            return row
        session = self._sessions.get(row.session) if row.session else None
        after, delay_s = self._waits_for(row, session)
        times = [self._named[call] for call in row.after]
        if session is not None and after:
            times.append(session.time)
        time = max(times, default=row.time if row.time != UNTIMED else 0.0)
        if after:
            self.has_programs = True
        elif row.time != UNTIMED:
            time = row.time
        return self._note(row, session, time, after, delay_s)

    def _waits_for(self, row: ParsedRow, session: _Session | None) -> tuple[tuple[str, ...], float]:
        """The calls that the row waits for, and how long its tools run then."""
        for call in row.after:
            if call not in self._named:
                raise LineError(f"it waits for the call {call!r:.60}, which no line before it has")
        if row.after:
            return row.after, row.delay_s or 0.0
        if session is None or not session.call:
            return (), 0.0
        if row.delay_s is not None or row.time == UNTIMED:
            return (session.call,), row.delay_s or 0.0
        if session.ended is None or row.time < session.ended:
            return (), 0.0
        return (session.call,), (row.time - session.ended) / self._units_per_s

    def _note(
        self,
        row: ParsedRow,
        session: _Session | None,
        time: float,
        after: tuple[str, ...],
        delay_s: float,
    ) -> ParsedRow:
        """Notes the row as the last one of its session, and returns it as it is placed."""
        if session is None:
            session = _Session(time)
            if row.session:
                self._sessions[row.session] = session
        session.num_calls += 1
        session.time, session.ended = time, row.ended
        session.call = call = row.call or f"{row.session}#{session.num_calls}"
        if row.call:
            if row.call in self._named:
                raise LineError(f"another row has the request_id {row.call!r:.60}")
            self._named[call] = time
        num_tokens = row.input_tokens
        if row.adds and after:
            num_tokens += session.num_tokens
        if num_tokens > MAX_LENGTH_TOKENS:
            raise LineError(f"the prompts of its session add up to {num_tokens:,} tokens")
        session.num_tokens = num_tokens + row.output_tokens
        ids = row.hash_ids
        if row.adds and row.session:
            ids = _blocks(session, row, num_tokens)
        return row._replace(
            time=time,
            input_tokens=num_tokens,
            hash_ids=ids,
            call=call,
            after=after,
            delay_s=delay_s,
        )


def _blocks(session: _Session, row: ParsedRow, num_tokens: int) -> tuple[int, ...]:
    """Ids of a prompt that goes on after the last one of its session. Its `hash_ids` are those of
    the text that it begins with, as far as that is known."""
    blocks, num_blocks = session.blocks, -(-num_tokens // SESSION_BLOCK_TOKENS)
    if not blocks:
        blocks.extend(row.hash_ids[: row.input_tokens // SESSION_BLOCK_TOKENS])
    for number in range(len(blocks), num_blocks):
        blocks.append(block_id(f"{row.session}/{number}".encode()))
    return tuple(blocks[:num_blocks])


def block_id(name: bytes) -> int:
    """The id of a block by a name that no other block has."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def text_blocks(text: str) -> tuple[tuple[int, ...], int]:
    """Ids of a text's blocks, and its tokens: one for four bytes, as no tokenizer is known. Equal
    beginnings have equal ids."""
    data = text.encode()
    num_tokens = -(-len(data) // 4)
    width, digest = 4 * SESSION_BLOCK_TOKENS, b""
    ids = []
    for start in range(0, len(data), width):
        digest = hashlib.blake2b(digest + data[start : start + width], digest_size=16).digest()
        ids.append(block_id(digest))
    return tuple(ids), num_tokens


def in_program_order(rows: Iterable[TraceRow]) -> list[TraceRow]:
    """Rows by the begin of their programs, as the reader yields them: those of a program in their
    own order, with its time."""
    began_s: dict[str, float] = {}
    placed = []
    for row in rows:
        time_s = max((began_s[call] for call in row.after), default=row.arrived_s)
        if row.call:
            began_s[row.call] = time_s
        placed.append(msgspec.structs.replace(row, arrived_s=time_s))
    return sorted(placed, key=lambda row: row.arrived_s)
