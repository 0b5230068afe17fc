"""The answers that clients of a head wait for, with their tokens on the way to the HTTP handlers,
and the requests that have ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from moonpool.api.connection.poison import WorkMark
from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.conductor.actions import Deliver, Refuse, RequestEnded
from moonpool.head.watch.ended_requests import EndedRequests, RequestObserver
from moonpool.protocol.messages import (
    AttemptId,
    Command,
    ForwardedCall,
    Report,
    ReserveDecode,
    StartPrefill,
    TokenRoute,
    request_of,
)
from moonpool.refusal import Refusal
from moonpool.types import FinishReason, RequestId, Token

STOPPING_RETRY_S = 5.0


def stopping() -> RequestRefused:
    """Returns the refusal of a head that is stopping, which the head must have counted already."""
    text = "The server is stopping. Send the request again, to another server if there is one."
    refused = RequestRefused(503, "server_stopping", text, STOPPING_RETRY_S)
    refused.is_counted = True
    return refused


class AnsweringFronts(Protocol):
    """The fronts of a head, as the head sees them."""

    def hears(self, report: Report) -> AbstractContextManager[None]:
        """A context in which the report of an instance is handled."""
        ...

    def describe(self) -> list[dict[str, Any]]: ...


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
            self._wakeup.set()  # wakes the reader, so that earlier tokens are sent first
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
        """Returns where the tokens of an attempt go directly, or None if they go to the head."""
        return None

    def refusal(self) -> RequestRefused:
        """Returns the refusal of a refused answer."""
        assert self._refused is not None
        # the record of the request has already counted the refusal
        return RequestRefused.of(self._refused.refusal, is_counted=True)


class WorkWatch:
    """Marks the call whose request a Conductor plans; a Conductor calls it as its watch. Without a
    mark, the watch does nothing."""

    def __init__(self, answers: Mapping[RequestId, ResponseStream]) -> None:
        self.mark: WorkMark | None = None
        self._answers = answers
        self._before: int | None = None

    @property
    def number(self) -> int | None:
        """Returns the number of the call that is being processed, or None."""
        return None if self.mark is None else self.mark.number

    def __call__(self, request_id: RequestId | None) -> None:
        """`request_id`: the request that is planned from now on, or None if the earlier call goes
        on."""
        if self.mark is None:
            return
        if request_id is None:
            self.mark.back_to(self._before)
            return
        self._before = self.mark.number
        answer = self._answers.get(request_id)
        if answer is not None and answer.number is not None:
            self.mark.set(answer.number)


class Answers:
    """All answers under way of a head. `ended` is called once when the outcome of a request is
    final. `work` marks the call that the event loop is processing."""

    def __init__(self, ended: EndedRequests) -> None:
        self.ended = ended
        self._streams: dict[RequestId, ResponseStream] = {}
        self._calls: dict[RequestId, ForwardedCall] = {}  # the calls of forwarded requests
        self.work = WorkWatch(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def find(self, request_id: RequestId) -> ResponseStream | None:
        return self._streams.get(request_id)

    def all(self) -> list[tuple[RequestId, ResponseStream]]:
        return list(self._streams.items())

    def open(
        self,
        request_id: RequestId,
        call: ForwardedCall | None,
        answer: ResponseStream | None = None,
    ) -> ResponseStream:
        """Notes that a client waits for this answer from now on. `call`: the call of a forwarded
        request. `answer`: the answer of a front."""
        assert request_id not in self._streams
        answer = answer or ResponseStream(self.work.number)
        self._streams[request_id] = answer
        if call is not None:
            self._calls[request_id] = call
        return answer

    def close(self, request_id: RequestId) -> bool:
        """Notes that no client waits for the answer any more. Returns whether the request had
        ended."""
        answer = self._streams.pop(request_id)
        self._calls.pop(request_id, None)
        if answer.ended is None:
            return False
        self.ended.settle(answer.ended.record)
        return True

    def judge(self, request_id: RequestId, reason: str, num_tokens: int | None = None) -> bool:
        """Ends an answer for its reader: after `num_tokens` tokens, or as an incomplete answer.
        Returns whether the request had ended: then this result counts, and the Conductor need not
        know."""
        answer = self._streams.get(request_id)
        if answer is None or answer.ended is None:
            return False
        record = answer.ended.record
        if num_tokens is not None:
            record.end_at(num_tokens)
        record.outcome = reason
        return True

    def completed(self, command: Command) -> Command:
        """Returns the command as it is sent: the Conductor knows neither the bodies of forwarded
        requests nor where their tokens go."""
        if not isinstance(command, StartPrefill | ReserveDecode):
            return command
        request_id = request_of(command.attempt.attempt_id)
        answer = self._streams.get(request_id)
        call = self._calls.get(request_id) if isinstance(command, StartPrefill) else None
        route = None if answer is None else answer.route(command.attempt.attempt_id)
        if call is None and route is None:
            return command
        attempt = msgspec.structs.replace(command.attempt, call=call, route=route)
        return msgspec.structs.replace(command, attempt=attempt)

    def deliver(self, action: Deliver) -> None:
        answer = self._streams.get(action.request_id)
        if answer is not None:
            answer.deliver(action)

    def refuse(self, action: Refuse) -> None:
        answer = self._streams.get(action.request_id)
        if answer is not None:
            answer.refuse(action)

    def on_ended(self, ended: RequestEnded, own: RequestObserver) -> None:
        """Notes that the Conductor has ended a request. `own`: the observer of the request's
        model."""
        record = ended.record
        self.ended.keep(ended, own)
        answer = self._streams.get(record.request_id)
        if answer is None:
            self.ended.settle(record)
            return
        answer.ended = ended  # the outcome is final when the reader has judged the last output
        # the timings are read only after this turn of the event loop
        answer.timings_s = record.stages_s()
        if record.outcome == FinishReason.ABORT and not answer.refused:
            answer.refuse(Refuse(record.request_id, Refusal(503, "aborted", "aborted")))
