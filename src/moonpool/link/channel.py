"""The control connection: a handshake, then typed frames of 4 length bytes and msgpack.

The connection is an asyncio protocol rather than a stream: the callback that brings a frame's bytes
also handles the frame, which halves the head's cost per token. Writes never wait but are bounded: a
peer that does not read is disconnected.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from moonpool.framing import FrameTooLongError, Framing
from moonpool.link.auth import MAX_HANDSHAKE_FRAME_BYTES, AuthError, Handshake, Identity
from moonpool.link.tls import NO_TLS_HERE, PLAIN_ANSWER, TLS_STARTS, is_refusal, tls_text
from moonpool.protocol.sparse import without_defaults
from moonpool.protocol.versions import NEWEST_PROTOCOL
from moonpool.types import MALFORMED

In = TypeVar("In")
In_contra = TypeVar("In_contra", contravariant=True)
Out = TypeVar("Out")

_FRAMES = Framing("<", max_bytes=64 << 20)
_HANDSHAKE_FRAMES = Framing("<", MAX_HANDSHAKE_FRAME_BYTES)
MAX_UNSENT_BYTES = 256 << 20
HANDSHAKE_S = 10.0


class Listener(Protocol[In_contra]):
    """The user of a channel. Called on the event loop.

    `on_closed` is called exactly once after `on_connected`, even if the handshake failed.
    """

    def on_connected(self) -> None:
        """The connection is there, and the handshake begins."""
        ...

    def on_open(self, peer: Identity) -> None: ...

    def on_frame(self, frame: In_contra) -> None: ...

    def on_closed(self, reason: str) -> None: ...


class Channel(asyncio.Protocol, Generic[In, Out]):
    """Receives `In`, sends `Out` (both unions of tagged structs)."""

    def __init__(
        self,
        handshake: Handshake,
        incoming: msgspec.msgpack.Decoder[In],
        listener: Listener[In],
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._handshake: Handshake | None = handshake
        self._decoder = incoming
        self._encoder = msgspec.msgpack.Encoder()
        self._listener = listener
        self._handshake_s = handshake_s
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._reason = ""
        self.protocol = 0  # the agreed protocol version; 0 before `on_open`
        self.refused = False  # whether the handshake failed, so that a retry would not help
        self._patience: asyncio.TimerHandle | None = None

    def send(self, *frames: Out) -> None:
        """Queues frames in one write. Does nothing before `on_open` or on a closed connection."""
        transport = self._transport
        if transport is None or self._handshake is not None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail("the peer does not read its messages")
            return
        whole = self.protocol == NEWEST_PROTOCOL
        bodies = [
            self._encoder.encode(frame if whole else without_defaults(frame)) for frame in frames
        ]
        transport.write(b"".join(map(_FRAMES.framed, bodies)))

    def close(self, reason: str = "closed on this side") -> None:
        """Ends the connection after everything is sent."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Ends the connection immediately. `close` would wait for a peer that does not read from
        it."""
        self._fail(reason)

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def local_host(self) -> str:
        """Returns this side's host as the peer sees it."""
        return self.local_address[0]

    @property
    def local_address(self) -> tuple[str, int]:
        """Returns this side's host and port as the peer sees them."""
        assert self._transport is not None
        host, port = self._transport.get_extra_info("sockname")[:2]
        return str(host), int(port)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(
            self._handshake_s, self._fail, "the handshake took too long"
        )
        self.begin(transport)

    def begin(self, transport: asyncio.BaseTransport) -> None:
        """Begins the handshake, without a limit to its time."""
        assert self._handshake is not None
        # uvloop's transport has another base class
        self._transport = cast(asyncio.Transport, transport)
        self._listener.on_connected()
        self._write_body(self._handshake.start())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._handshake is not None and bytes(self._buffer[:2]) in TLS_STARTS:
            self.refused = True
            if self._transport is not None:
                self._transport.write(PLAIN_ANSWER)
            self.close(NO_TLS_HERE)
            return
        while not self._reason:
            try:
                body = (_HANDSHAKE_FRAMES if self._handshake else _FRAMES).pop(self._buffer)
            except FrameTooLongError as error:
                self._fail(str(error))
                return
            if body is None:
                return
            if self._handshake is not None:
                self._shake_hands(self._handshake, body)
            else:
                self._take(body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        if isinstance(exc, ssl.SSLError):
            self.refused = self.refused or is_refusal(exc)
            self._reason = self._reason or tls_text(exc)
        self._listener.on_closed(self._reason or (str(exc) if exc else "closed by the peer"))

    def _take(self, body: bytes) -> None:
        try:
            frame = self._decoder.decode(body)
        except MALFORMED as error:
            self._fail(f"a malformed frame: {error}")
            return
        self._listener.on_frame(frame)

    def _shake_hands(self, handshake: Handshake, body: bytes) -> None:
        try:
            self._write_body(handshake.feed(body))
        except AuthError as error:
            self.refused = True
            self._write_body(error.reply)
            self.close(str(error))
            return
        if handshake.done and handshake.peer is not None and handshake.agreed is not None:
            self._handshake, self.protocol = None, handshake.agreed.protocol
            if self._patience is not None:
                self._patience.cancel()
            self._listener.on_open(handshake.peer)

    def _write_body(self, body: bytes) -> None:
        if body and self._transport is not None:
            self._transport.write(_FRAMES.framed(body))

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()
