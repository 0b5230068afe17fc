"""Turns at a resource that serves few calls at a time: the parties take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from moonpool.api.serving_backend import RequestRefused
from moonpool.api.sharing.shared_buffer import SharedBuffer

MAX_WAITING = 256


class FairTurns:
    """`async with turns.turn(party)` holds a turn. The queue of waiting calls is bounded."""

    def __init__(
        self, what: str, code: str, places: int = 1, most_waiting: int = MAX_WAITING
    ) -> None:
        """A call beyond the bound is refused with `code` and a text that contains `what`, such as
        "large bodies wait". `places`: the number of turns at the same time."""
        self._what = what
        self._code = code
        self._num_free = places
        # waiting calls by party, with the next party first
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._places = SharedBuffer(most_waiting)

    @contextlib.asynccontextmanager
    async def turn(self, party: str) -> AsyncIterator[None]:
        """`party`: the tenant or address, as in `SharedBuffer`."""
        if self._num_free:
            self._num_free -= 1
        else:
            with self._places.place(party) as found:
                if not found:
                    text = f"Too many {self._what}. Send the request again later."
                    raise RequestRefused(503, self._code, text, 5.0)
                await self._wait(party)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, party: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(party, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the turn came at the moment of cancellation
            raise

    def _pass_on(self) -> None:
        """Gives the turn to the next party's oldest call."""
        while self._waiting:
            party, turns = next(iter(self._waiting.items()))
            del self._waiting[party]
            turn = turns.popleft()
            if turns:
                self._waiting[party] = turns
            if not turn.done():
                turn.set_result(None)
                return  # the call that waits takes over the place
        self._num_free += 1
