"""The workloads: conversations, agents, and short questions beside long documents."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from benchmarks.suite.conversations.sessions import (
    MOST,
    SESSION_SHAPES,
    Session,
    SessionShape,
    arriving_sessions,
)
from moonpool.types import Struct


class RouterWorkload(Struct, frozen=True):
    """Kinds of sessions that come together, each with its share of the sessions. With `programs`
    each session is an agent's, whose calls name it."""

    name: str
    parts: tuple[tuple[SessionShape, float], ...]
    programs: bool = False

    @property
    def turns(self) -> float:
        """The mean number of requests of a session."""
        return sum(share * shape.turns for shape, share in self.parts)

    @property
    def longest_tokens(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return round(
            max(
                shape.shared_tokens
                + MOST * (shape.opening_tokens + shape.turns * shape.answer_tokens)
                + MOST * (shape.turns - 1) * shape.turn_tokens
                for shape, _ in self.parts
            )
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        RouterWorkload("conversations", ((SESSION_SHAPES["chats"], 1.0),)),
        RouterWorkload("agents", ((SESSION_SHAPES["agents"], 1.0),), programs=True),
        RouterWorkload(
            "mixed",
            (
                (SessionShape("questions", 0, 64, 0, 96, 1, 0.0), 0.8),
                (SessionShape("documents", 0, 1024, 32, 24, 2, 1.0), 0.2),
            ),
        ),
    )
}


def arriving(
    workload: RouterWorkload, sessions_per_s: float, seconds: float, seed: int
) -> list[Session]:
    """Draws sessions of all kinds with Poisson arrivals at this rate, in the order of their
    starts."""
    found = [
        session
        for number, (shape, share) in enumerate(workload.parts)
        for session in arriving_sessions(shape, share * sessions_per_s, seconds, seed + number)
    ]
    return sorted(found, key=lambda session: session.started_s)


def at_once(sessions: Sequence[Session], num_users: int) -> list[list[Session]]:
    """Returns the same sessions for this many users, none of whom pauses between sessions or
    turns."""
    chains: list[list[Session]] = [[] for _ in range(num_users)]
    for number, session in enumerate(sessions):
        turns = tuple(replace(turn, think_s=0.0) for turn in session.turns)
        chains[number % num_users].append(Session(0.0, turns))
    return chains
