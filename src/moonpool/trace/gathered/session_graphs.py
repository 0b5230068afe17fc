"""AIPerf's `dag_jsonl`: a session on each line, whose turns fork and spawn others.

A turn adds its `messages` to the preceding prompt and answer, and starts `delay` milliseconds after
the calls that it waits for. A forked session continues its parent's prompt and answer, and a
spawned session begins without them; both start when the turn that names them has ended. The turn
after a spawn, or the one at `join_at`, waits for the spawned sessions. Sessions that no turn names
begin at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from moonpool.trace.corpora import MAX_NESTED, ProgramNames, duration, line_object
from moonpool.trace.gathered.rows import Gatherer
from moonpool.trace.programs import SESSION_BLOCK_TOKENS, block_id
from moonpool.trace.prompt_texts import answer_tokens, message_text, text_prompt
from moonpool.trace.row import UNTIMED, LineError, ParsedRow


def is_session_graph(first: dict[str, Any]) -> bool:
    """Whether this first object of a file is a session, so that the file has session graphs."""
    turns = first.get("turns")
    if not isinstance(first.get("session_id"), str) or not isinstance(turns, list):
        return False
    if first.keys() & {"orchestrator", "pre_session_spawns", "spawns"}:
        return True
    inner = [turn for turn in turns if isinstance(turn, dict)]
    return bool(inner) and all(
        "messages" in turn and "text_input" not in turn and "timestamp" not in turn
        for turn in inner
    )


@dataclass(slots=True)
class _Context:
    """The context with which a session's next prompt begins."""

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    def copy(self) -> _Context:
        """Returns the context of a fork, which shares the full blocks."""
        return _Context(self.num_tokens, self.blocks[: self.num_tokens // SESSION_BLOCK_TOKENS])

    def grow(self, text: str, name: str) -> tuple[int, tuple[int, ...]]:
        """Adds a text; returns the tokens and the blocks of the prompt."""
        added = text_prompt(text)
        if not self.num_tokens:
            self.blocks.extend(added.block_ids[: added.num_tokens // SESSION_BLOCK_TOKENS])
        self.num_tokens += added.num_tokens
        num_blocks = -(-self.num_tokens // SESSION_BLOCK_TOKENS)
        for number in range(len(self.blocks), num_blocks):
            self.blocks.append(block_id(f"{name}/{number}".encode()))
        return self.num_tokens, tuple(self.blocks)


class SessionGraph(Gatherer):
    """The sessions of a file by their names."""

    format = "dag"
    block_tokens = SESSION_BLOCK_TOKENS
    units_per_s = 1000.0
    other_lines = 0

    def __init__(self) -> None:
        self._sessions: dict[str, dict[str, Any]] = {}
        self._named: set[str] = set()
        self._names = ProgramNames()

    def add(self, line: bytes) -> None:
        """Raises LineError."""
        whole = line_object(line)
        name = whole.get("session_id")
        if not isinstance(name, str) or not name:
            raise LineError(f"session_id is {name!r:.40}; it must be a name")
        if name in self._sessions:
            raise LineError(f"another line has the session_id {name!r:.60}; rename one")
        if whole.get("rounds") is not None:
            raise LineError("rounds of an orchestrator are not read; write its rounds as turns")
        turns = whole.get("turns", [] if whole.get("orchestrator") else None)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise LineError(f"turns of {name!r:.60} is no list of objects")
        self.keep()
        self._sessions[name] = whole
        for number, turn in enumerate(turns):
            for key in ("forks", "spawns"):
                for children, _ in _children(turn, key, number):
                    self._named.update(children)

    def rows(self) -> Iterator[ParsedRow]:
        """Raises LineError."""
        roots = [name for name in self._sessions if name not in self._named]
        if not roots:
            raise LineError("every session is forked or spawned by another one; one must begin")
        for name in roots:
            rows: list[ParsedRow] = []
            self._play(rows, name, "", (), _Context(), 0)
            yield from rows

    def _play(
        self,
        rows: list[ParsedRow],
        name: str,
        parent: str,
        after: tuple[str, ...],
        context: _Context,
        depth: int,
    ) -> tuple[str, ...]:
        """Adds the calls of a session; returns those after which it has ended."""
        whole = self._sessions.get(name)
        if whole is None:
            raise LineError(f"a turn forks or spawns the session {name!r:.60}, which no line has")
        if depth > MAX_NESTED:
            raise LineError(f"sessions fork and spawn deeper than {MAX_NESTED}; {name!r:.60} does")
        self.keep()
        session = self._names.take(name)
        waits_for, ended = after, tuple[str, ...]()
        joins: dict[int, tuple[str, ...]] = {}
        turns: list[dict[str, Any]] = whole.get("turns") or []
        is_over = False
        for number, turn in enumerate(turns):
            if is_over:
                raise LineError(f"turn {number} of {name!r:.60} comes after a fork that ends it")
            waits_for += joins.pop(number, ())
            call = f"{session}#{number}"
            rows.append(self._call(turn, session, call, parent, waits_for, context))
            waits_for = (call,)
            for children, join in _children(turn, "spawns", number):
                for child in children:
                    last = self._play(rows, child, session, (call,), _Context(), depth + 1)
                    joins[join] = (*joins.get(join, ()), *last)
            for children, join in _children(turn, "forks", number):
                is_over |= join >= 0
                for child in children:
                    ended += self._play(rows, child, session, (call,), context.copy(), depth + 1)
        return (*waits_for, *ended)

    def _call(
        self,
        turn: dict[str, Any],
        session: str,
        call: str,
        parent: str,
        after: tuple[str, ...],
        context: _Context,
    ) -> ParsedRow:
        self.keep()
        messages, delay_ms = turn.get("messages"), duration(turn, "delay", "ms") or 0.0
        if not isinstance(messages, list):
            raise LineError(f"messages of a turn of {session:.60} is {messages!r:.40}, no list")
        tools = None if context.num_tokens else turn.get("tools")
        num_input, ids = context.grow(message_text(messages, tools), session)
        extra = turn.get("extra")
        length = answer_tokens(turn) or answer_tokens(extra if isinstance(extra, dict) else {})
        num_output = int(length or 1)
        context.num_tokens += num_output
        return ParsedRow(
            UNTIMED if after else delay_ms,
            num_input,
            num_output,
            ids,
            session,
            call=call,
            after=after,
            delay_s=delay_ms / 1000.0 if after else None,
            parent=parent,
        )


def _children(turn: dict[str, Any], key: str, number: int) -> Iterator[tuple[list[str], int]]:
    """Yields the sessions that a turn forks or spawns, and the turn that waits for them, or -1 if
    none does."""
    found = turn.get(key) or []
    if not isinstance(found, list):
        raise LineError(f"{key} of a turn is {found!r:.40}; it must be a list of sessions")
    for one in found:
        join: Any = number + 1
        children: Any = [one]
        if isinstance(one, dict) and key == "spawns":
            children, at = one.get("children"), one.get("join_at")
            join = number + 1 if at is None else at
        elif isinstance(one, dict):
            children, join = [one.get("child")], -1 if one.get("background") else number + 1
        is_right = isinstance(children, list) and all(isinstance(child, str) for child in children)
        if not is_right or type(join) is not int or (key == "spawns" and join <= number):
            raise LineError(f"{one!r:.60} in {key} of a turn names no sessions, or no later turn")
        yield children, join
