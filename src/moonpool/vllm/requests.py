"""The requests that a server computes for its instance, from their submission to their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from moonpool.protocol.messages import AttemptId, AttemptSpec
from moonpool.vllm.actions import EngineOutput, SubmitFailed, SubmitRequest
from moonpool.vllm.client import VllmError
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.found_server import FoundServer

log = logging.getLogger("moonpool.vllm")

MISSING = 404
FORWARDED_REFUSALS = (MISSING, 405, 415, 501)
"""Statuses with which a server refuses a call that it does not serve."""


class ServerRequests:
    """`post` gets each output while its bytes are read. `spawn` starts the task of a request.
    `on_failed` gets the server's error before `post` gets the failure."""

    def __init__(
        self,
        url: str,
        post: Callable[[EngineOutput | SubmitFailed], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_failed: Callable[[VllmError | DialectError], None],
    ) -> None:
        self._url = url
        self._post = post
        self._spawn = spawn
        self._on_failed = on_failed
        self._tasks: dict[AttemptId, asyncio.Task[None]] = {}
        self._heard = False

    def was_heard(self) -> bool:
        """Whether the server has sent an output since the last call."""
        heard, self._heard = self._heard, False
        return heard

    def submit(self, server: FoundServer, submit: SubmitRequest) -> None:
        self._tasks[submit.attempt.attempt_id] = self._spawn(self._run(server, submit))

    def cancel(self, attempt_id: AttemptId) -> None:
        task = self._tasks.pop(attempt_id, None)
        if task is not None:
            task.cancel()

    def forget(self) -> None:
        """All have ended, because their tasks have."""
        self._tasks.clear()

    async def _run(self, server: FoundServer, submit: SubmitRequest) -> None:
        """Runs one request to its end. An error ends only this attempt."""
        attempt_id = submit.attempt.attempt_id
        failure = SubmitFailed(attempt_id, "the server ended an output without a reason")
        try:
            await self._follow(server, submit)
        except (VllmError, DialectError) as error:
            self._on_failed(error)
            failure = _failure(submit.attempt, error)
        except Exception as error:
            log.exception("the request %s to %s failed", attempt_id, self._url)
            failure = SubmitFailed(
                attempt_id, f"unexpected {type(error).__name__} in the server's client"
            )
        if self._tasks.pop(attempt_id, None) is not None:
            if not failure.refused:  # else its client is told
                log.warning("%s: %s: %s", self._url, attempt_id, failure.message)
            self._post(failure)

    async def _follow(self, server: FoundServer, submit: SubmitRequest) -> None:
        """Posts the outputs of a request. Reads to the end, so that the connection is reused."""
        work, tasks = submit.attempt, self._tasks
        assert server.layout is not None
        async with contextlib.AsyncExitStack() as stack:
            grant = None
            if server.slots is not None:
                grant = await stack.enter_async_context(server.slots.hold(work))

            def take(output: EngineOutput) -> None:
                self._heard = True
                if grant is not None:
                    grant.note(work, output)
                if work.attempt_id not in tasks:  # it was cancelled, or is complete
                    return
                if output.finish is not None:
                    del tasks[work.attempt_id]
                self._post(output)

            use = None if grant is None else grant.use
            fingerprint = server.layout.fingerprint
            await server.dialect.follow(submit, server.facts, fingerprint, take, use)


def _failure(work: AttemptSpec, error: VllmError | DialectError) -> SubmitFailed:
    if work.call is None:
        return SubmitFailed(work.attempt_id, str(error), error.refused)
    refused = error.refused or error.status in FORWARDED_REFUSALS
    if work.adapter and error.status == MISSING:
        refused = False  # another server may have it
    return SubmitFailed(work.attempt_id, str(error), refused, error.status)
