"""Tests frames over TLS: both directions at the same time, and a socket that another thread
closes."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from moonpool_engine.transfer.errors import PeerGoneError
from moonpool_engine.transfer.tls_frames import TlsFrameSocket, accepted, connected
from tests.certificates import shared_tls

NUM_FRAMES = 300


def pair() -> tuple[TlsFrameSocket, TlsFrameSocket]:
    ours, theirs = socket.socketpair()
    near, far = connected(shared_tls(), ours), accepted(shared_tls(), theirs)
    shaking = threading.Thread(target=far.begin, args=(soon(),))
    shaking.start()
    near.begin(soon())
    shaking.join()
    return near, far


def soon() -> float:
    return time.monotonic() + 60


def test_an_end_sends_in_one_thread_and_receives_in_another() -> None:
    near, far = pair()
    bodies = [random.Random(i).randbytes(random.Random(i).randint(1, 100_000)) for i in range(50)]
    failures: list[BaseException] = []

    def send(frames: TlsFrameSocket) -> None:
        try:
            for i in range(NUM_FRAMES):
                frames.send_frame(bodies[i % 50], soon())
        except BaseException as error:
            failures.append(error)

    def receive(frames: TlsFrameSocket) -> None:
        try:
            for i in range(NUM_FRAMES):
                assert frames.receive_frame(1 << 20, soon()) == bodies[i % 50]
        except BaseException as error:
            failures.append(error)

    work = [(send, near), (receive, near), (send, far), (receive, far)]
    threads = [threading.Thread(target=body, args=(frames,)) for body, frames in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    near.close()
    far.close()


@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_a_thread_that_waits_fails_when_another_ends_the_connection(how: str) -> None:
    near, far = pair()
    threading.Timer(0.1, getattr(near, how)).start()
    with pytest.raises(PeerGoneError):
        near.receive_frame(100, soon())
    with pytest.raises(PeerGoneError):
        far.receive_frame(100, soon())
    far.close()
