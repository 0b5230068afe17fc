"""All fronts of one head: what they share."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from moonpool.api.cluster_view import OwnClusterView
from moonpool.api.keys import TenantLimits
from moonpool.api.rate_limits import RateLimits
from moonpool.head.fronts.front_link import FrontLink
from moonpool.head.fronts.messages import (
    AnswerFetched,
    AnswerName,
    AskHead,
    FetchAnswer,
    HoldAnswer,
)
from moonpool.protocol.frames import AnswersCopied
from moonpool.protocol.messages import Report, StepTokens, request_of
from moonpool.types import RequestId

if TYPE_CHECKING:
    from moonpool.head.head import ClusterHead

STAGES_S = 1.0
"""How often fronts are told what silent requests do."""
MAX_FRONTS = 64
FETCH_S = 5.0
"""How long another front may take to give an answer away."""


class FrontLinks:
    """`limits`: the limits of tenants, which hold for all fronts together."""

    def __init__(self, head: ClusterHead, limits: Mapping[str, TenantLimits]) -> None:
        self.rates = RateLimits(limits)
        self.names: set[RequestId] = set()
        self.num_direct: dict[RequestId, int] = {}
        self._head = head
        self._view = OwnClusterView(head)
        self._links: dict[int, FrontLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}  # for answers of other fronts
        self._numbers = itertools.count()
        self._copied: dict[int, set[int]] = {}  # what a standby follows, by front
        self._stages_s = time.monotonic()

    async def add(self, number: int, sock: socket.socket) -> None:
        """Adds a front. `number`: its place; an earlier one there has ended."""
        link = FrontLink(self._head, self, number, self._spawn)
        before = self._links.get(number)
        if before is not None:
            before.close()
        self._links[number] = link
        await link.open(sock)
        for other in self.others(link):
            for name in other.held:
                link.send(HoldAnswer(name))

    def tick(self) -> None:
        """Tells the fronts what changes with time."""
        self.tell()
        now = time.monotonic()
        if now - self._stages_s >= STAGES_S:
            self._stages_s = now
            for link in self._links.values():
                link.tell_stages()

    def tell(self) -> None:
        """Tells the fronts when something of the models or of the head may have changed."""
        for link in self._links.values():
            link.tell_state()

    @contextmanager
    def hears(self, report: Report) -> Iterator[None]:
        """A context in which the report of an instance is handled: the head does not send what
        fronts have received directly."""
        if isinstance(report, StepTokens):
            self.num_direct = {
                request_of(work.attempt_id): work.num_direct
                for work in report.attempts
                if work.num_direct
            }
        try:
            yield
        finally:
            self.num_direct = {}

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "front": number,
                "requests_under_way": link.num_answers,
                "tokens": link.num_tokens,
                "direct_tokens": link.num_direct_tokens,
            }
            for number, link in sorted(self._links.items())
        ]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The fronts' host

    def on_gone(self, link: FrontLink) -> None:
        if self._links.get(link.number) is link:
            del self._links[link.number]

    def others(self, link: FrontLink) -> list[FrontLink]:
        return [other for other in self._links.values() if other is not link]

    def holder(self, name: AnswerName) -> FrontLink | None:
        return next((link for link in self._links.values() if name in link.held), None)

    def fetch(self, link: FrontLink, fetch: FetchAnswer) -> None:
        """Asks the front that holds the answer, or with `displaces` those that may run it."""
        holder = self.holder(fetch.name)
        asked = [holder] if holder is not None else self.others(link) if fetch.displaces else []
        asked = [each for each in asked if each is not link]
        if not asked:
            link.send(AnswerFetched(fetch.number, b""))
            return
        self._spawn(self._fetch(link, fetch, asked))

    async def _fetch(self, link: FrontLink, fetch: FetchAnswer, asked: list[FrontLink]) -> None:
        """Asks one front after another: at most one of them has the answer."""
        known = b""
        for each in asked:
            number = next(self._numbers)
            found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._waiting[number] = found
            each.send(FetchAnswer(number, fetch.name, fetch.displaces))
            try:
                known = await asyncio.wait_for(found, FETCH_S)
            except TimeoutError:
                known = b""
            finally:
                del self._waiting[number]
            if known:
                break
        link.send(AnswerFetched(fetch.number, known))

    def copy(self, number: int, copied: AnswersCopied) -> None:
        """Sends the standby what is new in a front's answers, under numbers of its own."""

        def own(answer: int) -> int:
            return answer * MAX_FRONTS + number

        begun = tuple(replace(each, number=own(each.number)) for each in copied.begun)
        ended = [own(answer) for answer in copied.ended]
        known = self._copied.setdefault(number, set())
        if copied.is_first:  # of this front: what it does not begin again is over
            ended += known - {each.number for each in begun}
        known.update(each.number for each in begun)
        known.difference_update(ended)
        grown = tuple((own(answer), data) for answer, data in copied.grown)
        self._head.standbys.copy(AnswersCopied(begun=begun, grown=grown, ended=tuple(ended)))

    def on_fetched(self, fetched: AnswerFetched) -> None:
        found = self._waiting.get(fetched.number)
        if found is not None and not found.done():
            found.set_result(fetched.known)

    async def ask(self, question: AskHead) -> Any:
        """What `ClusterView` says."""
        if question.question == "num_calls":
            return sum(link.num_calls for link in self._links.values())
        answer = getattr(self._view, question.question)  # one of `Question`, as decoded
        return await answer(*question.arguments)
