"""Tests the start, the end and a stop of helper processes of the API."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from moonpool.api.grammars.check import MODULE
from moonpool.api.helpers import process as process_module
from moonpool.api.helpers.process import Helper, HelperEndedError, HelperProcess
from moonpool.api.serving_backend import RequestRefused

GRAMMAR = b'{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'


def test_a_start_that_nobody_waits_for_any_more_is_the_start_of_the_next() -> None:
    """A call whose deadline passes while the process starts leaves no second process behind."""

    async def run() -> None:
        helper = Helper(lambda: HelperProcess(MODULE))
        process = helper.current()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.start(b"", 60.0), 0.001)
        assert helper.current() is process
        assert await process.start(b"", 60.0) == b""
        pid = process.pid
        assert await process.ask(GRAMMAR, 60.0) == b""
        assert process.pid == pid and process.num_replies == 2
        helper.close()
        with pytest.raises(RequestRefused, match="stopping"):
            helper.current()

    asyncio.run(run())


def test_the_oldest_work_is_the_one_that_a_process_ended_with() -> None:
    async def run() -> None:
        process = HelperProcess(MODULE)
        await process.start(b"", 60.0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        works = [asyncio.create_task(process.ask(GRAMMAR, 60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        found = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(one, HelperEndedError) for one in found)
        assert [one.is_of_the_work for one in found] == [True, False, False]  # type: ignore[union-attr]
        with pytest.raises(HelperEndedError) as late:
            await process.ask(GRAMMAR, 60.0)
        assert (late.value.status, late.value.is_of_the_work) == (-signal.SIGKILL, False)

    asyncio.run(run())


def test_a_process_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "LATE_S", 0.0)

    async def run() -> None:
        process = HelperProcess(MODULE)
        await process.start(b"", 60.0)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(HelperEndedError) as stopped:
            await process.ask(GRAMMAR, 0.1)
        assert stopped.value.is_of_the_work and not stopped.value.took_too_long

    asyncio.run(run())
