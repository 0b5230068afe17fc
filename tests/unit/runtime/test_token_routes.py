"""Tests that an instance's tokens go to the front that waits for them, and that the head learns of
all tokens in time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from moonpool.head.fronts.front_process import DirectServer
from moonpool.link.token_routes import TokenRoutes
from moonpool.protocol.direct_tokens import DirectWork
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    AttemptTokens,
    Report,
    ReserveDecode,
    StartPrefill,
    StepTokens,
    TokenRoute,
)
from moonpool.types import FinishReason, InstanceId, SamplingParams, Slo, Token

SECRET = bytes(range(32))


class Desk:
    """Runs one instance and one front, and records the messages that reach the head."""

    def __init__(self) -> None:
        # the tokens of each request, by its number
        self.direct: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.reports: list[Report] = []
        self.server = DirectServer(SECRET, self._on_tokens)
        self.routes = TokenRoutes(
            InstanceId("d"), SECRET, None, lambda: "127.0.0.1", self._on_reports
        )
        self.port = 1

    def _on_tokens(self, work: DirectWork) -> None:
        for offset, token in enumerate(work.tokens):
            self.direct[work.number].append((work.position + offset, token.token_id))

    def _on_reports(self, reports: Iterable[Report]) -> None:
        self.reports += reports

    def begin(self, name: str, number: int, decodes: bool = False, generated: int = 0) -> None:
        route = TokenRoute(front="f", port=self.port, number=number, attempt=1)
        work = AttemptSpec(
            attempt_id=AttemptId(name),
            token_ids=[1] * (4 + generated),
            num_prompt_tokens=4,
            sampling=SamplingParams(),
            slo=Slo(ttft_s=1.0, tbt_s=1.0),
            tenant="",
            use_cache=True,
            timeout_s=9.0,
            route=route,
        )
        self.routes.note(ReserveDecode(attempt=work) if decodes else StartPrefill(attempt=work))

    def step(self, gap_s: float = 0.0, finish: str = "", **ids: int) -> None:
        """Runs a step in which these attempts draw these tokens."""
        works = tuple(
            AttemptTokens(
                AttemptId(name), (Token(each),), FinishReason.LENGTH if name == finish else None
            )
            for name, each in ids.items()
        )
        self.routes.report([StepTokens(attempts=works, gap_s=gap_s)])

    def heard(self, name: str) -> list[int]:
        """Returns the tokens of an attempt that the head knows."""
        steps = [each for each in self.reports if isinstance(each, StepTokens)]
        items = [item for step in steps for item in step.attempts if item.attempt_id == name]
        return [token.token_id for item in items for token in item.tokens]

    async def settles(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)


def play(script: Callable[[Desk], Coroutine[Any, Any, None]], listens: bool = True) -> None:
    async def run() -> None:
        desk = Desk()
        if listens:
            desk.port = await desk.server.listen("127.0.0.1", None)
        try:
            await script(desk)
        finally:
            desk.routes.reset()
            desk.server.close()

    asyncio.run(run())


async def connected(desk: Desk) -> None:
    """Waits until tokens go directly to the front. Earlier tokens go through the head."""
    desk.begin("warm", 99)
    for token in range(6000):
        desk.step(warm=token)
        await asyncio.sleep(0.005)
        if desk.direct[99]:
            break
    desk.routes.note(Abort(attempt_id=AttemptId("warm")))
    desk.reports.clear()


def test_tokens_go_directly_and_the_head_hears_of_all() -> None:
    async def script(desk: Desk) -> None:
        await connected(desk)
        desk.begin("a", 1)
        desk.begin("b", 2, decodes=True, generated=3)
        desk.step(a=10)
        assert desk.heard("a") == [10], "the first token at once"
        desk.step(a=11, b=20)
        desk.step(a=12, b=21)
        assert desk.heard("a") == [10], "the others later"
        await desk.settles(lambda: desk.heard("a") == [10, 11, 12])
        assert desk.heard("b") == [20, 21]
        desk.step(a=13, b=22)
        desk.step(finish="a", a=14, b=23)
        assert desk.heard("a") == [10, 11, 12, 13, 14], "the last with all before it"
        last = desk.reports[-1]
        assert isinstance(last, StepTokens)
        ended = next(item for item in last.attempts if item.attempt_id == "a")
        assert (len(ended.tokens), ended.num_direct) == (2, 1), "the head delivers the last one"
        await desk.settles(lambda: len(desk.direct[2]) == 4)
        assert desk.direct[1] == [(0, 10), (1, 11), (2, 12), (3, 13)]
        assert desk.direct[2] == [(4, 20), (5, 21), (6, 22), (7, 23)], "the head has the first"

    play(script)


def test_steps_of_the_same_decodes_keep_their_gap() -> None:
    async def script(desk: Desk) -> None:
        await connected(desk)
        desk.begin("a", 1)
        desk.begin("b", 2)
        desk.step(a=1, b=2)
        desk.reports.clear()
        for number in range(3):
            desk.step(0.02, a=number, b=number)
        await desk.settles(lambda: bool(desk.reports))
        (report,) = desk.reports
        assert isinstance(report, StepTokens)
        assert [len(item.tokens) for item in report.attempts] == [3, 3]
        assert abs(report.gap_s - 0.02) < 1e-9

    play(script)


def test_other_reports_of_an_attempt_come_after_its_tokens() -> None:
    async def script(desk: Desk) -> None:
        await connected(desk)
        desk.begin("a", 1)
        desk.step(a=1)
        desk.step(a=2)
        failed = AttemptFailed(attempt_id=AttemptId("a"), reason="engine_error", message="")
        desk.routes.report([failed])
        assert desk.heard("a") == [1, 2]
        assert desk.reports[-1] == failed

    play(script)


def test_without_the_front_all_tokens_go_by_the_head() -> None:
    async def script(desk: Desk) -> None:
        desk.begin("a", 1)
        for token in range(5):
            desk.step(a=token)
            await asyncio.sleep(0.01)
        desk.step(finish="a", a=5)
        steps = [each for each in desk.reports if isinstance(each, StepTokens)]
        assert desk.heard("a") == [0, 1, 2, 3, 4, 5]
        assert not any(item.num_direct for step in steps for item in step.attempts)

    play(script, listens=False)


def test_a_stranger_cannot_send_tokens() -> None:
    async def script(desk: Desk) -> None:
        stranger = TokenRoutes(
            InstanceId("x"), bytes(32), None, lambda: "127.0.0.1", lambda reports: None
        )
        desk.routes, own = stranger, desk.routes
        desk.begin("a", 1)
        for token in range(40):
            desk.step(a=token)
            await asyncio.sleep(0.01)
        stranger.reset()
        desk.routes = own
        assert not desk.direct

    play(script)
