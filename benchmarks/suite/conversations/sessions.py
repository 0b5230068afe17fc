"""Conversations and agents: sessions whose turns repeat all that was said before.

A session is drawn before a run, so all systems get the same users, lengths and pauses. The answers
are not drawn: a turn's prompt contains the tokens of the server's own answers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from moonpool.trace.row import TraceRow
from moonpool.types import Struct

SPREAD = 0.4
"""Standard deviation of the logarithm of lengths."""
LEAST, MOST = 0.4, 2.5
"""Lengths stay within these multiples of their median."""
TRACE_BLOCK_TOKENS = 16
FIRST_ORDINARY, LAST_ORDINARY = 300, 1000
"""Token ids between these are ordinary in nearly every vocabulary."""


class SessionShape(Struct, frozen=True):
    """Medians of a kind of session. Every prompt of a session begins with `shared_tokens`."""

    name: str
    shared_tokens: int
    opening_tokens: int
    turn_tokens: int
    answer_tokens: int
    turns: int
    think_s: float


SESSION_SHAPES = {
    shape.name: shape
    for shape in (
        SessionShape("chats", 0, 448, 320, 64, 2, 2.0),
        SessionShape("agents", 512, 256, 128, 32, 10, 0.5),
    )
}
"""40 % and 90 % of the prompt tokens are in an earlier prompt or answer."""


class SessionTurn(Struct, frozen=True):
    """One request: the tokens that it adds to the prompt, and the pause before it."""

    new_tokens: tuple[int, ...]
    answer_tokens: int
    think_s: float


class Session(Struct, frozen=True):
    """One user. The first turn comes at `started_s`, without a pause."""

    started_s: float
    turns: tuple[SessionTurn, ...]


def arriving_sessions(
    shape: SessionShape, rate_per_s: float, seconds: float, seed: int
) -> list[Session]:
    """Draws sessions with Poisson arrivals at this rate, over this time."""
    rng = random.Random(f"{shape.name}/{seed}")
    found: list[Session] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        found.append(make_session(shape, at_s, random.Random(f"{seed}/{len(found)}"), seed))
        at_s += rng.expovariate(rate_per_s)
    return found


def sessions_at(
    shape: SessionShape, load: float, load_1_per_s: float, seconds: float, seed: int
) -> list[Session]:
    """The sessions of a load. Each load uses different tokens."""
    return arriving_sessions(shape, load * load_1_per_s, seconds, seed + round(1000 * load))


def make_session(
    shape: SessionShape, started_s: float, rng: random.Random, seed: int, think_s: float = -1.0
) -> Session:
    """Draws one session; a `think_s` of 0 or more replaces the shape's. `seed` draws what the
    sessions share."""
    common = random.Random(f"{shape.name}/{seed}/shared")
    pause_s = shape.think_s if think_s < 0 else think_s
    turns = []
    for number in range(shape.turns):
        length = _length(shape.turn_tokens if number else shape.opening_tokens, rng)
        new = tuple(_token(rng) for _ in range(length))
        if not number:
            new = tuple(_token(common) for _ in range(shape.shared_tokens)) + new
        wait_s = rng.expovariate(1 / pause_s) if number and pause_s else 0.0
        turns.append(SessionTurn(new, _length(shape.answer_tokens, rng), wait_s))
    return Session(started_s, tuple(turns))


def reusable_share(shape: SessionShape, sessions: Sequence[Session]) -> float:
    """Share of the prompt tokens that an earlier prompt or answer has."""
    whole = new = 0
    for session in sessions:
        said = 0
        for turn in session.turns:
            said += len(turn.new_tokens)
            whole += said
            new += len(turn.new_tokens)
            said += turn.answer_tokens
    new -= max(len(sessions) - 1, 0) * shape.shared_tokens
    return 1 - new / whole if whole else 0.0


def trace_rows(
    shape: SessionShape, sessions: Sequence[Session], ttft_s: float, tbt_s: float
) -> list[TraceRow]:
    """Returns the sessions as a trace in blocks of TRACE_BLOCK_TOKENS, as if every answer had this
    TTFT and this TBT. It can be computed before any request is served."""
    rows = []
    names = _BlockNames(shape.shared_tokens // TRACE_BLOCK_TOKENS)
    for number, session in enumerate(sessions):
        at_s, said = session.started_s, 0
        for place, turn in enumerate(session.turns):
            at_s += turn.think_s
            said += len(turn.new_tokens)
            ids = names.of(number, place, said)
            rows.append(TraceRow(at_s, said, turn.answer_tokens, ids, str(number)))
            said += turn.answer_tokens
            at_s += ttft_s + turn.answer_tokens * tbt_s
    return sorted(rows, key=lambda row: row.arrived_s)


class _BlockNames:
    """Numbers of blocks: equal numbers mean equal prefixes."""

    def __init__(self, num_shared: int) -> None:
        self._num_shared = num_shared
        self._numbers: dict[tuple[int, ...], int] = {}

    def of(self, session: int, turn: int, tokens: int) -> tuple[int, ...]:
        full, rest = divmod(tokens, TRACE_BLOCK_TOKENS)
        keys: list[tuple[int, ...]] = [
            (block,) if block < self._num_shared else (session, block) for block in range(full)
        ]
        if rest:
            keys.append((session, turn, -1))  # the next prompt fills this block up
        return tuple(self._numbers.setdefault(key, len(self._numbers)) for key in keys)


def _length(median: int, rng: random.Random) -> int:
    factor = math.exp(rng.gauss(0.0, SPREAD))
    return max(4, round(median * min(max(factor, LEAST), MOST)))


def _token(rng: random.Random) -> int:
    return rng.randrange(FIRST_ORDINARY, LAST_ORDINARY)
