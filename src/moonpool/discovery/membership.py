"""Decides which listed servers serve: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.discovery.endpoint import Endpoint
from moonpool.retry_delays import RetryDelays

HOLD_OFFS = RetryDelays((0.0, 5.0, 15.0, 60.0, 300.0), steady_s=60.0)
"""Hold-offs after short stays in a row; the first short stay costs nothing, because servers
restart."""


class HoldOff:
    """The hold-off of one server."""

    def __init__(self) -> None:
        self._num_short = 0

    def after_stay(self, stay_s: float) -> float:
        """Returns how long a server that has left must not join, 0 or more seconds."""
        if stay_s >= HOLD_OFFS.steady_s:
            self._num_short = 0
            return 0.0
        self._num_short += 1
        return HOLD_OFFS.after(self._num_short)


@dataclass(frozen=True, slots=True)
class JoinServer:
    server: Endpoint


@dataclass(frozen=True, slots=True)
class DrainServer:
    """The server gets no more requests, and ends when it has none."""

    server: Endpoint


@dataclass(frozen=True, slots=True)
class HoldServerOff:
    """The server comes and goes, so it joins after `for_s`, if it is then still listed."""

    server: Endpoint
    for_s: float


@dataclass(frozen=True, slots=True)
class TooManyServers:
    num_left_out: int


MembershipAction = JoinServer | DrainServer | HoldServerOff | TooManyServers


@dataclass(slots=True)
class _Known:
    server: Endpoint
    joined_s: float | None = None
    seen_s: float = 0.0
    free_s: float = 0.0  # time before which the server may not join
    is_told: bool = False  # whether a line was logged that the server is held off
    hold_off: HoldOff = field(default_factory=HoldOff)


class Membership:
    """`see` gets what the sources list now. A server is known by its name: if its address or role
    changes, it is another server, which joins when the former has left."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: the most servers that may serve at a time, or None without a limit."""
        self._most = most
        self._known: dict[str, _Known] = {}
        self._num_left_out = 0

    @property
    def joined(self) -> list[Endpoint]:
        return [each.server for each in self._known.values() if each.joined_s is not None]

    def adopt(self, servers: Iterable[Endpoint], now_s: float) -> None:
        """Adds servers that serve already."""
        for server in servers:
            self._known[server.name] = _Known(server, now_s, now_s)

    def see(self, listed: Sequence[Endpoint], now_s: float) -> list[MembershipAction]:
        actions: list[MembershipAction] = []
        by_name = {server.name: server for server in listed}
        for known in self._known.values():
            wanted = by_name.get(known.server.name)
            if wanted != known.server and known.joined_s is not None:
                actions.append(DrainServer(known.server))
                self._note_left(known, now_s)
        num_joined = len(self.joined)
        num_left_out = 0
        for server in by_name.values():
            known = self._known.setdefault(server.name, _Known(server))
            known.seen_s = now_s
            if known.joined_s is not None:
                continue
            known.server = server
            if now_s < known.free_s:
                if not known.is_told:
                    actions.append(HoldServerOff(server, known.free_s - now_s))
                    known.is_told = True
            elif self._most is not None and num_joined >= self._most:
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

    def _note_left(self, known: _Known, now_s: float) -> None:
        """Decides until when the server may not join. A server that moves has left, too: it may
        crash and be started elsewhere each time."""
        assert known.joined_s is not None
        known.free_s = now_s + known.hold_off.after_stay(now_s - known.joined_s)
        known.seen_s, known.joined_s = now_s, None

    def _forget(self, now_s: float) -> None:
        """Forgets servers that have been gone for long: names that were used once must not
        accumulate."""
        since_s = now_s - HOLD_OFFS.delays_s[-1] - HOLD_OFFS.steady_s
        past = [
            name
            for name, each in self._known.items()
            if each.joined_s is None and each.seen_s < since_s
        ]
        for name in past:
            del self._known[name]
