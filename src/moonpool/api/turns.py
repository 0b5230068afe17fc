"""Turns at something that serves few calls at a time: the tenants take them one after the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from moonpool.api.frontend import RequestRefused

MAX_WAITING = 128
MAX_WAITING_OF_TENANT = 96


class FairTurns:
    """`async with turns.turn(tenant)` holds a turn. What waits is bounded."""

    def __init__(self, what: str, code: str, places: int = 1, most_waiting: int = 0) -> None:
        """A call too many is refused with `code`, and a text with `what`: "large bodies wait".
        `places`: turns at a time. `most_waiting`: another bound, for one tenant too; 0: the usual.
        """
        self._what = what
        self._code = code
        self._num_free = places
        self._most_waiting = most_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # next tenant first
        self._num_waiting = 0

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        own = self._waiting.get(tenant, ())
        most, most_own = self._most_waiting or MAX_WAITING, MAX_WAITING_OF_TENANT
        if self._num_waiting >= most or len(own) >= (self._most_waiting or most_own):
            text = f"Too many {self._what}. Send the request again later."
            raise RequestRefused(503, self._code, text, 5.0)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the turn came at the same moment
            raise

    def _pass_on(self) -> None:
        """Gives the turn to the next tenant's oldest call."""
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            turn = turns.popleft()
            self._num_waiting -= 1
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return  # the place stays taken, by that call
        self._num_free += 1
