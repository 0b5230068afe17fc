"""Tests frames over a socket: partial transfers, bounds, deadlines, interruption."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from moonpool_engine.transfer import tcp
from moonpool_engine.transfer.errors import DeadlineError, PeerGoneError, ProtocolError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.wire import MAX_FRAME_BYTES, Refused, Slices, SlicesEnd, pack_offers


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # small, so that sends are partial
    pair = FrameSocket(a), FrameSocket(b)
    yield pair
    for end in pair:
        end.close()


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def test_payloads_of_many_odd_buffers_arrive_in_order(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = ends
    rng = random.Random(3)
    payload = [memoryview(rng.randbytes(rng.choice((0, 1, 17, 5000)))) for _ in range(1500)]
    sending = threading.Thread(target=left.send_frame, args=(b"head", soon(), payload))
    sending.start()
    assert right.receive_frame(100, soon()) == b"head"
    whole = b"".join(payload)
    target = bytearray(len(whole))
    cuts = sorted(rng.sample(range(len(whole)), 700))
    views = [memoryview(target)[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    right.receive_into(views, soon())
    sending.join()
    assert target == whole


def test_messages_round_trip(ends: tuple[FrameSocket, FrameSocket]) -> None:
    left, right = ends
    sent = [Slices(offers=pack_offers([(1, 2, 3, 2**64 - 1)])), SlicesEnd(), Refused(reason="no")]
    for message in sent:
        left.send(message, soon())
    assert [right.receive(soon()) for _ in sent] == sent


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa6Unknown", b"\x01" * 50])
def test_an_invalid_message_is_a_protocol_error(
    ends: tuple[FrameSocket, FrameSocket], body: bytes
) -> None:
    left, right = ends
    left.send_frame(body, soon())
    with pytest.raises(ProtocolError, match="malformed"):
        right.receive(soon())


def test_a_frame_over_the_bound_is_refused_before_it_is_read(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = ends
    left.socket.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="exceeds"):
        right.receive(soon())
    with pytest.raises(ProtocolError, match="exceeds"):
        left.send_frame(bytes(MAX_FRAME_BYTES + 1), soon())


def test_silence_and_a_full_socket_end_at_the_deadline(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = ends
    with pytest.raises(DeadlineError):
        right.receive(soon(0.05))
    with pytest.raises(DeadlineError):
        left.send_frame(b"x", soon(0.05), [memoryview(bytes(1 << 20))])
    with pytest.raises(DeadlineError):
        right.receive(time.monotonic() - 1)


def test_a_trickling_peer_does_not_extend_the_deadline(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    left, right = ends
    stop = threading.Event()

    def trickle() -> None:
        left.socket.sendall(struct.pack(">I", 100))
        while not stop.wait(0.02):
            left.socket.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(DeadlineError):
        right.receive(soon(0.15))
    stop.set()
    thread.join()


def test_interrupt_wakes_the_thread_that_waits(ends: tuple[FrameSocket, FrameSocket]) -> None:
    _, right = ends
    timer = threading.Timer(0.05, right.interrupt)
    timer.start()
    with pytest.raises(PeerGoneError):
        right.receive(soon())
    timer.join()
    right.close()
    right.interrupt()  # harmless afterwards
    with pytest.raises(PeerGoneError):
        right.receive(soon())


def test_a_hang_up_is_detected_behind_unread_data(ends: tuple[FrameSocket, FrameSocket]) -> None:
    ours, theirs = ends
    theirs.send(SlicesEnd(), soon())
    assert ours.has_input() and not ours.hung_up()
    theirs.interrupt()
    assert ours.hung_up()
    assert isinstance(ours.receive(soon()), SlicesEnd)


@pytest.mark.parametrize("chosen", ["bbr", "cubic", "reno"])
def test_a_near_peer_is_not_paced_by_bbr(chosen: str) -> None:
    """Any other congestion control must stay."""
    with tcp.listen("127.0.0.1", 0) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        for sock in (near, far):
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, chosen.encode())
            except OSError:
                pytest.skip(f"{chosen} cannot be had here")
            tcp.prepare(sock)
            kept = tcp.congestion_control(sock)
            assert kept == chosen if chosen != "bbr" else kept in ("cubic", "reno")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            sock.close()
