"""One HTTP request and its response, over bare ASGI.

This class owns the request id, the body with its size limit, and the watch for a client that
disconnects. `HttpContext` does not parse bodies. `HttpContext` uses bare ASGI instead of
Starlette's `Request` and `StreamingResponse` because every streamed token passes through it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Receive, Scope, Send

from moonpool.api.connection.kept_answers import Known
from moonpool.api.connection.kept_stream import KeptStream, StreamFacts, digest_of, draw_facts
from moonpool.api.connection.poison import MAX_ENDED, poison_error
from moonpool.api.errors import ApiError, ClientGoneError, Headers
from moonpool.api.serving_backend import ModelCard, RequestRefused
from moonpool.api.sharing.shared_buffer import BodyMemory, HeldBody

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+=-]{1,128}")
JSON = b"application/json"
DIGEST_IN_THREAD_BYTES = 1 << 20
"""Digests of larger bodies are computed in a thread."""
_SSE = b"text/event-stream; charset=utf-8"


def request_id_of(scope: Scope) -> str:
    """Returns the client's `X-Request-Id` if it is valid, else a new id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(12)


def scoped_id(tenant: str, request_id: str) -> str:
    """Returns the id within the server: ids of different tenants never collide, whatever clients
    choose.

    The ids of further answers of the same call end in "~1", "~2" and so on; no client's id contains
    "~".
    """
    return f"{tenant}/{request_id}" if tenant else request_id


class ActiveCalls:
    """The calls that generate or embed at present."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._ids)

    @contextmanager
    def begin(self, context: HttpContext) -> Iterator[tuple[str, str]]:
        """Yields the call's request id, and the id within the server."""
        kept = context.kept
        named = kept.name if kept is not None else ""  # another head may have named the response
        request_id = named or context.request_id
        scoped = scoped_id(context.tenant, request_id)
        if scoped in self._ids:
            # Two calls of a tenant may share an X-Request-Id, but requests may not.
            suffix = secrets.token_hex(8)
            scoped = f"{scoped}-{suffix}"
            if not context.continues:
                request_id = named or f"{request_id}-{suffix}"
        if kept is not None and not named:
            kept.note_name(request_id)
        self._ids.add(scoped)
        try:
            yield request_id, scoped
        finally:
            self._ids.discard(scoped)


class KeepingConnection(Protocol):
    """The connection of a request, if it can keep answers."""

    party: str

    def belong_to(self, tenant: str) -> bool:
        """Notes that the present request belongs to this tenant, or, if it is "", that the server
        has no tenants. Returns False if the tenant has too many calls under way."""
        ...

    def begin_body(self) -> bool:
        """Notes that a handler reads the body from now on. Returns whether all of it has
        arrived."""
        ...

    def end_body(self) -> None: ...

    def end_call(self) -> None: ...

    def keep(
        self,
        scope: Scope,
        body: bytes,
        facts: StreamFacts,
        arrived_s: float,
        tenant: str,
        is_operator: bool,
        digest: bytes = b"",
        num_returns: int = 0,
        num_ended: int = 0,
    ) -> KeptStream | None: ...

    async def known(
        self, tenant: str, request_id: str, digest: bytes, displaces: bool
    ) -> Known | None: ...

    def num_ended(self, tenant: str, digest: bytes) -> int: ...

    def begin_response(self) -> None: ...


class HttpContext:
    """One HTTP request. `CallerCheck` sets `tenant`, `is_operator`, `party`, and the largest body
    of the route, after it has checked the API key.

    `memory` counts the body until `close`.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, memory: BodyMemory | None = None
    ):
        self._memory = memory or BodyMemory()
        self._body: HeldBody | None = None
        self.scope = scope
        self.client: tuple[str, int] | None = scope.get("client")
        self.server: tuple[str, int | None] | None = scope.get("server")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.kept: KeptStream | None = scope.get("moonpool.kept")
        """The log of the call: another head can continue the call from it, or this head does so
        now."""
        self.request_id = (
            request_id_of(scope) if self.kept is None else self.kept.opening.facts.request_id
        )
        self.tenant = ""
        self.is_operator = True  # also True without API keys
        self.party = ""
        """The party whose room the request takes, as in `SharedBuffer`."""
        self.max_body_bytes = 1 << 62
        self.started = False
        # whether the call continues a response that another connection began
        self.continues = False
        self._ahead: bytes | None = None
        self._receive = receive
        self._send = send
        self._connection: KeepingConnection | None = scope.get("moonpool.connection")

    def keep_call(
        self,
        body: bytes,
        arrived_s: float,
        card: ModelCard,
        facts: StreamFacts | None = None,
        digest: bytes = b"",
        num_returns: int = 0,
    ) -> tuple[float, StreamFacts]:
        """Lets the answer to a call outlive this process, if that is possible. Returns when the
        call arrived, and its facts, as the head that received it has logged them. Raises ApiError
        if calls like it have ended too many heads.

        `facts`: the facts of the response that the call continues. `digest`, `num_returns`: as in
        `Opening`.
        """
        if facts is not None:
            self.continues = True
            self.request_id = facts.request_id
        if self.kept is not None:
            return self.kept.opening.arrived_s, self.kept.opening.facts
        facts = facts or draw_facts(self.request_id, card.max_model_tokens, card.system_fingerprint)
        if self._connection is not None:
            self.kept = self._connection.keep(
                self.scope,
                body,
                facts,
                arrived_s,
                self.tenant,
                self.is_operator,
                digest,
                num_returns,
                self._num_ended(digest),
            )
        return arrived_s, facts

    def _num_ended(self, digest: bytes) -> int:
        if not digest or self._connection is None:
            return 0
        num_ended = self._connection.num_ended(self.tenant, digest)
        if num_ended >= MAX_ENDED:
            raise poison_error()
        return num_ended

    async def digest(self, body: bytes, is_forwarded: bool = False) -> bytes:
        """Returns the digest that, together with the request id, identifies the call if it is sent
        again. A forwarded call has another digest, because its answer is logged in another form."""
        path: str = self.scope["path"]
        named = f"forwarded {path}" if is_forwarded else path
        if len(body) > DIGEST_IN_THREAD_BYTES:
            return await asyncio.to_thread(digest_of, named, body)
        return digest_of(named, body)

    async def known(self, digest: bytes, request_id: str, displaces: bool) -> Known | None:
        """Returns the known part of the answer, if the call was sent before (see
        `KeptAnswers.find`)."""
        if self._connection is None or self.kept is not None:
            return None
        return await self._connection.known(self.tenant, request_id, digest, displaces)

    @contextmanager
    def kept_refusals(self) -> Iterator[None]:
        """A context in which a refusal of the frontend is logged before its bytes are sent. Raises
        RequestRefused at once if an earlier head has refused the call."""
        refused = self.kept.refusal() if self.kept is not None else None
        if refused is not None:
            raise refused
        try:
            yield
        except RequestRefused as error:
            if self.kept is not None:
                self.kept.note_refused(error)
            raise

    def belong_to(self, tenant: str) -> None:
        """Charges the room of the request to this tenant, or to the client's address if the tenant
        is "". Raises ApiError (503)."""
        if self._connection is None:
            self.party = tenant
            return
        if not self._connection.belong_to(tenant) and self.kept is None:
            text = "This API key has too many calls under way. Send the request again later."
            after = ((b"retry-after", b"1"),)
            raise ApiError(text, status=503, code="too_many_calls", headers=after)
        self.party = self._connection.party

    def close(self) -> None:
        """Notes that the request has ended, so that its body is no longer needed."""
        if self._body is not None:
            self._body.close()
        if self._connection is not None:
            self._connection.end_call()

    async def read_ahead(self, max_bytes: int, timeout_s: float) -> bytes:
        """Reads the body like `read_body`, which then returns the same bytes."""
        self._ahead = await self.read_body(max_bytes, timeout_s)
        return self._ahead

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """Returns the body. Raises `ApiError` with 413, 415, 408 or 503, and `ClientGoneError`."""
        max_bytes = min(max_bytes, self.max_body_bytes)
        if self._ahead is not None:
            if len(self._ahead) > max_bytes:
                raise _too_large(max_bytes)
            return self._ahead
        self._check_content(max_bytes)
        body = self._body = HeldBody(self._memory, self.party)
        connection = self._connection
        if connection is None:
            received = await self._receive_body(body, max_bytes, timeout_s)
        else:
            is_complete = connection.begin_body()
            try:
                if is_complete:
                    received = await self._receive_parts(body, max_bytes)
                else:
                    received = await self._receive_body(body, max_bytes, timeout_s)
            finally:
                connection.end_body()
        body.finish()
        return received

    async def _receive_body(self, body: HeldBody, max_bytes: int, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                body.on_lost = lambda: limit.reschedule(0.0)  # at once
                return await self._receive_parts(body, max_bytes)
        except TimeoutError:
            if body.is_lost:
                raise body.refusal() from None
            text = f"The request body did not arrive within {timeout_s:g} s. Send it again."
            raise ApiError(text, status=408, code="body_timeout") from None
        finally:
            body.on_lost = None

    async def _receive_parts(self, body: HeldBody, max_bytes: int) -> bytes:
        received = bytearray()  # not a list of parts, because a part may be as small as a byte
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk: bytes = message.get("body", b"")
            if len(received) + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            body.grow(len(chunk))
            if not message.get("more_body"):
                return bytes(received + chunk) if received else chunk
            received += chunk

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Sends a whole response."""
        await self._start(
            status,
            [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *headers,
            ],
        )
        await self._send({"type": "http.response.body", "body": body})

    async def start_events(self) -> None:
        """Starts a response that is a stream of server-sent events."""
        headers = [
            (b"content-type", _SSE),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._start(200, headers)

    async def send_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events})

    def watch(self) -> DisconnectWatch:
        """Returns a context in which a disconnect raises `ClientGoneError` at the current await."""
        return DisconnectWatch(self._receive)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        if self._connection is not None:
            self._connection.begin_response()
        headers.append((b"x-request-id", self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _check_content(self, max_bytes: int) -> None:
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
            raise _too_large(max_bytes)
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            text = "Compressed request bodies are not supported. Send plain JSON."
            raise ApiError(text, status=415, code="unsupported_encoding")
        content_type = self.headers.get(b"content-type", JSON).split(b";", 1)[0].strip().lower()
        if content_type and content_type != JSON and not content_type.endswith(b"+json"):
            text = "The Content-Type of the request must be application/json."
            raise ApiError(text, status=415, code="unsupported_media_type")


class DisconnectWatch:
    """Interrupts the task that entered it when the client disconnects, like `asyncio.timeout`."""

    def __init__(self, receive: Receive):
        self._receive = receive
        self._gone = False
        self._num_cancels_before = 0
        self._watched: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watched = asyncio.current_task()
        assert self._watched is not None
        self._num_cancels_before = self._watched.cancelling()
        self._watcher = asyncio.create_task(self._wait())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._watched is not None
        assert self._watcher is not None
        self._watcher.cancel()
        if self._gone:
            num_cancels = self._watched.uncancel()
            if num_cancels <= self._num_cancels_before and kind is asyncio.CancelledError:
                raise ClientGoneError from None

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        assert self._watched is not None
        self._gone = True
        self._watched.cancel()


def _too_large(max_bytes: int) -> ApiError:
    text = f"The request body exceeds this server's limit of {max_bytes} bytes. Shorten it."
    return ApiError(text, status=413, code="body_too_large")
