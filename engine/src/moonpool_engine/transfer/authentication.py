"""Performs the handshake of `auth` over a FrameSocket."""

from __future__ import annotations

from moonpool.link.auth import MAX_HANDSHAKE_FRAME_BYTES, AuthError, Handshake, Identity
from moonpool_engine.transfer.errors import TransportError
from moonpool_engine.transfer.frame_socket import FrameSocket


def authenticate_frames(frames: FrameSocket, handshake: Handshake, deadline_s: float) -> Identity:
    """Runs the handshake over a socket and returns the peer's identity. Raises AuthError or
    TransportError; does not close the socket."""
    answer = handshake.start()
    while True:
        if answer:
            frames.send_frame(answer, deadline_s)
        if handshake.done and handshake.peer is not None:
            return handshake.peer
        try:
            answer = handshake.feed(frames.receive_frame(MAX_HANDSHAKE_FRAME_BYTES, deadline_s))
        except AuthError as error:
            if error.reply:
                _send_refusal(frames, error.reply, deadline_s)
            raise


def _send_refusal(frames: FrameSocket, reply: bytes, deadline_s: float) -> None:
    try:
        frames.send_frame(reply, deadline_s)
    except TransportError:
        return  # the peer is refused in either case
