"""A call that the picker has placed: the requests that stand for its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from moonpool.api.serving_backend import RequestRefused
from moonpool.discovery.endpoint import Endpoint
from moonpool.epp.endpoint_worker import PickerShared
from moonpool.epp.routed_call import Route, RoutedCall
from moonpool.head.answers import ResponseStream
from moonpool.head.head import ClusterHead
from moonpool.head.models.served_model import ServedModel
from moonpool.protocol.messages import ForwardedCall
from moonpool.types import FinishReason, InstanceId, Request, RequestId

SETTLE_S = 5.0
"""Time within which the Conductor hears the end of a response."""


class AnswerKeeper(Protocol):
    """The picker, as an answer sees it."""

    head: ClusterHead
    shared: PickerShared

    def endpoint(self, instance_id: InstanceId) -> Endpoint: ...

    def keep(self, work: Coroutine[Any, Any, None]) -> None: ...


class BookedAnswer:
    """One answer, which is a request to the Conductor. It is booked as soon as it is made."""

    def __init__(
        self, picker: AnswerKeeper, model: ServedModel, request: Request, call: ForwardedCall
    ) -> None:
        """Raises ApiError and RequestRefused."""
        self._picker, self._model = picker, model
        self.request_id: RequestId = request.request_id
        self.call = RoutedCall(self._partner, self._abandon)
        self.stream: ResponseStream | None = None
        picker.shared.desk.add(self.request_id, self.call)
        try:
            self.stream = picker.head.begin(
                model, request, call=call, on_refused=self.call.on_refused
            )
        except BaseException:
            self.end()
            raise

    async def settle(self) -> None:
        """Ends when the Conductor has heard of the last token."""
        assert self.stream is not None
        try:
            async with asyncio.timeout(SETTLE_S):
                while (await self.stream.next_output()).finish_reason is None:
                    pass
        except (TimeoutError, RequestRefused):
            pass
        finally:
            self.end()

    def end(self) -> None:
        self._picker.shared.desk.remove(self.request_id)
        if self.stream is not None:
            self._picker.head.close(self._model, self.request_id)

    def _partner(self) -> Endpoint:
        attempt = self._model.conductor.requests[self.request_id].attempt
        assert attempt is not None
        return self._picker.endpoint(attempt.decoder)

    def _abandon(self, reason: str) -> None:
        self._picker.head.abort(self.request_id, reason, self._model)


class Picked:
    """`close` it when the gateway is done with it. What is seen of the response is of all answers
    together, and counts for each of them in turn."""

    def __init__(self, picker: AnswerKeeper, route: Route, answers: Sequence[BookedAnswer]) -> None:
        self._picker, self._answers = picker, tuple(answers)
        self._route = route
        self._turn = 0
        self._is_closed = False

    @property
    def request_id(self) -> RequestId:
        return self._answers[0].request_id

    def begin(self) -> None:
        """Notes that the response has begun."""
        for answer in self._answers:
            answer.call.begin()

    def note(self, num_tokens: int, finish: FinishReason | None = None) -> None:
        """Notes that more tokens were seen."""
        count = len(self._answers)
        for place, answer in enumerate(self._answers):
            own = (num_tokens + (place - self._turn) % count) // count
            if own or finish is not None:
                answer.call.note(own, finish)
        self._turn = (self._turn - num_tokens) % count

    def fail(self, message: str, status: int) -> None:
        for answer in self._answers:
            answer.call.fail(message, status)

    def note_served(self, address: str) -> None:
        """Notes which endpoint responds, as the gateway says. Another one than the first has no
        booking, and the first has failed."""
        if address != self._route.endpoint.address:
            self.fail(f"the gateway went on to {address}", 502)
            self.close()

    def finish(self) -> None:
        """Notes that the response was whole: closes it when the Conductor has heard of its last
        token."""
        if not self._is_closed:
            self._is_closed = True
            for answer in self._answers:
                self._picker.keep(answer.settle())

    def close(self) -> None:
        """Notes that nobody waits for the response any more. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for answer in self._answers:
                answer.end()
