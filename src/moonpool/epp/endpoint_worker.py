"""The instance of one endpoint, in the picker's own process.

It is the instance of a vLLM server as any other: it asks the server what it serves, measures it,
watches its health and follows its cache. Only its requests take another path (`RoutedCall`): to
submit a request to its server means here to tell the gateway where it goes, and its outputs are
what is seen of the response on its way back. Where prefill and decode are separate, the decode
server's sidecar asks the prefill server itself. So the prefill has ended when the response begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from moonpool.api.serving_backend import RequestRefused
from moonpool.conductor.actions import Refuse
from moonpool.config.rules import vllm_place
from moonpool.discovery.endpoint import Endpoint
from moonpool.head.worker_link import LinkOwner, WorkerLink
from moonpool.link.auth import ClientHandshake, Identity, ServerHandshake
from moonpool.link.channel import Channel
from moonpool.link.head_link import Follower, HeadLink
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import CONTROL_SERVICE, HEARTBEAT_S, DownFrame, Leadership, UpFrame
from moonpool.protocol.messages import AttemptId, request_of
from moonpool.protocol.versions import NEWEST_PROTOCOL
from moonpool.types import FinishReason, InstanceId, RequestId, Struct, Token
from moonpool.vllm.actions import EngineOutput, SubmitFailed, SubmitRequest
from moonpool.vllm.cache_watch import COUNT_S
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.offer_watch import OFFER_S
from moonpool.vllm.worker import FoundServer, VllmWorker

TOKEN = Token(token_id=0)
"""Stands for each token that is seen: the gateway shows no reliable ids."""
HANDLE = b"through the gateway"


class Route(Struct, frozen=True):
    """Where a call goes. `prefill`: the endpoint that computes the prompt, or None if `endpoint`
    computes it. `fallbacks`: where it may go if the endpoint does not respond."""

    endpoint: Endpoint
    prefill: Endpoint | None = None
    fallbacks: tuple[Endpoint, ...] = ()

    @property
    def destinations(self) -> str:
        """The addresses, the first choice first, as the gateway takes them."""
        return ",".join(each.address for each in (self.endpoint, *self.fallbacks))


class _Leg:
    """An attempt at one endpoint."""

    def __init__(self, server: EndpointWorker, attempt_id: AttemptId) -> None:
        self.server = server
        self._attempt_id = attempt_id

    def post(self, num_tokens: int, finish: FinishReason | None, handle: bytes = b"") -> None:
        tokens = (TOKEN,) * num_tokens
        self.server.post_output(EngineOutput(self._attempt_id, tokens, finish, handle))

    def fail(self, message: str, refused: bool, status: int) -> None:
        self.server.post_output(SubmitFailed(self._attempt_id, message, refused, status))


class RoutedCall:
    """`chosen` is the route, or a RequestRefused."""

    def __init__(self, partner: Callable[[], Endpoint], abandon: Callable[[str], None]) -> None:
        """`partner`: the endpoint that decodes a request whose prompt is computed elsewhere.
        `abandon` ends the request, whose response cannot be followed any more."""
        self.chosen: asyncio.Future[Route] = asyncio.get_running_loop().create_future()
        self._partner, self._abandon = partner, abandon
        self._prefill: _Leg | None = None  # until the response begins
        self._decode: _Leg | None = None
        self._num_unposted = 0  # tokens that came before the decode leg
        self._finish: FinishReason | None = None
        self._over = False

    # From the Conductor

    def on_refused(self, refuse: Refuse) -> None:
        self._over = True
        if not self.chosen.done():
            self.chosen.set_exception(RequestRefused.of(refuse.refusal, is_counted=True))

    def on_submit(self, server: EndpointWorker, submit: SubmitRequest) -> None:
        leg = _Leg(server, submit.attempt.attempt_id)
        if submit.handle:  # the decode of a pair, to which the response belongs already
            self._decode = leg
            self._post()
            return
        if self.chosen.done():  # it was to go elsewhere: its endpoint is gone
            self._abandon("instance_lost")
            return
        if submit.hands_over:
            self._prefill = leg
            self.chosen.set_result(Route(self._partner(), server.endpoint))
        else:
            self._decode = leg
            self.chosen.set_result(Route(server.endpoint))

    # From the gateway

    def begin(self) -> None:
        """Notes that the response has begun, so what was to be prefilled elsewhere is done."""
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
        """Notes that the endpoint refused the call, or failed. Neither is tried again: the gateway
        has answered."""
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
    """All calls under way, by request."""

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

    def on_submit(self, server: EndpointWorker, submit: SubmitRequest) -> None:
        call = self._calls.get(request_of(submit.attempt.attempt_id))
        if call is not None:
            call.on_submit(server, submit)


AGAIN_S = 1.0
"""Time from the end of a link that the head has cut to the next one."""


class _LocalChannel(Channel[UpFrame, DownFrame]):
    """The head's end."""

    def __init__(
        self, link: WorkerLink, take: Callable[[DownFrame], None], end: Callable[[str], None]
    ) -> None:
        handshake = ServerHandshake(secrets.token_bytes(32), _identity(InstanceId("head")))
        super().__init__(handshake, msgspec.msgpack.Decoder(UpFrame), link)
        self.protocol = NEWEST_PROTOCOL
        self._pass_on = take
        self._end = end

    def send(self, *frames: DownFrame) -> None:
        for frame in frames:
            self._pass_on(frame)

    def close(self, reason: str = "closed on this side") -> None:
        self._end(reason)

    def abort(self, reason: str) -> None:
        self._end(reason)


class LocalLink(HeadLink):
    """A `HeadLink` to a head in the same process: frames are passed on as they are.

    Commands arrive at once. Reports arrive in the next turn of the loop, so that none comes in the
    middle of the actions of which the command is one.
    """

    def __init__(self, name: InstanceId, follower: Follower, owner: LinkOwner) -> None:
        super().__init__(name, secrets.token_bytes(32), follower)
        self._owner = owner
        self._up: deque[UpFrame] = deque()
        self._head_end: WorkerLink | None = None

    @property
    def protocol(self) -> int:
        return NEWEST_PROTOCOL if self.channel is not None else 0

    def send(self, *frames: UpFrame) -> None:
        if self.channel is None:
            return
        if not self._up:
            self._loop.call_soon(self._flush)
        self._up.extend(frames)

    async def run(self, head_host: str = "", head_port: int = 0) -> None:
        """Serves until `stop` or the head ends it. Raises WorkerError."""
        while True:
            await self._serve()
            if self._is_over():
                return
            self._follower.on_lost()
            if self._is_over():
                return
            await asyncio.sleep(AGAIN_S)

    async def _serve(self) -> None:
        self._closed = self._loop.create_future()
        handshake = ClientHandshake(secrets.token_bytes(32), _identity(self._name))
        self.channel = Channel(handshake, msgspec.msgpack.Decoder(DownFrame), self)
        head_end = self._head_end = WorkerLink(self._owner, secrets.token_bytes(32))
        head_end.channel = _LocalChannel(head_end, self._on_down, self.on_closed)
        head_end.on_connected()
        head_end.on_open(_identity(self._name))
        self._follower.on_head()
        reason = "the instance ends"
        try:
            reason = await self._closed
        finally:
            self._flush()
            self.channel, self._head_end = None, None
            head_end.on_closed(reason)

    def _on_down(self, frame: DownFrame) -> None:
        if self.channel is not None and not isinstance(frame, Leadership):  # there is one head
            self.on_frame(frame)

    def _flush(self) -> None:
        while self._up and self._head_end is not None:
            self._head_end.on_frame(self._up.popleft())
        self._up.clear()

    def _hang_up(self, reason: str) -> None:
        self.on_closed(reason)


def _identity(name: InstanceId) -> Identity:
    return Identity(instance_id=name, service=CONTROL_SERVICE, fingerprint=b"")


log = limited_logger("moonpool.epp")

MEASURED_AT_A_TIME = 8
"""Servers that are measured at a time: more would keep the loop from deciding."""
LOOKS_PER_S = 100.0
"""Health checks of all servers together per second; with many servers, each is checked less often.
"""
MOST_PAUSE_S = 10.0
"""Shorter than the silence after which the head gives an instance up."""
SOON_S = 0.1
"""Time to the next health check after a call failed."""


class PickerShared:
    """What the instances of one picker share."""

    def __init__(self, owner: LinkOwner, api_key: str, now: Callable[[], float]) -> None:
        self.owner = owner
        self.api_key = api_key
        self.now = now
        self.desk = CallDesk()
        self.measuring = asyncio.Semaphore(MEASURED_AT_A_TIME)
        self.num_endpoints = 0
        self.suspects: set[InstanceId] = set()
        """Instances at which a call has just failed: others are preferred until their health is
        known."""

    @property
    def pause_s(self) -> float:
        return min(max(HEARTBEAT_S, self.num_endpoints / LOOKS_PER_S), MOST_PAUSE_S)


class EndpointWorker(VllmWorker):
    """`run` serves until the instance is drained. Its task may be cancelled."""

    def __init__(self, endpoint: Endpoint, shared: PickerShared) -> None:
        """Raises WorkerError."""
        self.endpoint = endpoint
        self._shared = shared
        self._look_now = asyncio.Event()
        name, machine = InstanceId(endpoint.name), socket.gethostname()
        place = vllm_place(endpoint.place)
        super().__init__(endpoint.role, name, machine, b"", place, shared.api_key)
        self._count_s = max(COUNT_S, 5.0 * shared.pause_s)
        self._offer_s = max(OFFER_S, 5.0 * shared.pause_s)

    def post_output(self, output: EngineOutput | SubmitFailed) -> None:
        self._post(output)

    def look(self) -> None:
        self._shared.suspects.add(self.instance_id)
        self._look_now.set()

    def _open_link(self) -> HeadLink:
        return LocalLink(self.instance_id, self, self._shared.owner)

    async def _with_parsers(self, facts: VllmFacts) -> VllmFacts:
        """Calls go to the server as they are, so its tokens need not be known: they are estimated
        where the model's files cannot be read."""
        found = await super()._with_parsers(facts)
        if found.offer.takes == "tokens":
            found = replace(found, offer=replace(found.offer, takes="either"))
        return found

    async def _profile(self, engine: FoundServer, instance: VllmInstance) -> None:
        async with self._shared.measuring:
            await super()._profile(engine, instance)

    async def _pause(self) -> None:
        if self._look_now.is_set():  # a second look
            await asyncio.sleep(SOON_S)
            self._look_now.clear()
            return
        self._shared.suspects.discard(self.instance_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shared.pause_s):
                await self._look_now.wait()

    def leave_gone(self) -> None:
        self._shared.suspects.discard(self.instance_id)
        super().leave_gone()

    def _submit(self, submit: SubmitRequest) -> None:
        self._shared.desk.on_submit(self, submit)

    def _cancel(self, attempt_id: AttemptId) -> None:
        """The call's own connections end by themselves."""
