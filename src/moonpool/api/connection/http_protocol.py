"""One HTTP connection of a head: reads within limits, and keeps calls that outlive the head."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, cast

from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from moonpool.api.connection.bounded_protocol import BoundedProtocol
from moonpool.api.connection.call_log import StreamKeeper
from moonpool.api.connection.connection_limit import ConnectionLimit, most_connections
from moonpool.api.connection.kept_answers import KeptAnswers, Known
from moonpool.api.connection.kept_stream import (
    HalfRead,
    KeptStream,
    Opening,
    ResumedTransport,
    StreamFacts,
    accepted_bytes,
    request_bytes,
)
from moonpool.api.connection.poison import MarkedWork, WorkMark
from moonpool.api.sharing.shared_buffer import party_at
from moonpool.log_limit import limited_logger

READ_S = 5.0
"""Seconds in which a request must arrive completely before its connection goes to another head."""
FLUSH_S = 0.05
"""Time between checks whether the kernel has accepted all of a complete response."""


class LimitedProtocol(BoundedProtocol):
    """Created by uvicorn for each connection; `limit` is set by `limited_protocol`."""

    limit: ConnectionLimit
    keeper: StreamKeeper | None = None
    """Holds answers that must outlive this process."""
    answers: KeptAnswers
    mark: WorkMark | None = None
    """Shared memory in which the supervisor sees which call is being processed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._kept: KeptStream | None = None
        self._resumed: KeptStream | None = None
        self._half_read: HalfRead | None = None
        self._received_before: list[bytes] = []  # bytes that an earlier head received
        self._num_messages = 0  # number of requests that have arrived
        self._num_sent = 0  # number of bytes that an earlier head sent and this head makes again

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._num_sent:
            resumed = ResumedTransport(transport, self._num_sent)
            transport = cast(asyncio.Transport, resumed)
        super().connection_made(transport)
        if self._is_ending:
            return
        if self._half_read is None and self._resumed is None:
            # called before the first byte is read, because unread bytes are lost with the process
            self._keep_half_read()
        with self._marked():
            # these bytes come before those that the kernel holds
            for piece in self._received_before:
                self._parse(piece)
        self._received_before.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        is_complete = exc is None and self._running is not None and self._running.response_complete
        if self._kept is not None and not is_complete:
            self.answers.lose(self._kept)
            self._kept = None
        self._drop_kept()
        self._drop_half_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        with self._marked():
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        if self._kept is not None:
            self._kept.note_read_ahead()
        if self._half_read is not None:
            self._half_read.note(data)
        begins = not self._is_partial and not self._responds
        num_messages = self._num_messages
        super().data_received(data)
        is_whole = num_messages != self._num_messages
        if begins and not is_whole and not self._is_ending and self._half_read is None:
            self._keep_half_read(data)

    def _begin_request(self) -> None:
        self.scope["moonpool.connection"] = self  # type: ignore[typeddict-unknown-key]
        kept = self._resumed
        if kept is None:
            super()._begin_request()
            return
        self._kept, self._resumed = kept, None
        kept.mark, kept.enders = self.mark, self.answers.enders
        self.answers.begin(kept, self.transport.abort)
        self.scope["moonpool.kept"] = kept  # type: ignore[typeddict-unknown-key]
        super()._begin_request()
        self.cycle.default_headers = list(kept.opening.default_headers)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        super()._start_asgi_task(cycle, app if self.mark is None else self._marked_app(app))

    def on_message_complete(self) -> None:
        self._num_messages += not self._upgrades
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._drop_half_read()
        if self._kept is not None:
            self.loop.call_soon(self._end_kept, self._kept)
        super().on_response_complete()

    def _refuse(self, status: int, text: str) -> None:
        self._drop_half_read()
        super()._refuse(status, text)

    # Methods about what the supervisor sees if this process ends

    @property
    def number(self) -> int | None:
        """Returns the number of the call with which another head would continue."""
        received = self._kept or self._half_read or self._resumed
        return None if received is None else received.number

    @contextmanager
    def _marked(self) -> Iterator[None]:
        number = None if self.mark is None else self.number
        if self.mark is None or number is None:
            yield
            return
        self.mark.set(number)
        try:
            yield
        finally:
            self.mark.clear()

    def _marked_app(self, app: ASGI3Application) -> ASGI3Application:
        async def run(scope: Any, receive: Any, send: Any) -> None:
            await MarkedWork(app(scope, receive, send), self)  # type: ignore[arg-type]

        return run

    # Methods for another head that takes over

    def leave(self, give: Callable[[int], None]) -> float:
        """Gives the connection away if no call is under way on it. Returns how many seconds to wait
        for the connection: 0 if it was given away or ends, or if its call is in a log; READ_S while
        a request arrives; inf while an answer without a log is under way."""
        is_kept = self._kept is not None and self._kept.has_socket
        if is_kept or self._half_read or self.transport.is_closing():
            return 0.0
        if self._responds:
            return inf
        if self._refusal is not None:
            return 0.0
        if self._is_partial:
            return READ_S
        if self.scheme != "https":
            give(self._fd)
        self.transport.abort()
        return 0.0

    # Methods about answers that outlive this process

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
    ) -> KeptStream | None:
        """Keeps the call that is being answered in a log. Returns None if the call cannot be
        kept."""
        self._drop_kept()
        base = None if self.pipeline else self._sent_bytes()
        may_return = digest and not self.transport.is_closing()
        if self.keeper is not None and (base is not None or may_return):
            opening = Opening(
                request=b"" if base is None else request_bytes(scope, body),
                default_headers=() if base is None else tuple(self.cycle.default_headers),
                base=base or 0,
                arrived_s=arrived_s,
                tenant=tenant,
                is_operator=is_operator,
                facts=facts,
                digest=digest,
                num_returns=num_returns,
                num_ended=num_ended,
            )
            fd = None if base is None else self._fd
            self._kept = KeptStream.begin(self.keeper, fd, opening, self._tenant)
            if self._kept is not None:
                self._kept.mark, self._kept.enders = self.mark, self.answers.enders
                self.answers.begin(self._kept, self.transport.abort)
                if self.mark is not None:
                    # the call had another number, or none, before
                    self.mark.set(self._kept.number)
        # dropped only now, so that at least one of the two logs exists at any moment
        self._drop_half_read()
        if self._kept is not None and self._is_partial:
            self._kept.note_read_ahead()
        return self._kept

    async def known(
        self, tenant: str, request_id: str, digest: bytes, displaces: bool
    ) -> Known | None:
        """Returns the known part of the answer, if the call was sent before."""
        return await self.answers.find(tenant, request_id, digest, displaces)

    def num_ended(self, tenant: str, digest: bytes) -> int:
        """Returns how many heads calls like this one have ended."""
        return self.answers.enders.count(tenant, digest)

    def begin_response(self) -> None:
        """Notes that all bytes from now on follow from the kept call, if there is one."""
        self._drop_half_read()

    def _sent_bytes(self) -> int | None:
        """All bytes that this connection has sent, or has yet to send, as `accepted_bytes` counts
        them, or None if another head cannot go on with it."""
        if self.transport.is_closing() or self.scheme == "https":
            return None
        try:
            return accepted_bytes(self._fd) + self.transport.get_write_buffer_size()
        except OSError:
            return None

    def resume(self, received: KeptStream | HalfRead, num_sent: int) -> None:
        """Continues a call that another head has received completely or in part, and whose client
        was sent `num_sent` bytes. Must be called before the connection is made."""
        if isinstance(received, KeptStream):
            self._resumed = received
        else:
            self._half_read = received
            self.limit.half_read.add(received.party, 1)
        self._received_before, self._num_sent = received.received, num_sent

    @classmethod
    def hold(cls, sock: socket.socket) -> HalfRead | None:
        """Keeps a connection that was accepted just now. A head that dies before this call returns
        loses the connection, so call `hold` before anything else, then `start_with`."""
        with suppress(OSError):
            return cls._new_half_read(sock.fileno(), accepted_bytes(sock.fileno()), party_at(sock))
        return None

    def start_with(self, half_read: HalfRead | None) -> None:
        """Begins with a connection that `hold` keeps. Call this method before `connection_made`."""
        self._half_read = half_read

    def _keep_half_read(self, data: bytes = b"") -> None:
        """Keeps a request that began with these bytes and is not complete yet."""
        base = self._sent_bytes()
        if base is not None:
            self._half_read = self._new_half_read(self._fd, base, self._address)
        if self._half_read is not None:
            self._half_read.note(data)

    @classmethod
    def _new_half_read(cls, socket_fd: int, base: int, party: str) -> HalfRead | None:
        if cls.keeper is None or not cls.limit.half_read.has_room(party):
            return None
        half_read = HalfRead.begin(cls.keeper, socket_fd, base, party)
        if half_read is not None:
            cls.limit.half_read.add(party, 1)
        return half_read

    def _drop_half_read(self) -> None:
        if self._half_read is not None:
            self._half_read.drop()
            self.limit.half_read.release(self._half_read.party)
            self._half_read = None

    def _end_kept(self, kept: KeptStream) -> None:
        """Drops the log of an answer once the kernel has accepted all of it."""
        if kept is not self._kept or self.transport.is_closing():
            return  # the log is dropped when the connection ends
        if self.transport.get_write_buffer_size():
            self.loop.call_later(FLUSH_S, self._end_kept, kept)
            return
        self._drop_kept()
        if kept.has_lost_bytes:
            self.transport.close()

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self.answers.drop(self._kept)
            self._kept = None


def limited_protocol(
    largest: int | None = None,
    keeper: StreamKeeper | None = None,
    answers: KeptAnswers | None = None,
    mark: WorkMark | None = None,
) -> type[LimitedProtocol]:
    """Returns a protocol class whose connections share one limit."""
    limited_logger("uvicorn.error")
    limit = ConnectionLimit(largest or most_connections(keeper is not None))
    shared = {
        "limit": limit,
        "keeper": keeper,
        "answers": answers or KeptAnswers(),
        "mark": mark,
    }
    return type("LimitedProtocol", (LimitedProtocol,), shared)
