"""A call that goes through the gateway: its destination, and what is seen of its response.

The Conductor's commands reach the instances of this process as for any vLLM server. The difference
is that a request is submitted by telling the gateway its server, and that its outputs are read from
the response on its way back.

If prefill and decode are separate, the decode server's sidecar itself asks the prefill server. So
the prefill has ended by the time the response begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from moonpool.api.serving_backend import RequestRefused
from moonpool.conductor.actions import Refuse
from moonpool.discovery.endpoint import Endpoint
from moonpool.protocol.messages import AttemptId, request_of
from moonpool.types import FinishReason, InstanceId, RequestId, Struct, Token
from moonpool.vllm.actions import EngineOutput, SubmitFailed, SubmitRequest

TOKEN = Token(token_id=0)
"""Stands for each token that is seen: the gateway shows no reliable ids."""
HANDLE = b"through the gateway"


class Route(Struct, frozen=True):
    """The destination of a call. `prefill`: the endpoint that computes the prompt, or None if
    `endpoint` computes it. `fallbacks`: the endpoints to use if the endpoint does not respond."""

    endpoint: Endpoint
    prefill: Endpoint | None = None
    fallbacks: tuple[Endpoint, ...] = ()

    @property
    def destinations(self) -> str:
        """Returns the addresses, the first choice first, in the gateway's notation."""
        return ",".join(each.address for each in (self.endpoint, *self.fallbacks))


class ServingEndpoint(Protocol):
    """The instance of an endpoint, as a call sees it."""

    @property
    def instance_id(self) -> InstanceId: ...

    @property
    def endpoint(self) -> Endpoint: ...

    def post_output(self, output: EngineOutput | SubmitFailed) -> None: ...

    def look(self) -> None:
        """Checks the server's health at once."""
        ...


class _Leg:
    """An attempt of a request at one endpoint."""

    def __init__(self, server: ServingEndpoint, attempt_id: AttemptId) -> None:
        self.server = server
        self._attempt_id = attempt_id

    def post(self, num_tokens: int, finish: FinishReason | None, handle: bytes = b"") -> None:
        tokens = (TOKEN,) * num_tokens
        self.server.post_output(EngineOutput(self._attempt_id, tokens, finish, handle))

    def fail(self, message: str, refused: bool, status: int) -> None:
        self.server.post_output(SubmitFailed(self._attempt_id, message, refused, status))


class RoutedCall:
    """`chosen` becomes the route, or a RequestRefused."""

    def __init__(self, partner: Callable[[], Endpoint], abandon: Callable[[str], None]) -> None:
        """`partner`: the endpoint that decodes a request whose prompt is computed elsewhere.
        `abandon` ends the request if its response cannot be followed any more."""
        self.chosen: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._partner, self._abandon = partner, abandon
        self._prefill: _Leg | None = None  # set until the response begins
        self._decode: _Leg | None = None
        self._num_unposted = 0  # number of tokens that came before the decode leg
        self._finish: FinishReason | None = None
        self._over = False

    # Methods called by the Conductor

    def on_refused(self, refuse: Refuse) -> None:
        self._over = True
        if not self.chosen.done():
            self.chosen.set_exception(RequestRefused.of(refuse.refusal, is_counted=True))

    def on_submit(self, server: ServingEndpoint, submit: SubmitRequest) -> None:
        leg = _Leg(server, submit.attempt.attempt_id)
        if submit.handle:  # the pair's decode server, whose response the client already receives
            self._decode = leg
            self._post()
            return
        if self.chosen.done():  # the call should go elsewhere, because its endpoint is gone
            self._abandon("instance_lost")
            return
        if submit.hands_over:
            self._prefill = leg
            self.chosen.set_result(Route(self._partner(), server.endpoint))
        else:
            self._decode = leg
            self.chosen.set_result(Route(server.endpoint))

    # Methods called by the gateway

    def begin(self) -> None:
        """Notes that the response has begun, so that a separate prefill has ended."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None and not self._over:
            prefill.post(1, FinishReason.LENGTH, HANDLE)

    def note(self, num_tokens: int, finish: FinishReason | None = None) -> None:
        """Notes that more tokens of the response were seen."""
        self.begin()
        self._num_unposted += num_tokens
        self._finish = finish or self._finish
        self._post()

    def fail(self, message: str, status: int) -> None:
        """Notes that the endpoint refused the call, or failed. Neither leg is tried again, because
        the gateway has answered."""
        leg = self._prefill or self._decode
        if leg is None or self._over:
            return
        if status < 500:
            leg.fail(message, True, status)
            return
        leg.server.look()
        self._abandon("engine_error")

    def _post(self) -> None:
        leg = self._decode
        if leg is None or self._over or not (self._num_unposted or self._finish):
            return
        number, self._num_unposted = self._num_unposted, 0
        self._over = self._finish is not None
        leg.post(number, self._finish)


class CallDesk:
    """All calls under way, keyed by request."""

    def __init__(self) -> None:
        self._calls: dict[RequestId, RoutedCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._calls

    def add(self, request_id: RequestId, call: RoutedCall) -> None:
        assert request_id not in self._calls
        self._calls[request_id] = call

    def remove(self, request_id: RequestId) -> None:
        self._calls.pop(request_id, None)

    def on_submit(self, server: ServingEndpoint, submit: SubmitRequest) -> None:
        call = self._calls.get(request_of(submit.attempt.attempt_id))
        if call is not None:
            call.on_submit(server, submit)
