"""The channel for steps over TLS: between machines, with certificates."""

from __future__ import annotations

import select
import time

from moonpool_engine.attention_offload.channel import (
    CHECK_S,
    AttentionChannelError,
    Payload,
    ReceivedEarly,
    StreamChannel,
    view_of,
)
from moonpool_engine.attention_offload.wire import Header
from moonpool_engine.transfer.errors import PeerGoneError
from moonpool_engine.transfer.tls_frames import TlsFrameSocket, joined

_RECORD_BYTES = 1 << 14  # the most bytes that one call returns


class TlsChannel(StreamChannel):
    """A channel over a TLS connection, which it owns. See `channel.AttentionChannel`.

    The socket is non-blocking, so that the model worker's end can read ahead while a record is not
    completely sent.
    """

    transport = "tls"

    def __init__(
        self, frames: TlsFrameSocket, timeout_s: float | None, reads_ahead: bool = False
    ) -> None:
        self.timeout_s = timeout_s
        self._frames = frames
        self._reads_ahead = reads_ahead
        self._ahead = ReceivedEarly()

    def send(self, header: Header, *payload: Payload) -> None:
        """Raises AttentionChannelError if the peer is gone or takes nothing for `timeout_s`."""
        parts = [view_of(part) for part in payload]
        try:
            for buffer in joined(
                [memoryview(header.pack()), *(part for part in parts if len(part))]
            ):
                self._send_all(buffer)
        except PeerGoneError as error:
            raise AttentionChannelError(f"cannot send to the peer: {error}") from None

    def _send_all(self, buffer: memoryview) -> None:
        sent, ends_s = 0, self._ends_s()
        while sent < len(buffer):
            count, events = self._frames.send_now(buffer[sent:])
            if count:
                sent, ends_s = sent + count, self._ends_s()
                continue
            if self._reads_ahead:
                self._read_ahead()
                events |= select.POLLIN
            if not self._frames.poll(events, CHECK_S) and time.monotonic() > ends_s:
                raise AttentionChannelError(f"the peer received nothing for {self.timeout_s} s")

    def _read_ahead(self) -> None:
        """Reads into the buffer what has arrived."""
        while self._frames.has_input():
            data = bytearray(_RECORD_BYTES)
            count, events = self._frames.receive_now(memoryview(data))
            if events:
                return  # only a part of a record has arrived
            self._ahead.put(bytes(data[:count]))

    def receive_into(self, target: Payload) -> None:
        """Raises AttentionChannelError if the peer is gone or sends nothing for `timeout_s`."""
        rest = self._ahead.get(view_of(target))
        ends_s = self._ends_s()
        try:
            while len(rest):
                count, events = self._frames.receive_now(rest)
                if count:
                    rest, ends_s = rest[count:], self._ends_s()
                elif not self._frames.poll(events, 1.0) and time.monotonic() > ends_s:
                    raise AttentionChannelError("the peer sends nothing: timed out")
        except PeerGoneError as error:
            raise AttentionChannelError(f"the peer is gone: {error}") from None

    def _ends_s(self) -> float:
        return float("inf") if self.timeout_s is None else time.monotonic() + self.timeout_s

    def close(self) -> None:
        self._frames.close()
