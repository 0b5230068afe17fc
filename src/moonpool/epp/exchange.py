"""One HTTP request and its response, as Envoy shows them over a stream of external processing.

The call is placed once its whole body has arrived; then headers and body are sent on together. The
response is passed on as it arrives, and read on its way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping

from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)

from moonpool.api.errors import ApiError, from_refused, internal_error
from moonpool.api.serving_backend import RequestRefused
from moonpool.epp import wire
from moonpool.epp.call_headers import request_id_of
from moonpool.epp.picker import Picked, Picker
from moonpool.epp.routed_call import Route
from moonpool.server_events import DONE, ServerEventReader
from moonpool.types import FinishReason

BODIES = 16
"""How many bodies of the largest size may be held at a time. Of smaller bodies, many more fit."""


class BodyRoom:
    """The bodies that are held until their calls are placed, within a bound for all together.
    `share` gives each body its part of the room. `max_body_bytes`: the size limit of one body."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.left_bytes = BODIES * max_body_bytes

    def share(self) -> HeldParts:
        return HeldParts(self)


class HeldParts:
    """The parts of one body. `close` gives back the room that the parts take."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        """Raises ApiError (413), and RequestRefused (503) if all bodies together take too much."""
        most = self._room.max_body_bytes
        if self._num_bytes + len(part) > most:
            text = f"The body exceeds {most} bytes, the largest that is read."
            raise ApiError(text, status=413, code="body_too_large")
        if len(part) > self._room.left_bytes:
            text = "Too many bodies are being read. Send the request again later."
            raise RequestRefused(503, "too_many_large_bodies", text, 1.0)
        self._room.left_bytes -= len(part)
        self._num_bytes += len(part)
        self._parts.append(part)

    def whole(self) -> bytes:
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def close(self) -> None:
        self._room.left_bytes += self._num_bytes
        self._parts, self._num_bytes = [], 0


log = logging.getLogger("moonpool.epp")
EVENTS = "text/event-stream"


class Exchange:
    """`answers` reads all messages of a stream. `fails_open`: whether the gateway may choose an
    endpoint itself if none can be chosen here."""

    def __init__(self, picker: Picker, room: BodyRoom, fails_open: bool) -> None:
        self._picker = picker
        self._room = room.share()
        self._fails_open = fails_open
        self._headers: Mapping[str, str] = {}
        self._subset: tuple[str, ...] | None = None
        self._request_mode = self._response_mode = wire.DUPLEX
        self._is_routed = False
        self._is_refused = False
        self._picked: Picked | None = None
        self._watch: ResponseWatch | None = None

    async def answers(
        self, messages: AsyncIterator[ProcessingRequest]
    ) -> AsyncIterator[ProcessingResponse]:
        """Yields what Envoy is to do."""
        try:
            async for message in messages:
                for answer in await self._answer(message):
                    yield answer
                if self._is_refused:
                    return
        except Exception:
            log.exception("request %s failed", request_id_of(self._headers))
            raise
        finally:
            self._room.close()
            if self._picked is not None:
                self._picked.close()

    async def _answer(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        kind = message.WhichOneof("request")
        try:
            match kind:
                case "request_headers":
                    return iter(await self._on_headers(message, message.request_headers))
                case "request_body":
                    return iter(await self._on_body(message.request_body))
                case "request_trailers":
                    return iter(await self._on_trailers())
                case "response_headers":
                    self._on_response(message, message.response_headers)
                    return iter((wire.GO_ON_RESPONSE,))
                case "response_body":
                    return iter((self._on_response_body(message.response_body),))
                case "response_trailers":
                    self._end_response()
                    return iter((wire.GO_ON_RESPONSE_TRAILERS,))
        except ApiError as error:
            return self._refuse(error)
        except RequestRefused as refused:
            return self._refuse(from_refused(refused))
        return iter(())

    def _refuse(self, error: ApiError) -> Iterator[ProcessingResponse]:
        self._is_refused = True
        if error.status == 503 and not error.is_counted and error.code:
            self._picker.head.note_refused(error.code)
        return iter((wire.refusal(error),))

    # The request

    async def _on_headers(
        self, message: ProcessingRequest, headers: HttpHeaders
    ) -> list[ProcessingResponse]:
        self._headers = wire.read_headers(headers.headers)
        self._subset = wire.read_subset(message)
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if not headers.end_of_stream:
            if self._request_mode == wire.DUPLEX:
                return []  # sends nothing until the whole body has come
            if self._request_mode == wire.BUFFERED:
                return [wire.GO_ON_REQUEST]
        self._is_routed = True
        return [wire.request_sent_on(self._spare_route(), None)]

    async def _on_body(self, body: HttpBody) -> list[ProcessingResponse]:
        if self._is_routed:  # the call was routed without waiting for the body
            return [ProcessingResponse(request_body={})]
        self._room.add(body.body)
        if not body.end_of_stream:
            return []
        return await self._send_on(ends=True)

    async def _on_trailers(self) -> list[ProcessingResponse]:
        if self._is_routed or self._request_mode != wire.DUPLEX:
            return [wire.GO_ON_REQUEST_TRAILERS]
        return [*await self._send_on(ends=False), wire.GO_ON_REQUEST_TRAILERS]

    async def _send_on(self, ends: bool) -> list[ProcessingResponse]:
        self._is_routed = True
        raw = self._room.whole()
        route = await self._route(raw)
        self._room.close()
        if self._request_mode != wire.DUPLEX:
            return [wire.buffered_sent_on(route)]
        return [wire.request_sent_on(route, len(raw)), *wire.body_sent_on((raw,), ends)]

    def _spare_route(self) -> Route | None:
        """Returns the route of a call whose body is not seen, or None if the gateway is to choose.
        Raises RequestRefused."""
        try:
            return self._picker.spare(self._subset)
        except RequestRefused:
            if self._may_open:
                return None
            raise

    async def _route(self, raw: bytes) -> Route | None:
        """Returns the route of a call, or None if the gateway is to choose. Raises ApiError and
        RequestRefused."""
        path = self._headers.get(":path", "").partition("?")[0]
        try:
            route, self._picked = await self._picker.pick(path, self._headers, raw, self._subset)
        except RequestRefused as refused:
            if self._may_open and refused.refusal.reason == "no_instance":
                return None
            raise
        except ApiError:
            raise
        except Exception:
            request_id = request_id_of(self._headers)
            log.exception("request %s failed", request_id)
            if self._may_open:
                return None
            raise internal_error(request_id) from None
        return route

    @property
    def _may_open(self) -> bool:
        return self._fails_open and self._subset is None

    # The response

    def _on_response(self, message: ProcessingRequest, headers: HttpHeaders) -> None:
        if self._picked is None:
            return
        served = wire.read_served(message)
        if served:
            self._picked.note_served(served)
        found = wire.read_headers(headers.headers)
        status = int(found.get(":status", "0") or 0)
        if status != 200:
            self._picked.fail(f"the server responded with status {status}", status)
            return
        is_stream = found.get("content-type", "").startswith(EVENTS)
        self._watch = ResponseWatch(is_stream)
        if is_stream:
            self._picked.begin()
        if headers.end_of_stream:
            self._end_response()

    def _on_response_body(self, body: HttpBody) -> ProcessingResponse:
        if self._watch is not None and self._picked is not None:
            number = self._watch.feed(body.body)
            if number:
                self._picked.note(number)
            if body.end_of_stream:
                self._end_response()
        if self._response_mode != wire.DUPLEX:
            return wire.GO_ON_RESPONSE_BODY
        return wire.response_part(body.body, body.end_of_stream)

    def _end_response(self) -> None:
        watch, self._watch = self._watch, None
        if watch is None or self._picked is None:
            return
        number = watch.end()
        # the stream broke off, so the call is closed as if its client had left
        if not watch.is_done:
            self._picked.fail("the response ended in the middle", 502)
            return
        self._picked.note(number, FinishReason.STOP)
        self._picked.finish()


MAX_REST_BYTES = 1 << 20
"""Largest part of an event that has not ended. A longer one is not counted."""
TAIL_BYTES = 16 << 10
"""vLLM writes the usage last."""
_USED = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
_LAST = (b'"message_stop"', b'"response.completed"', b'"response.incomplete"')
_EMPTY = b'"content":""'  # the first chunk has the role, and this content, before the first token


class ResponseWatch:
    """Watches one successful response. `is_stream`: whether the response is a stream of server-sent
    events."""

    def __init__(self, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._events = ServerEventReader(MAX_REST_BYTES)
        self._rest = b""
        self.num_tokens = 0
        self.is_done = False

    def feed(self, data: bytes) -> int:
        """Takes the next bytes, and returns how many tokens came with them."""
        if not self._is_stream:
            self._rest = (self._rest + data)[-TAIL_BYTES:]
            return 0
        number = sum(map(self._take, self._events.feed(data)))
        self.num_tokens += number
        return number

    def end(self) -> int:
        """Notes that the response has ended; returns how many tokens are to be added."""
        if self._is_stream:
            return self.feed(b"\n")
        used = _USED.findall(self._rest)
        self.is_done, self.num_tokens = True, int(used[-1]) if used else 1
        return self.num_tokens

    def _take(self, event: bytes) -> int:
        if event == DONE or any(mark in event for mark in _LAST):
            self.is_done = True
            return 0
        if b'"delta"' in event or b'"text"' in event or b'"token_ids"' in event:
            return 0 if _EMPTY in event else 1
        return 0
