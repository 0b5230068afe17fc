"""Tests connections that occupy the server without a call: incomplete headers, headers without end,
too many connections."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from scripted_head import ScriptedHead, Step, served, spoken, wait_until

from moonpool.api import app as app_module
from moonpool.api.connection import bounded_protocol
from moonpool.api.connection.http_protocol import limited_protocol
from moonpool.api.serving_backend import Output
from moonpool.log_limit import MAX_LINES
from moonpool.types import Request, Token

BODY = {"prompt": "x"}


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


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
            link.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * (bounded_protocol.MAX_HEADER_BYTES + 8))
            assert link.recv(4096).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nX: y\r\n"])
def test_half_a_header_is_given_up(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(bounded_protocol, "HEADER_S", 0.2)
    with served(ScriptedHead()) as url, connected(url) as link:
        link.sendall(first)
        got = link.recv(4096)
        assert got.startswith(b"HTTP/1.1 408") if first else got == b""


def test_the_time_of_a_header_does_not_count_while_a_response_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_protocol, "HEADER_S", 0.1)
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
        assert b"HTTP/1.1 408" in got  # this response to the half header follows the first response


def endless(_: Request) -> Iterator[Step]:
    while True:
        yield Output(tokens=tuple(Token(97) for _ in range(200)))
        yield 0.0


def streaming(url: str) -> socket.socket:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = url.removeprefix("http://").split(":")
    link.settimeout(60)
    link.connect((host, int(port)))
    body = json.dumps(BODY | {"stream": True, "return_token_ids": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    link.sendall(request % (len(body), body))
    return link


def test_a_stream_that_nobody_reads_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 0.5)
    head = ScriptedHead(endless)  # type: ignore[arg-type]
    with served(head) as url, streaming(url):
        assert wait_until(lambda: len(head.requests) == 1)
        assert wait_until(lambda: len(head.aborted) == 1)
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_stream_that_nobody_reads_takes_no_more_output_than_fits_its_buffers() -> None:
    num_outputs = 0

    def counted(request: Request) -> Iterator[Step]:
        nonlocal num_outputs
        for step in endless(request):
            num_outputs += isinstance(step, Output)
            yield step

    head = ScriptedHead(counted)  # type: ignore[arg-type]
    with served(head) as url, streaming(url):
        assert wait_until(lambda: num_outputs > 10)
        before = -1
        while num_outputs != before:
            before = num_outputs
            time.sleep(0.5)
        # each call writes about 1 KiB, so the kernel's buffer and 64 KiB are full by then
        assert num_outputs < 10_000
        assert head.aborted == []


@pytest.mark.long
def test_a_stream_that_is_read_slowly_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "UNREAD_S", 3.0)
    monkeypatch.setattr(bounded_protocol, "MIN_READ_BYTES", 1)
    head = ScriptedHead(endless)  # type: ignore[arg-type]
    with served(head) as url, streaming(url) as link:
        until_s = time.monotonic() + 7
        while time.monotonic() < until_s:
            for _ in range(200):
                assert link.recv(4096)
            time.sleep(0.05)
        assert head.aborted == []


def test_requests_sent_far_ahead_end_the_connection() -> None:
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 3600.0])
    body = json.dumps(BODY).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    with served(head) as url, connected(url) as link:
        link.sendall(request % (len(body), body))
        assert wait_until(lambda: len(head.requests) == 1)
        link.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        assert wait_until(lambda: len(head.aborted) == 1)


def test_a_client_that_leaves_ends_its_request_though_another_waits_behind_it() -> None:
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 3600.0])
    body = json.dumps(BODY).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    with served(head) as url:
        with connected(url) as link:
            link.sendall(request % (len(body), body) + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert wait_until(lambda: len(head.requests) == 1)
        assert wait_until(lambda: len(head.aborted) == 1)


def test_idle_connections_make_room_and_busy_ones_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "limited_protocol", lambda **_: limited_protocol(4))
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 3600.0])
    with served(head) as url:
        waiting = [connected(url) for _ in range(20)]
        assert httpx.get(f"{url}/health").status_code == 200
        said = [line for line in caplog.messages if "4 connections are open" in line]
        assert 1 <= len(said) <= MAX_LINES
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
