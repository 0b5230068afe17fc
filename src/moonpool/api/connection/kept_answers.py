"""Keeps the answers under way and, for a while, answers whose clients have lost their connections.

A client that sends the same call again with the same `X-Request-Id` gets the tokens that are known,
and the rest is computed. The logs are the same by which another head continues an answer
(`kept_stream`).
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from moonpool.api.connection.kept_stream import Delivered, KeptStream, StreamFacts
from moonpool.api.connection.poison import Enders
from moonpool.api.sharing.shared_buffer import oldest_of_most
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.head")

CUT_S = 300.0
"""How long an answer is kept after its connection was lost."""
MAX_CUT = 1024
MAX_CUT_BYTES = 128 << 20
MAX_RETURNS = 8
"""How often an answer may continue without another admission. After that it is computed as a new
request."""
DISPLACE_LOOKS, DISPLACE_LOOK_S = 100, 0.01
"""Time for the old connection of a client to end after the client has come back over another
one."""


class Known(NamedTuple):
    """The known part of an answer."""

    facts: StreamFacts
    deliveries: list[Delivered]
    num_returns: int


class AnswerFollower(Protocol):
    """A part that copies the logs of answers, identified by their numbers."""

    def changed(self, kept: KeptStream) -> None: ...

    def ended(self, number: int) -> None: ...


class KeptAnswers:
    """`followers`: objects that are told of each log for which a client may come back."""

    def __init__(self) -> None:
        self.followers: list[AnswerFollower] = []
        self.enders = Enders()
        self._running: dict[int, tuple[KeptStream, Callable[[], None]]] = {}
        self.cut: OrderedDict[int, KeptStream] = OrderedDict()
        """Answers whose clients have lost their connections, by number, the oldest first."""
        self._num_bytes: dict[int, int] = {}  # bytes of the log of each of these answers
        self._num_cut_bytes = 0

    def __iter__(self) -> Iterator[KeptStream]:
        yield from self.cut.values()
        for kept, _ in self._running.values():
            yield kept

    def begin(self, kept: KeptStream, end: Callable[[], None]) -> None:
        """Notes that an answer is under way. `end`: ends the connection over which the answer is
        sent."""
        if kept.opening.digest:
            self._running[kept.number] = (kept, end)
            self._follow(kept)

    def drop(self, kept: KeptStream) -> None:
        """Notes that the response is complete."""
        self._drop(kept)
        for other in self._alike(kept):  # this client has moved on to the answer `kept`
            self.forget(other.number)

    def lose(self, kept: KeptStream) -> None:
        """Notes that the connection ended before the response was complete."""
        self._running.pop(kept.number, None)
        if not (kept.opening.digest and kept.may_come_again and kept.log.is_kept):
            self._drop(kept)
            return
        for other in self._alike(kept):
            self.forget(other.number)
        kept.cut()
        self.hold(kept)

    def adopt(self, kept: KeptStream) -> None:
        """Holds an answer that an earlier head was sending when its connection ended."""
        self.hold(kept)
        self._follow(kept)

    async def find(
        self, tenant: str, request_id: str, digest: bytes, displaces: bool
    ) -> Known | None:
        """Returns the known part of the answer, if the call was sent before. `displaces`: a running
        call with the same content ends, because its client has lost it."""
        name = (tenant, request_id, digest)
        if displaces:
            ends = [end for kept, end in self._running.values() if _name(kept) == name]
            for end in ends:
                end()
            for _ in range(DISPLACE_LOOKS if ends else 0):
                if not any(_name(kept) == name for kept, _ in self._running.values()):
                    break
                await asyncio.sleep(DISPLACE_LOOK_S)
        found = next((kept for kept in self.cut.values() if _name(kept) == name), None)
        if found is not None and found.num_returns >= MAX_RETURNS:
            self.forget(found.number)
            found = None
        if found is None:
            return None
        found.num_returns += 1
        try:
            deliveries = found.read_deliveries()
        except (OSError, ValueError) as error:
            log.warning("an answer is computed again: %s", error)
            self.forget(found.number)
            return None
        return Known(found.opening.facts, deliveries, found.num_returns)

    def hold(self, kept: KeptStream) -> None:
        """Keeps an answer whose client has lost the connection, and may come back."""
        self.cut[kept.number] = kept
        self._num_bytes[kept.number] = kept.log.num_bytes
        self._num_cut_bytes += kept.log.num_bytes
        while len(self.cut) > MAX_CUT or self._num_cut_bytes > MAX_CUT_BYTES:
            self.forget(oldest_of_most(self._cut_sizes()))
        loop = asyncio.get_running_loop()
        loop.call_later(CUT_S, self.forget, kept.number)

    def _cut_sizes(self) -> Iterator[tuple[int, str, float]]:
        """Yields the number and the tenant of each answer that is held, and its share of the room
        for answers."""
        for number, kept in self.cut.items():
            share = 1 / MAX_CUT + self._num_bytes[number] / MAX_CUT_BYTES
            yield number, kept.opening.tenant, share

    def _drop(self, kept: KeptStream) -> None:
        kept.drop()
        self._running.pop(kept.number, None)
        for follower in self.followers:
            follower.ended(kept.number)

    def _follow(self, kept: KeptStream) -> None:
        kept.on_write = functools.partial(self._on_write, kept)
        self._on_write(kept)

    def _on_write(self, kept: KeptStream) -> None:
        for follower in self.followers:
            follower.changed(kept)

    def _alike(self, kept: KeptStream) -> list[KeptStream]:
        return [other for other in self.cut.values() if _name(other) == _name(kept)]

    def forget(self, number: int) -> None:
        """Drops an answer whose client does not come back."""
        kept = self.cut.pop(number, None)
        if kept is not None:
            self._num_cut_bytes -= self._num_bytes.pop(number)
            self._drop(kept)


def _name(kept: KeptStream) -> tuple[str, str, bytes]:
    opening = kept.opening
    return opening.tenant, opening.facts.request_id, opening.digest
