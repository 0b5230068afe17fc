"""Tests that a head that is told to stop waits for its answers, for a limited time."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from moonpool.head import head_drain
from moonpool.head.head_drain import drain


class FakeHead:
    """A head that has one answer less each time that it is asked. The last `stuck` answers never
    end."""

    def __init__(self, num: int, stuck: int = 0) -> None:
        self._num, self._stuck = num, stuck
        self.calls: list[str] = []

    @property
    def num_answers(self) -> int:
        self._num = max(self._num - 1, self._stuck)
        return self._num

    def refuse_new(self) -> None:
        self.calls.append("refuse_new")

    def end_answers(self, reason: str, message: str) -> None:
        self.calls.append(reason)
        self._num = self._stuck = 0


@pytest.mark.parametrize(
    ("num", "stuck", "seconds", "calls"),
    [
        (0, 0, 60.0, ["refuse_new"]),
        (20, 0, 60.0, ["refuse_new"]),
        (20, 2, 0.01, ["refuse_new", "server_stopping"]),
        (20, 2, 0.0, ["refuse_new", "server_stopping"]),
    ],
)
def test_only_answers_that_outlast_the_drain_are_ended(
    num: int, stuck: int, seconds: float, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_drain, "POLL_S", 0.001)
    monkeypatch.setattr(head_drain, "FLUSH_S", 0.0)
    head = FakeHead(num, stuck)

    async def run() -> None:
        await asyncio.wait_for(drain(head, seconds), 30)

    uvloop.run(run())
    assert head.calls == calls
