"""Connections that only wait: half headers, headers without end, too many connections."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest
from scripted_head import ScriptedHead, served, spoken

from moonpool.api import app as app_module
from moonpool.api.connection import http_protocol
from moonpool.api.connection.http_protocol import limited_protocol

BODY = {"prompt": "x"}


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_header_without_end_is_refused_at_its_limit() -> None:
    with served(ScriptedHead()) as url, connected(url) as link:
        link.sendall(b"GET / HTTP/1.1\r\nX: ")
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            link.sendall(b"a" * (64 << 20))
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_large_header_gets_431_and_a_usual_one_passes() -> None:
    with served(ScriptedHead()) as url:
        answer = httpx.get(f"{url}/version", headers={"x-large": "a" * 30_000})
        assert answer.status_code == 200
        with connected(url) as link:
            link.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * (http_protocol.MAX_HEADER_BYTES + 8))
            assert link.recv(4096).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX: y\r\n"])
def test_half_a_header_is_given_up(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_S", 0.2)
    with served(ScriptedHead()) as url, connected(url) as link:
        link.sendall(first)
        got = link.recv(4096)
        assert got.startswith(b"HTTP/1.1 408") if first else got == b""


def test_the_time_of_a_header_does_not_count_while_a_response_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_S", 0.1)
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 0.4, *spoken("b")])
    body = json.dumps(BODY | {"stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    with served(head) as url, connected(url) as link:
        link.sendall(request % (len(body), body))
        got = link.recv(65536)
        link.sendall(b"GET /hea")
        while part := link.recv(65536):
            got += part
        assert b"data: [DONE]" in got
        assert b"HTTP/1.1 408" in got  # of the half header, after the response


def test_idle_connections_make_room_and_busy_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "limited_protocol", lambda **_: limited_protocol(4))
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 3600.0])
    with served(head) as url:
        waiting = [connected(url) for _ in range(20)]
        assert httpx.get(f"{url}/health").status_code == 200
        body = json.dumps(BODY | {"stream": True}).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
        busy = [connected(url) for _ in range(4)]
        for link in busy:
            link.sendall(request % (len(body), body))
            assert link.recv(4096).startswith(b"HTTP/1.1 200")
        assert httpx.get(f"{url}/health").status_code == 503
        for link in [*busy, *waiting]:
            link.close()
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s and httpx.get(f"{url}/health").status_code != 200:
            time.sleep(0.02)
        assert httpx.get(f"{url}/health").status_code == 200
