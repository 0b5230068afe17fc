"""Streams that run all the time, when each of their pieces arrived, and how each ended."""

from __future__ import annotations

import asyncio
import bisect
import threading
from collections.abc import Sequence
from itertools import pairwise
from time import monotonic
from typing import Any

from benchmarks.suite.live.kills.calls import (
    Body,
    ResponseError,
    Texts,
    encoded,
    headers_of,
    texts_of,
)
from moonpool.http_client.client import ConnectionFailedError, HttpClient

CALL_S = 240.0
OUTCOMES = ("right", "wrong", "refused", "cut", "hung")


class Reply:
    """One call: when it was sent, when each piece of its response arrived, and how it ended."""

    def __init__(self, number: int, is_stream: bool) -> None:
        self.number = number
        self.is_stream = is_stream
        self.sent_s = monotonic()
        self.arrivals: list[float] = []
        self.ended_s: float | None = None
        self.outcome = ""
        self.detail = ""
        self.path = ""
        self.status = 0
        self.data = bytearray()

    def on_start(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def on_body(self, data: bytes, now_s: float) -> None:
        self.data += data
        if not self.arrivals or self.arrivals[-1] < now_s:
            self.arrivals.append(now_s)

    def ran_at(self, at_s: float) -> bool:
        return self.sent_s <= at_s and (self.ended_s is None or self.ended_s > at_s)

    def pause(self, from_s: float, until_s: float, now_s: float) -> float | None:
        """The longest time between two pieces within this span, whose first one may have come
        before it; None without a piece before."""
        first = bisect.bisect_right(self.arrivals, from_s) - 1
        if first < 0:
            return None
        last = bisect.bisect_left(self.arrivals, until_s)
        times = self.arrivals[first:last]
        if last < len(self.arrivals) or self.ended_s is None:
            times.append(min(until_s, now_s))  # the call still waited
        return max((b - a for a, b in pairwise(times)), default=None)


class Load:
    """Calls to the server at `url`: as a list in order, or all the time by many clients."""

    def __init__(self, url: str, calls: Sequence[tuple[str, Body]]) -> None:
        self._url = url
        self._calls = calls
        self.replies: list[Reply] = []
        self.expected: list[Texts] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def learn(self) -> None:
        """Asks for the undisturbed answers, one after the other. Raises ResponseError."""

        async def ask_all() -> list[Texts]:
            return [await self._undisturbed(number) for number in range(len(self._calls))]

        self.expected = asyncio.run(ask_all())

    async def _undisturbed(self, number: int) -> Texts:
        reply = await self._ask(number)
        path, body = self._calls[number]
        if reply.outcome or reply.status != 200:
            text = f"{reply.outcome} {reply.status} {reply.detail or bytes(reply.data[:300])!r}"
            raise ResponseError(f"an undisturbed call to {path} failed: {text}")
        return texts_of(path, body, bytes(reply.data))

    def start(self) -> None:
        """Starts one client per call; each sends its call again as soon as it has ended."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="clients")
        self._thread.start()

    def stop(self) -> None:
        """Waits until all calls under way have ended, for `CALL_S` at most."""
        self._stopping.set()
        assert self._thread is not None
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*[self._client(number) for number in range(len(self._calls))])

    async def _client(self, number: int) -> None:
        while not self._stopping.is_set():
            reply = await self._ask(number, self.replies)
            if not reply.outcome:
                reply.outcome, reply.detail = self._judge(reply)
            reply.ended_s = monotonic()
            reply.data.clear()
            if reply.outcome in ("refused", "cut"):
                await asyncio.sleep(0.5)

    async def _ask(self, number: int, seen: list[Reply] | None = None) -> Reply:
        path, body = self._calls[number]
        reply = Reply(number, bool(body.get("stream")))
        reply.path = path
        if seen is not None:
            seen.append(reply)
        client = HttpClient(self._url)  # a connection that answered before may end with its head
        try:
            async with asyncio.timeout(CALL_S):
                await client.post(path, encoded(number, body), reply, headers_of(number))
        except TimeoutError:
            reply.outcome = "hung"
        except ConnectionFailedError as error:
            reply.outcome, reply.detail = "cut", str(error)
        finally:
            client.close()
        return reply

    def _judge(self, reply: Reply) -> tuple[str, str]:
        if reply.status != 200:
            return "refused", reply.data[:300].decode(errors="replace")
        path, body = self._calls[reply.number]
        try:
            texts = texts_of(path, body, bytes(reply.data))
        except (ResponseError, ValueError, KeyError, IndexError) as error:
            return "cut", f"{type(error).__name__}: {error}"[:300]
        expected: dict[Any, str] = self.expected[reply.number]
        return ("right", "") if texts == expected else ("wrong", f"{path} {body.get('max_tokens')}")
