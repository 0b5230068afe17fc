"""Sends input without end in each phase of a connection: the server must end the connection soon,
take little memory, and answer other clients meanwhile. Long input that is allowed must pass."""

from __future__ import annotations

import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scripted_head import ScriptedHead, served, spoken, wait_until

from moonpool.api.connection import bounded_protocol
from moonpool.api.serving_backend import ApiOptions

MOST_BYTES = 16 << 20
"""More than all limits and the sockets' buffers together."""
SLACK_BYTES = 64 << 20
PIECE_BYTES = 64 << 10
PATIENCE_S = 60.0
PAUSE_S = 0.5
KEYS = {"k-ann": "ann", "k-op": "admin"}
OPTIONS = ApiOptions(api_keys=KEYS, operators=frozenset({"admin"}), max_body_bytes=1 << 20)
KEY = b"authorization: Bearer k-ann\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
CALL = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
HUGE = b"content-length: 99999999999\r\n\r\n"
ASK = json.dumps({"prompt": "x", "stream": True}).encode()
RUNNING = CALL + KEY + b"content-length: %d\r\n\r\n%b" % (len(ASK), ASK)
UPGRADE = b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"

ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "lines before a request": (b"", b"\r\n"),
    "a method": (b"", b"A"),
    "a path": (b"GET /", b"a"),
    "a name of a header": (b"GET / HTTP/1.1\r\n", b"a"),
    "a value of a header": (b"GET / HTTP/1.1\r\nX: ", b"a"),
    "lines of a header": (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n"),
    "a size of a chunk": (CALL + CHUNKED + b"\r\n", b"0"),
    "a size of a chunk, with a key": (CALL + KEY + CHUNKED + b"\r\n", b"0"),
    "an extension of a chunk": (CALL + CHUNKED + b"\r\n1;a=", b"b"),
    "an extension of a chunk, with a key": (CALL + KEY + CHUNKED + b"\r\n1;a=", b"b"),
    "extensions of chunks": (CALL + KEY + CHUNKED + b"\r\n", b"1;a=%b\r\n \r\n" % (b"b" * 999)),
    "trailers": (CALL + CHUNKED + b"\r\n1\r\n{\r\n0\r\n", b"X: a\r\n"),
    "trailers, with a key": (CALL + KEY + CHUNKED + b"\r\n1\r\n{\r\n0\r\n", b"X: a\r\n"),
    "a trailer": (CALL + CHUNKED + b"\r\n1\r\n{\r\n0\r\nX: ", b"a"),
    "a trailer, with a key": (CALL + KEY + CHUNKED + b"\r\n1\r\n{\r\n0\r\nX: ", b"a"),
    "trailers of a route without a body": (b"GET /health HTTP/1.1\r\nhost: x\r\n" + CHUNKED
                                           + b"\r\n0\r\n", b"X: a\r\n"),
    "a body of a refused call": (CALL + HUGE, b" "),
    "chunks of a refused call": (CALL + CHUNKED + b"\r\n", b"1\r\n \r\n"),
    "a body above its limit": (CALL + KEY + CHUNKED + b"\r\n", b"100\r\n%b\r\n" % (b" " * 256)),
    "a body that is declared too large": (CALL + KEY + HUGE, b" "),
    "a body that nobody reads": (b"POST /ping HTTP/1.1\r\nhost: x\r\n" + HUGE, b" "),
    "chunks that nobody reads": (b"GET /health HTTP/1.1\r\nhost: x\r\n" + CHUNKED + b"\r\n",
                                 b"1\r\n \r\n"),
    "a body beside a stream": (b"GET /cluster/events HTTP/1.1\r\nhost: x\r\n" + KEY + CHUNKED
                               + b"\r\n", b"100\r\n%b\r\n" % (b" " * 256)),
    "requests that are not read": (b"", b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"),
    "requests behind an answer": (RUNNING, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
    "a header behind an answer": (RUNNING + b"GET / HTTP/1.1\r\nX: ", b"a"),
    "lines behind an answer": (RUNNING, b"\r\n"),
    "a body behind an answer": (RUNNING + CALL + KEY + CHUNKED + b"\r\n",
                                b"100\r\n%b\r\n" % (b" " * 256)),
    "a trailer behind an answer": (RUNNING + CALL + KEY + CHUNKED + b"\r\n0\r\nX: ", b"a"),
    "bytes after the last request": (
        RUNNING.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n"), b"a"),
    "frames after an upgrade": (b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE, b"\x81\x00"),
    "upgrades": (b"", b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE),
    "a body of an upgrade": (CALL + CHUNKED + UPGRADE, b"1\r\n \r\n"),
    "bytes of TLS": (b"\x16\x03\x01\x02\x00", b"\x01"),
    "a body that waits to be asked for": (
        CALL + KEY + CHUNKED + b"expect: 100-continue\r\n\r\n0\r\nX: ", b"a"),
}  # fmt: skip


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


class Other:
    """Acts as another client, which sends calls all the time."""

    def __init__(self, url: str) -> None:
        self.num_answers = 0
        self.wrong: list[str] = []
        self._url = url
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._ends.wait(0.01):
                try:
                    status = client.get("/v1/models", headers={"x-api-key": "k-op"}).status_code
                    self.num_answers += status == 200
                    if status != 200:
                        self.wrong.append(str(status))
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


def send_without_end(link: socket.socket, piece: bytes) -> int:
    """Sends until the server ends the connection or stops reading, at most MOST_BYTES. Returns the
    number of sent bytes."""
    link.setblocking(False)
    whole = memoryview(piece * (PIECE_BYTES // len(piece) + 1))
    num_sent = at = 0
    while num_sent < MOST_BYTES:
        if not select.select([], [link], [], PAUSE_S)[1]:
            return num_sent
        try:
            count = link.send(whole[at:])
        except BlockingIOError:
            continue
        except OSError:
            return num_sent
        num_sent += count
        at = (at + count) % len(whole)
    return num_sent


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 3600.0])
    head.most_views = 1 << 30
    with served(head, OPTIONS) as found:
        yield found


@pytest.mark.parametrize("name", ENDLESS)
def test_input_without_end_is_bounded_and_others_are_answered(url: str, name: str) -> None:
    first, endless = ENDLESS[name]
    other = Other(url)
    try:
        before = rss_bytes()
        with connected(url) as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
            link.sendall(first)
            num_sent = send_without_end(link, endless)
        num_before = other.num_answers
        assert wait_until(lambda: other.num_answers > num_before)
    finally:
        other.end()
    assert num_sent < MOST_BYTES
    assert rss_bytes() - before < SLACK_BYTES
    assert other.wrong == []


SLOW = {
    "a header": b"GET / HTTP/1.1\r\nX: ",
    "a trailer of a refused call": CALL + CHUNKED + b"\r\n0\r\nX: ",
    "a chunk of a refused call": CALL + CHUNKED + b"\r\nFFFFFFF\r\n",
    "a body of a refused call": CALL + b"content-length: 99999999\r\n\r\n",
    "a body that nobody reads": b"POST /ping HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n",
    "a trailer of a call": CALL + KEY + CHUNKED + b"\r\n0\r\nX: ",
    "a body of a call": CALL + KEY + b"content-length: 99999\r\n\r\n",
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("piece", [b"", b"a"])
def test_a_phase_that_does_not_end_has_a_time(
    monkeypatch: pytest.MonkeyPatch, name: str, piece: bytes
) -> None:
    monkeypatch.setattr(bounded_protocol, "HEADER_S", 0.2)
    monkeypatch.setattr(bounded_protocol, "LINGER_S", 0.1)
    options = ApiOptions(api_keys=KEYS, body_timeout_s=0.2)
    with served(ScriptedHead(), options) as url, connected(url) as link:
        link.sendall(SLOW[name])
        until_s = time.monotonic() + PATIENCE_S
        ended = False
        while not ended and time.monotonic() < until_s:
            try:
                link.sendall(piece)
                if select.select([link], [], [], 0.02)[0]:
                    ended = not link.recv(4096) and not piece
            except OSError:
                ended = True
        assert ended


def statuses(got: bytes) -> list[int]:
    return [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]]


def read_all(link: socket.socket) -> bytes:
    got = b""
    while part := link.recv(1 << 16):
        got += part
    return got


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (CALL + KEY + CHUNKED + b"\r\n1\r\n{\r\n0\r\n" + b"X: a\r\n" * 20_000, [431]),
        (CALL + KEY + CHUNKED + b"\r\n1;a=" + b"b" * 100_000, [431]),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 300 + b"\r\n", [431]),
        (b"GET / HTTP/1.1\r\nhost: x\r\nX: " + b"a" * 70_000, [431]),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /\x00 HTTP/1.1\r\n\r\n", [200, 400]),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n\r\n", [200, 400]),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n"
         + b"a: b\r\n" * 300 + b"\r\n", [200, 431]),
    ],
)  # fmt: skip
def test_what_is_too_much_is_answered_once_after_earlier_requests(
    url: str, sent: bytes, expected: list[int]
) -> None:
    with connected(url) as link:
        link.sendall(sent)
        assert statuses(read_all(link)) == expected


def test_a_trailer_changes_nothing(url: str) -> None:
    with connected(url) as link:
        link.sendall(
            CALL + CHUNKED + b"connection: close\r\n\r\n1\r\n{\r\n0\r\n" + KEY
            + b"content-type: text/plain\r\n\r\n"
        )  # fmt: skip
        assert statuses(read_all(link)) == [401]


LONG = json.dumps({"tokens": [72] * 80_000}).encode()
LARGE = json.dumps({"tokens": [72] * 1_300_000}).encode()
READ = b"POST /detokenize HTTP/1.1\r\nhost: x\r\n" + KEY


def chunks_of(size: int, body: bytes, extension: bytes = b"") -> bytes:
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(one), extension, one) for one in pieces)


@pytest.mark.parametrize(
    "request_",
    [
        READ + CHUNKED + b"\r\n" + chunks_of(1, LONG) + b"0\r\n\r\n",
        READ + CHUNKED + b"\r\n" + chunks_of(1 << 16, LARGE, b";chunk-signature=" + b"a" * 64)
        + b"0\r\nX-Checksum: 1\r\n\r\n",
        READ + b"content-length: %d\r\n\r\n%b" % (len(LARGE), LARGE),
        READ + b"content-length: %d\r\n" % len(LONG) + UPGRADE + LONG,
        READ + CHUNKED + UPGRADE.replace(b"websocket", b"h2c") + chunks_of(999, LONG)
        + b"0\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_long_and_allowed_is_answered(request_: bytes) -> None:
    after = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    few = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + KEY + b"\r\n"
    options = ApiOptions(api_keys=KEYS)
    with served(ScriptedHead(), options) as url, connected(url) as link:
        link.sendall(few * 3 + request_ + few * 3 + after)
        assert statuses(read_all(link)) == [200] * 8


def test_a_body_after_an_upgrade_is_no_request(url: str) -> None:
    hidden = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
    with connected(url) as link:
        link.sendall(CALL + b"content-length: %d\r\n" % len(hidden) + UPGRADE)
        assert link.recv(4096).startswith(b"HTTP/1.1 401")
        link.sendall(hidden + b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got = read_all(link)
        assert statuses(got) == [200] and b'"ready"' in got


def test_an_upgrade_is_ignored_and_logged_by_nobody(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    with httpx.Client(base_url=url, headers=headers) as client:
        for _ in range(3):
            assert client.get("/health").status_code == 200
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\nhost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a b\r\nconnection: close\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a/b\r\nconnection: close\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost:\r\nconnection: close\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: [::1]:80\r\nconnection: close\r\n\r\n", 200),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", 400),
    ],
)
def test_a_request_names_one_host(url: str, head: bytes, status: int) -> None:
    with connected(url) as link:
        link.sendall(head)
        assert statuses(read_all(link)) == [status]
