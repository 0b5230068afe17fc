"""Models routers of other projects in front of the servers of `timed_vllms`, by their guides: to
which server a call goes, and when. The models are vllm-router's `cache_aware` and its scheduling of
programs.

The models are pure, like the Conductor: the handler of each event returns the calls that are sent
now, with their servers.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from moonpool.distributions import nearest_rank
from moonpool.types import RequestId

BLOCK_TOKENS = 16


class RoutedCall(NamedTuple):
    """`program` is -1 if the call names no program."""

    name: RequestId
    tokens: tuple[int, ...]
    answer_tokens: int
    program: int = -1
    ends: bool = False


Sent = list[tuple[RoutedCall, int]]


class TimedRouter(Protocol):
    """`waiting` is the number of requests that each server reports as waiting."""

    def arrived(self, call: RoutedCall, now: float) -> Sent: ...

    def ended(self, call: RoutedCall, now: float) -> Sent: ...

    def tick(self, waiting: Sequence[int], now: float) -> Sent: ...


class CacheAwareRouter:
    """Chooses the least busy server if the loads differ by `ABSOLUTE` and by `RELATIVE`. Otherwise
    chooses the server with the longest known prefix if that is half of the prompt, else the server
    that knows least."""

    LEAST_MATCH = 0.5
    ABSOLUTE, RELATIVE = 32, 1.1

    def __init__(self, num_servers: int) -> None:
        self._known: list[set[int]] = [set() for _ in range(num_servers)]
        self._num_calls = [0] * num_servers
        self._server_of: dict[RequestId, int] = {}

    def arrived(self, call: RoutedCall, now: float) -> Sent:
        prefixes = list(_prefixes(call.tokens))
        server = self._choose(prefixes)
        self._known[server].update(prefixes)
        self._num_calls[server] += 1
        self._server_of[call.name] = server
        return [(call, server)]

    def ended(self, call: RoutedCall, now: float) -> Sent:
        self._num_calls[self._server_of.pop(call.name)] -= 1
        return []

    def tick(self, waiting: Sequence[int], now: float) -> Sent:
        return []

    def _choose(self, prefixes: list[int]) -> int:
        least, most = min(self._num_calls), max(self._num_calls)
        if most - least > self.ABSOLUTE and most > least * self.RELATIVE:
            return self._num_calls.index(least)
        matches = [self._match(known, prefixes) for known in self._known]
        best = max(matches)
        if best > self.LEAST_MATCH * len(prefixes):
            return matches.index(best)
        sizes = [len(known) for known in self._known]
        return sizes.index(min(sizes))

    @staticmethod
    def _match(known: set[int], prefixes: list[int]) -> int:
        for count, prefix in enumerate(prefixes):
            if prefix not in known:
                return count
        return len(prefixes)


@dataclass(slots=True)
class _Program:
    server: int
    shared_tokens: int  # number of tokens with which all programs begin
    call: RoutedCall | None = None  # the call that is answered or waits
    is_active: bool = False  # whether the program holds its part of the server's KVCache
    last_s: float = 0.0
    held_until_s: float = inf
    tokens: int = 0  # KVCache tokens that the program needs

    def take(self, call: RoutedCall, now: float) -> None:
        self.call, self.last_s = call, now
        self.tokens = len(call.tokens) + call.answer_tokens - self.shared_tokens


class ProgramQueueRouter:
    """Gives each program a server, by its hash. A call goes to this server when no request waits
    there and the active programs leave room for it in the KVCache; both are read once a second.
    After a hundred pauses, a program stays active during a pause for the time that `SHARE_HELD` of
    the last hundred pauses took, at most 10 s. Waiting calls are sent to their own server with the
    latest first. To another server that has enough room, they are sent with the earliest first."""

    POLL_S = 1.0
    WINDOW = 100
    SHARE_HELD = 0.95
    MOST_HELD_S = 10.0
    HEADROOM = 1.2
    MOST_PROGRAMS = 64
    FORCED_AFTER_S = 300.0

    def __init__(self, num_servers: int, kv_tokens: int) -> None:
        self._kv_tokens = kv_tokens
        self._waiting = [0] * num_servers
        self._polled_s = -inf
        self._programs: dict[int, _Program] = {}
        self._pauses_s: deque[float] = deque(maxlen=self.WINDOW)
        # maps each program with a waiting call to the arrival time of the call
        self._queue: dict[int, float] = {}
        self._first: tuple[int, ...] = ()

    def arrived(self, call: RoutedCall, now: float) -> Sent:
        program = self._programs.get(call.program)
        if program is None:
            program = self._programs[call.program] = self._new(call)
        else:
            self._pauses_s.append(now - program.last_s)
        program.take(call, now)
        if program.is_active:
            program.held_until_s = inf
            return [(call, program.server)]
        self._queue[call.program] = now
        return self._send(now)

    def ended(self, call: RoutedCall, now: float) -> Sent:
        program = self._programs[call.program]
        if call.ends:
            del self._programs[call.program]
            return self._send(now)
        program.call, program.last_s = None, now
        program.held_until_s = now + self._held_s()
        return self._send(now)

    def tick(self, waiting: Sequence[int], now: float) -> Sent:
        if now - self._polled_s >= self.POLL_S:
            self._waiting, self._polled_s = list(waiting), now
        return self._send(now)

    def _new(self, call: RoutedCall) -> _Program:
        if not self._first:
            self._first = call.tokens
        shared = 0
        for own, other in zip(call.tokens, self._first, strict=False):
            if own != other or call.tokens == self._first:
                break
            shared += 1
        digest = hashlib.sha256(str(call.program).encode()).digest()
        return _Program(int.from_bytes(digest[:8]) % len(self._waiting), shared)

    def _held_s(self) -> float:
        if len(self._pauses_s) < self.WINDOW:
            return 0.0
        return min(nearest_rank(sorted(self._pauses_s), self.SHARE_HELD), self.MOST_HELD_S)

    def _free(self, server: int) -> int:
        active = [p for p in self._programs.values() if p.is_active and p.server == server]
        if len(active) >= self.MOST_PROGRAMS:
            return 0
        return self._kv_tokens - sum(program.tokens for program in active)

    def _send(self, now: float) -> Sent:
        for program in self._programs.values():
            if program.is_active and program.held_until_s <= now:
                program.is_active = False
        sent: Sent = []
        forced = [n for n, since_s in self._queue.items() if now - since_s > self.FORCED_AFTER_S]
        latest = sorted(self._queue, key=lambda number: -self._programs[number].last_s)
        for number in (*forced, *latest):
            if number in self._queue:
                program = self._programs[number]
                if number in forced or self._fits(program, program.server):
                    sent.append(self._activate(number, program.server))
        for number in list(self._queue):
            program = self._programs[number]
            least = self._free(program.server) + self.HEADROOM * program.tokens
            for server in range(len(self._waiting)):
                if self._free(server) >= least and self._fits(program, server):
                    sent.append(self._activate(number, server))
                    break
        return sent

    def _fits(self, program: _Program, server: int) -> bool:
        return not self._waiting[server] and program.tokens <= self._free(server)

    def _activate(self, number: int, server: int) -> tuple[RoutedCall, int]:
        program = self._programs[number]
        del self._queue[number]
        program.server, program.is_active, program.held_until_s = server, True, inf
        assert program.call is not None
        return program.call, server


def _prefixes(tokens: Sequence[int]) -> Iterator[int]:
    """Yields a number for each prefix in whole blocks, the shortest first."""
    number = 0
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        number = hash((number, tuple(tokens[at : at + BLOCK_TOKENS])))
        yield number
