"""Tests the server of `moonpool run`, whose first connections break while it starts."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from moonpool.children.process import ForkedChild
from moonpool.cli.run import background_server
from moonpool.cli.run.background_server import BackgroundServer, ServerEndedError


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedChild]:
    """A process that takes the place of the server and listens nowhere."""
    process = ForkedChild(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600"))
    monkeypatch.setattr(background_server, "END_S", 0.5)
    monkeypatch.setattr(
        background_server, "_fork", lambda line: (process, os.open(os.devnull, os.O_RDONLY))
    )
    yield process
    if process.poll() is None:
        process.kill()
        process.wait()


def test_a_call_that_breaks_is_made_again(sleeper: ForkedChild) -> None:
    """If a head ends while it reads the first call, the command must make the call again."""
    replies = [b"", b"", b"HTTP/1.1 200 OK\r\n\r\n"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while replies:
                call, _ = listener.accept()
                with call:
                    call.recv(1024)
                    call.sendall(replies.pop(0))

        threading.Thread(target=answer, daemon=True).start()
        server = BackgroundServer([], listener.getsockname()[1], lambda _: None)
        server.wait_until_ready(lambda: None)
    assert replies == [], "the third call is the one that was answered"


def test_a_server_that_ends_with_its_call_is_told(sleeper: ForkedChild) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            call, _ = listener.accept()
            with call, listener:
                call.recv(1024)
            time.sleep(0.2)
            sleeper.send_signal(signal.SIGKILL)

        threading.Thread(target=answer, daemon=True).start()
        server = BackgroundServer([], listener.getsockname()[1], lambda _: None)
        with pytest.raises(ServerEndedError):
            server.wait_until_ready(lambda: None)
