"""Plays programs of agents to routers, as `moonpool bench routers` does.

With `MOONPOOL_ROUTER_PYTHON`, the Python of an installation of vllm-router, that router is tested,
too.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from benchmarks.suite.conversations.player import (
    PlayedTurn,
    play_sessions,
    program_figures,
)
from benchmarks.suite.conversations.sessions import Session, SessionShape, make_session
from benchmarks.suite.routers.engines import EngineFleet, start_engines
from benchmarks.suite.routers.fronts import FrontPythons, start_front
from benchmarks.suite.routers.stub_server import COMPLETIONS, StubServer
from benchmarks.suite.routers.timed_engine import EngineSize, EngineSpeed
from moonpool.types import Slo
from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh

pytestmark = pytest.mark.live

FAST = 0.1
LOOSE = Slo(ttft_s=60.0, tbt_s=60.0)
SHAPE = SessionShape("agents", 32, 48, 32, 8, 3, 0.05)
GO_ON_S = 60.0
NUM_PROGRAMS = 4


def programs() -> list[list[Session]]:
    return [[make_session(SHAPE, 0.0, random.Random(n), 1)] for n in range(NUM_PROGRAMS)]


def play(url: str, *others: str, seconds: float = 0.2) -> list[PlayedTurn]:
    """Plays programs that begin at the same time, and of which most calls come after `seconds`."""
    return asyncio.run(play_sessions(url, programs(), LOOSE, seconds, others, GO_ON_S))


class Refusing:
    """Puts a stub in front of a server that refuses every second call."""

    def __init__(self, statuses: tuple[int, ...], retry_after: bytes = b"0") -> None:
        self._stub = StubServer("m", EngineSize(), EngineSpeed(factor=FAST), None)
        self._statuses, self._retry_after = statuses, retry_after
        self.num_refused = self._num_calls = 0

    async def __call__(
        self, scope: dict[str, Any], receive: Any, send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["path"] == COMPLETIONS:
            self._num_calls += 1
            if self._num_calls % 2:
                status = self._statuses[self.num_refused % len(self._statuses)]
                self.num_refused += 1
                headers = [(b"retry-after", self._retry_after), (b"content-length", b"2")]
                start = {"type": "http.response.start", "status": status, "headers": headers}
                await send(start)
                await send({"type": "http.response.body", "body": b"{}"})
                return
        await self._stub(scope, receive, send)

    async def play(self) -> list[PlayedTurn]:
        port = free_port()
        config = uvicorn.Config(self, port=port, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        tasks = [asyncio.create_task(server.serve()), asyncio.create_task(self._stub.run())]
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{port}"
            return await play_sessions(url, programs(), LOOSE, 0.2, (), GO_ON_S)
        finally:
            server.should_exit = True
            await tasks[0]
            tasks[1].cancel()


def test_a_refused_call_is_tried_again_as_clients_do() -> None:
    refusing = Refusing((429, 503))
    found = program_figures(asyncio.run(refusing.play()))
    assert found["finished"] == found["begun"] == NUM_PROGRAMS
    assert found["calls"] == NUM_PROGRAMS * SHAPE.turns
    assert found["refusals"] == refusing.num_refused > 0


def test_a_program_ends_with_a_call_that_can_never_be_served() -> None:
    refusing = Refusing((422,))
    played = asyncio.run(refusing.play())
    found = program_figures(played)
    assert found["refusals"] == refusing.num_refused > 0
    lost = {turn.call.number for turn in played if turn.call is not None and turn.status == 422}
    assert len(lost) == refusing.num_refused, "none of them went on"
    assert found["finished"] == NUM_PROGRAMS - len(lost)


@pytest.mark.parametrize("router", ["round-robin", "vllm-programs"])
def test_programs_finish_behind_a_router(router: str) -> None:
    python = os.environ.get("MOONPOOL_ROUTER_PYTHON", "")
    if router.startswith("vllm") and not python:
        pytest.skip("needs vllm-router: MOONPOOL_ROUTER_PYTHON")
    fleet = EngineFleet(speeds=(FAST, FAST))
    with (
        start_engines(fleet) as engines,
        start_front(router, fleet, engines, FrontPythons(router=python), LOOSE) as front,
    ):
        found = program_figures(play(front.url, *front.others))
        assert (found["begun"], found["finished"]) == (NUM_PROGRAMS, NUM_PROGRAMS)
        assert found["makespan_s"]["p50"] > 0
        if front.pid:
            told = fresh.get(f"{front.url}/scheduling/diagnostics").json()
            samples = [rank["rolling"]["request_samples"] for rank in told["ranks"]]
            assert sum(samples) == found["calls"], "each call was one of a program"
            assert [rank["configured_token_capacity"] for rank in told["ranks"]] == [
                fleet.kv_tokens,
                fleet.kv_tokens,
            ]
