"""Passes the tokens of the Conductor's actions to the HTTP handler that iterates over them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from moonpool.api.connection.work_mark import WorkMark
from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.conductor.actions import Deliver, Refuse, RequestEnded
from moonpool.protocol.messages import AttemptId, TokenRoute
from moonpool.types import RequestId, Token


class ResponseStream:
    """The pending outputs of one request, bounded by its `max_tokens`.

    A slow reader receives several tokens in one output instead of many outputs.
    """

    def __init__(self, number: int | None = None) -> None:
        """`number`: the number of the kept call, as in `WorkMark`."""
        self.number = number
        self._tokens: deque[Token] = deque()
        self._last: Deliver | None = None
        self._refused: Refuse | None = None
        self._wakeup = asyncio.Event()
        self.timings_s: dict[str, float] | None = None
        self.ended: RequestEnded | None = None
        self.on_refused: Callable[[Refuse], None] | None = None

    def deliver(self, action: Deliver) -> None:
        self._tokens.extend(action.tokens)
        self._last = action
        self._wakeup.set()

    def refuse(self, action: Refuse) -> None:
        self._refused = action
        self._wakeup.set()
        if self.on_refused is not None:
            self.on_refused(action)

    @property
    def refused(self) -> bool:
        return self._refused is not None

    async def next_output(self) -> Output:
        """Waits for the next output; the one with a finish reason is the last.

        Raises RequestRefused.
        """
        await self._wakeup.wait()
        self._wakeup.clear()
        if self._refused is not None and not self._tokens:
            raise self.refusal()
        if self._refused is not None:
            self._wakeup.set()  # the tokens before it go first
        assert self._last is not None
        tokens = tuple(self._tokens)
        self._tokens.clear()
        return Output(
            tokens=tokens,
            finish_reason=self._last.finish,
            cached_tokens=self._last.cached_tokens,
            timings_s=self.timings_s if self._last.finish is not None else None,
        )

    def route(self, attempt_id: AttemptId) -> TokenRoute | None:
        """Where the tokens of an attempt go directly; None: to the head."""
        return None

    def refusal(self) -> RequestRefused:
        """The refusal of a refused answer."""
        assert self._refused is not None
        return RequestRefused.of(self._refused.refusal, is_counted=True)  # by the request's record


class WorkWatch:
    """Marks the call whose request a Conductor plans, as its watch. Without a mark it does
    nothing."""

    def __init__(self, answers: Mapping[RequestId, ResponseStream]) -> None:
        self.mark: WorkMark | None = None
        self._answers = answers
        self._before: int | None = None

    @property
    def number(self) -> int | None:
        """The number of the call that is being processed."""
        return None if self.mark is None else self.mark.number

    def __call__(self, request_id: RequestId | None) -> None:
        """None: the earlier work goes on."""
        if self.mark is None:
            return
        if request_id is None:
            self.mark.back_to(self._before)
            return
        self._before = self.mark.number
        answer = self._answers.get(request_id)
        if answer is not None and answer.number is not None:
            self.mark.set(answer.number)
