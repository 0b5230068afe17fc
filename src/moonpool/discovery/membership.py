"""Decides which listed servers serve: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.discovery.listed_server import ListedServer

ABSENT_S = 3.0
"""A server that is missing for this long leaves. A DNS server may leave out some for a moment."""
STEADY_S = 60.0
"""A server that served this long does not flap."""
HOLD_OFFS_S = (0.0, 5.0, 15.0, 60.0, 300.0)
"""Time from the first, second, ... short stay of a server until it may join again."""
MAX_SERVERS = 64
"""Each has a process of some 60 MB on this machine."""


@dataclass(frozen=True, slots=True)
class JoinServer:
    server: ListedServer


@dataclass(frozen=True, slots=True)
class DrainServer:
    """It gets no more requests, and ends when it has none."""

    server: ListedServer


@dataclass(frozen=True, slots=True)
class HoldServerOff:
    """It comes and goes; it joins after `for_s`, if it is then listed."""

    server: ListedServer
    for_s: float


@dataclass(frozen=True, slots=True)
class TooManyServers:
    num_left_out: int


MembershipAction = JoinServer | DrainServer | HoldServerOff | TooManyServers


@dataclass(slots=True)
class _Known:
    server: ListedServer
    joined_s: float | None = None
    seen_s: float = 0.0
    num_short: int = 0
    free_s: float = 0.0  # it may not join before
    is_told: bool = False  # that it is held off


class Membership:
    """`see` takes what the sources list now. A server is known by its name: if its address or role
    changes, it is another server, which joins when the former has left."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._num_left_out = 0

    @property
    def joined(self) -> list[ListedServer]:
        return [each.server for each in self._known.values() if each.joined_s is not None]

    def adopt(self, servers: Sequence[ListedServer], now_s: float) -> None:
        """Notes that these servers serve already."""
        for server in servers:
            self._known[server.name] = _Known(server, now_s, now_s)

    def see(self, listed: Sequence[ListedServer], now_s: float) -> list[MembershipAction]:
        actions: list[MembershipAction] = []
        by_name = {server.name: server for server in listed}
        for known in self._known.values():
            wanted = by_name.get(known.server.name)
            if wanted == known.server:
                known.seen_s = now_s
            elif known.joined_s is not None and (wanted or now_s - known.seen_s >= ABSENT_S):
                actions.append(DrainServer(known.server))
                self._note_left(known, now_s, moved=wanted is not None)
        num_joined = len(self.joined)
        num_left_out = 0
        for server in by_name.values():
            known = self._known.setdefault(server.name, _Known(server))
            if known.joined_s is not None:
                continue
            known.server, known.seen_s = server, now_s
            if now_s < known.free_s:
                if not known.is_told:
                    actions.append(HoldServerOff(server, known.free_s - now_s))
                    known.is_told = True
            elif num_joined >= MAX_SERVERS:
                num_left_out += 1
            else:
                num_joined += 1
                known.joined_s, known.is_told = now_s, False
                actions.append(JoinServer(server))
        if num_left_out > self._num_left_out:
            actions.append(TooManyServers(num_left_out))
        self._num_left_out = num_left_out
        self._forget(now_s)
        return actions

    def _note_left(self, known: _Known, now_s: float, moved: bool) -> None:
        assert known.joined_s is not None
        is_short = now_s - known.joined_s < STEADY_S and not moved
        known.num_short = min(known.num_short + 1, len(HOLD_OFFS_S) - 1) if is_short else 0
        known.free_s = now_s + HOLD_OFFS_S[known.num_short]
        known.joined_s = None

    def _forget(self, now_s: float) -> None:
        """Short stays of names that were used once do not add up."""
        past = [
            name
            for name, each in self._known.items()
            if each.joined_s is None and now_s - each.seen_s > HOLD_OFFS_S[-1] + STEADY_S
        ]
        for name in past:
            del self._known[name]
