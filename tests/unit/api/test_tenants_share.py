"""Tests that a server still serves other tenants and addresses while one tenant, or one address,
fills each of its buffers as far as it can."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
from scripted_head import ScriptedHead, Step, served, spoken, wait_until

from moonpool.api import app as app_module
from moonpool.api import turns
from moonpool.api.connection import bounded_protocol, connection_limit
from moonpool.api.connection.http_protocol import limited_protocol
from moonpool.api.page import live_page
from moonpool.api.serving_backend import ApiOptions, Output
from moonpool.api.sharing import shared_buffer
from moonpool.types import Request, Token

KEYS = {"k-ann": "ann", "k-bob": "bob", "k-eve": "eve"}
OPTIONS = ApiOptions(api_keys=KEYS, max_body_bytes=1 << 20)
MANY = 24
LARGEST = OPTIONS.max_body_bytes


def script(request: Request) -> Iterator[Step]:
    """Keeps requests of more than one token waiting for their second token."""
    if request.sampling.max_tokens == 1:
        yield from spoken("a")
        return
    yield Output(tokens=(Token(97),))
    yield 3600.0


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a server with little room of each kind."""
    monkeypatch.setattr(app_module, "limited_protocol", lambda **_: limited_protocol(32))
    # leaves room for eight of the largest bodies
    monkeypatch.setattr(shared_buffer, "MAX_LARGE_BYTES", 0)
    monkeypatch.setattr(shared_buffer, "MAX_SMALL_BYTES", 32 * shared_buffer.SMALL_BYTES)
    monkeypatch.setattr(connection_limit, "MAX_HALF_HEADER_BYTES", 256 << 10)
    monkeypatch.setattr(connection_limit, "MAX_UNREAD_BYTES", 4 << 20)
    monkeypatch.setattr(live_page, "MAX_VIEWERS", 8)
    monkeypatch.setattr(turns, "MAX_WAITING", 8)
    head = ScriptedHead(script)  # type: ignore[arg-type]
    head.most_views = 1 << 30
    with served(head, OPTIONS) as found:
        yield found


def connected(url: str, address: str = "127.0.0.1") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60, source_address=(address, 0))


def post(path: str, key: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{lines}content-length: {size}\r\n\r\n".encode() + body


def unfinished(size: int, key: str = "k-eve") -> bytes:
    return post("/tokenize", key, b"{" + b" " * (size - 2), size)


def stream() -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True}).encode()
    return post("/v1/completions", "k-eve", body)


def viewer() -> bytes:
    return b"GET /cluster/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k-eve\r\n\r\n"


def unread() -> bytes:
    body = json.dumps({"tokens": [72] * 300_000}).encode()
    return post("/detokenize", "k-eve", body)


GRAMMAR = {"prompt": "x", "max_tokens": 1}


def grammar() -> bytes:
    """Returns a new grammar each time, which takes long to compile."""
    grammar.count = getattr(grammar, "count", 0) + 1  # type: ignore[attr-defined]
    wanted = {"regex": f"(a{{1,400}}b){{{50 + grammar.count}}}"}  # type: ignore[attr-defined]
    body = GRAMMAR | {"structured_outputs": wanted}
    return post("/v1/completions", "k-eve", json.dumps(body).encode())


FLOODS: dict[str, Callable[[], bytes]] = {
    "large bodies that are not complete": lambda: unfinished(LARGEST),
    "small bodies that are not complete": lambda: unfinished(shared_buffer.SMALL_BYTES),
    "bodies of a byte": lambda: unfinished(2),
    "large bodies of a wrong key": lambda: unfinished(LARGEST, "k-nobody"),
    "answers that do not end": stream,
    "viewers of the live page": viewer,
    "responses that are not read": unread,
    "grammars": grammar,
    "headers that are not complete": lambda: b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000,
    "connections": lambda: b"",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_another_tenant_is_served_beside_a_flood(url: str, flood: str) -> None:
    with ExitStack() as stack:
        for _ in range(MANY):
            link = stack.enter_context(connected(url))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.setblocking(False)
            send_what_fits(link, FLOODS[flood]())
        headers = {"authorization": "Bearer k-bob"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            for _ in range(3):
                body = {"prompt": "x", "max_tokens": 1}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                schema = body | {"structured_outputs": {"choice": ["a", "b"]}}
                assert client.post("/v1/completions", json=schema).status_code == 200
            large = {"tokens": [72] * (LARGEST // 8)}
            assert client.post("/detokenize", json=large).status_code == 200
            with client.stream("GET", "/cluster/events") as events:
                assert events.status_code == 200
                assert next(events.iter_lines()).startswith("data: ")


def send_what_fits(link: socket.socket, data: bytes) -> None:
    """Sends until the server reads no more, or has refused the rest."""
    at = 0
    while at < len(data) and select.select([], [link], [], 1.0)[1]:
        try:
            at += link.send(data[at : at + (1 << 16)])
        except OSError:
            return


def status_of(link: socket.socket, timeout_s: float = 60.0) -> int:
    """Returns the status, or 0 if the server does not answer."""
    if not select.select([link], [], [], timeout_s)[0]:
        return 0
    return int(link.recv(65536).split(b" ", 2)[1])


@pytest.mark.long
def test_an_unfinished_body_gives_its_room_to_a_tenant_with_less(url: str) -> None:
    with ExitStack() as stack:
        links = {
            name: [stack.enter_context(connected(url)) for _ in range(8)]
            for name in ("k-eve", "k-ann")
        }
        for link in links["k-eve"]:
            link.sendall(unfinished(LARGEST))
        refused = [link for link in links["k-eve"] if status_of(link, 0.5) == 503]
        assert len(refused) == 4, "half of the room is for others"
        waiting = [link for link in links["k-eve"] if link not in refused]
        for link in links["k-ann"][:3]:
            link.sendall(unfinished(LARGEST, "k-ann"))
        assert wait_until(lambda: any(status_of(link, 0.05) == 503 for link in waiting)), (
            "the oldest body of who has more ends"
        )
        assert all(status_of(link, 0.05) == 0 for link in links["k-ann"][:2])


def test_a_tenant_has_at_most_half_of_the_calls(url: str) -> None:
    with ExitStack() as stack:
        links = [stack.enter_context(connected(url)) for _ in range(18)]
        for link in links:
            link.sendall(stream())
        statuses = [status_of(link) for link in links]
        assert sorted(statuses) == [200] * 16 + [503] * 2
        body = {"prompt": "x", "max_tokens": 1}
        eve = {"authorization": "Bearer k-eve"}
        refused = httpx.post(f"{url}/v1/completions", json=body, headers=eve)
        assert refused.json()["error"]["code"] == "too_many_calls"
        for link in links:
            link.close()
        assert wait_until(
            lambda: httpx.post(f"{url}/v1/completions", json=body, headers=eve).status_code == 200
        )


# Addresses:


@pytest.fixture
def open_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a server without keys and with places for eight connections."""
    monkeypatch.setattr(app_module, "limited_protocol", lambda **_: limited_protocol(8))
    monkeypatch.setattr(connection_limit, "MAX_HALF_HEADER_BYTES", 256 << 10)
    with served(ScriptedHead(script)) as found:  # type: ignore[arg-type]
        yield found


def ended(link: socket.socket) -> bool:
    if not select.select([link], [], [], 0.0)[0]:
        return False
    try:
        return link.recv(65536) == b""
    except OSError:
        return True


@pytest.mark.parametrize(
    "flood",
    [
        b"",
        b"GET / HTTP/1.1\r\nX: ",
        b"POST /ping HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000,
    ],
)
def test_one_address_ends_its_own_connections_and_no_others(open_url: str, flood: bytes) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(connected(open_url, f"127.0.0.{n}")) for n in (2, 3)]
        for other in others:
            other.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status_of(other) == 200
        for _ in range(20):
            link = stack.enter_context(connected(open_url))
            link.sendall(flood)
        newcomer = stack.enter_context(connected(open_url, "127.0.0.4"))
        for other in (*others, newcomer):
            other.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert status_of(other) == 200


def test_an_address_with_answers_ends_no_idle_connection_of_another(open_url: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True}).encode()
    with ExitStack() as stack:
        other = stack.enter_context(connected(open_url, "127.0.0.2"))
        busy = [stack.enter_context(connected(open_url)) for _ in range(7)]
        for link in busy:
            link.sendall(post("/v1/completions", "", body))
            assert status_of(link) == 200
        refused = stack.enter_context(connected(open_url))
        assert status_of(refused) == 503
        other.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status_of(other) == 200


def test_a_client_reads_why_it_was_refused_though_its_body_is_unread(open_url: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True}).encode()
    with ExitStack() as stack:
        for _ in range(8):
            link = stack.enter_context(connected(open_url))
            link.sendall(post("/v1/completions", "", body))
            assert status_of(link) == 200
        for _ in range(connection_limit.MAX_LINGERING):
            link = stack.enter_context(connected(open_url))
            link.sendall(post("/v1/completions", "", b" " * 300_000))
            got = b""
            while part := link.recv(65536):
                got += part
            assert got.startswith(b"HTTP/1.1 503 ") and got.endswith(b"}")


def test_connections_that_linger_have_a_time_and_a_number(
    open_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_protocol, "LINGER_S", 0.2)
    monkeypatch.setattr(bounded_protocol, "MAX_LINGERING", 4)
    body = json.dumps({"prompt": "x", "max_tokens": 200, "stream": True}).encode()
    with ExitStack() as stack:
        for _ in range(8):
            link = stack.enter_context(connected(open_url))
            link.sendall(post("/v1/completions", "", body))
            assert status_of(link) == 200
        links = [stack.enter_context(connected(open_url)) for _ in range(40)]
        for link in links:
            link.settimeout(60)
            while True:
                try:
                    if not link.recv(65536):
                        break
                except OSError:
                    break
        assert wait_until(lambda: all(is_reset(link) for link in links))


def is_reset(link: socket.socket) -> bool:
    """Whether the server has closed its end for good."""
    try:
        link.sendall(b"x")
    except OSError:
        return True
    return False
