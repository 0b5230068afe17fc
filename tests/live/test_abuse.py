"""Clients abuse the HTTP port of a real server: other clients still get answers, and no memory
grows."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.test_head_death import head_of

NUM_IDLE = 10_000
PATIENCE_S = 60.0
"""How long a call may take on a busy machine."""
SLACK_BYTES = 200 << 20
GOOD = {"prompt": [7, 8, 9], "max_tokens": 4, "temperature": 0}
JSON_BODY = b"content-type: application/json\r\n"


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def connected(server: LocalServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def post(path: str, body: bytes, headers: bytes = JSON_BODY) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n".encode()
    return head + headers + b"\r\n" + body


def read_all(link: socket.socket, last: bytes | None = None) -> bytes:
    """Reads until the server closes the connection, is silent for a while, or has sent `last`."""
    got = b""
    with contextlib.suppress(OSError):
        while (
            (last is None or last not in got)
            and select.select([link], [], [], 5.0)[0]
            and (part := link.recv(1 << 20))
        ):
            got += part
    return got


class Watch:
    """Acts as another user that asks for `/health` all the time, with `client`, which keeps no
    connection."""

    def __init__(self, client: httpx.Client) -> None:
        self.worst_s = 0.0
        self.wrong: list[str] = []
        self._client = client
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            began_s = time.monotonic()
            try:
                status = self._client.get("/health").status_code
                if status != 200:
                    self.wrong.append(str(status))
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
            self.worst_s = max(self.worst_s, time.monotonic() - began_s)
            self._ends.wait(0.05)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


def good_answer(client: httpx.Client) -> dict[str, Any]:
    """Returns the answer to `GOOD`. Asks again while other requests fill the pool (503)."""
    deadline_s = time.monotonic() + PATIENCE_S
    answer = client.post("/v1/completions", json=GOOD)
    while answer.status_code == 503 and time.monotonic() < deadline_s:
        time.sleep(float(answer.headers["retry-after"]))
        answer = client.post("/v1/completions", json=GOOD)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with LocalServer([MODEL, "--mixed", "1", *SMALL, "--admission", "none"]) as started:
        yield started
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[httpx.Client]:
    headers, fresh = {"content-type": "application/json"}, httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(
        base_url=server.url, headers=headers, timeout=PATIENCE_S, limits=fresh
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def others_notice_nothing(server: LocalServer, client: httpx.Client) -> Iterator[None]:
    expected = good_answer(client)
    head, num_lines = head_of(server), len(server.log_lines())
    before, watch = rss_bytes(head), Watch(client)
    yield
    watch.end()
    answer = good_answer(client)
    lines = server.log_lines()[num_lines:]
    assert answer["choices"] == expected["choices"]
    assert watch.wrong == [] and watch.worst_s < PATIENCE_S
    assert head_of(server) == head, "no head died"
    assert not [line for line in lines if "Traceback" in line or " ERROR " in line]
    assert len(lines) < 50, lines[:60]
    assert rss_bytes(head) - before < SLACK_BYTES


@pytest.mark.long
def test_ten_thousand_idle_connections_and_a_request(server: LocalServer) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    links = [connected(server) for _ in range(min(NUM_IDLE, soft - 500))]
    answer = fresh.post(f"{server.url}/v1/completions", json=GOOD, timeout=PATIENCE_S)
    assert answer.status_code == 200
    for link in links:
        link.close()


ODD = {
    "two lengths": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n"
    b"content-length: 40\r\n\r\n{}GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n",
    "length and chunks": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n",
    "chunked twice": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity"
    b"\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n",
    "odd coding": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n"
    b"content-length: 2\r\n\r\n{}GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n",
    "space before colon": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding : chunked\r\n"
    b"content-length: 2\r\n\r\n{}GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n",
    "negative length": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n{}",
    "huge length": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: "
    + b"9" * 30
    + b"\r\n\r\n",
    "huge chunk": b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b"FFFFFFFFFFFFFFFFF\r\n{}",
    "connect": b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\nhello",
    "upgrade": b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n\x81\x00",
    "upgrade to h2c": b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings"
    b"\r\nupgrade: h2c\r\nhttp2-settings: AA\r\ncontent-length: 2\r\n\r\n{}",
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http 0.9": b"GET /health\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\nhost: x\r\n\r\n",
    "star": b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    "absolute": b"GET http://[::1:/health HTTP/1.1\r\nhost: x\r\n\r\n",
    "odd bytes": b"GET /\xff\xfe%00%ff HTTP/1.1\r\nhost: x\r\n\r\n",
    "null": b"GET /hea\x00lth HTTP/1.1\r\nhost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    "folded": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 8_000 + b"\r\n",
    "long path": b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "expect": b"POST /tokenize HTTP/1.1\r\nhost: x\r\nexpect: 200-maybe\r\n"
    b"content-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_request_is_refused_and_hides_no_other(server: LocalServer, name: str) -> None:
    with connected(server) as link:
        link.sendall(ODD[name])
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)
        got = read_all(link)
    statuses = [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]]
    assert all(status < 500 for status in statuses), got[:500]
    assert b"smuggled" not in got


@pytest.mark.long
def test_pipelined_requests_are_answered_in_order_and_bounded(server: LocalServer) -> None:
    few = b"".join(b"GET /v1/models/m%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in range(50))
    with connected(server) as link:
        link.sendall(few)
        got = read_all(link, last=b"'m49'")
    assert [b"'m%d'" % n in part for n, part in enumerate(got.split(b"HTTP/1.1 ")[1:])] == [
        True
    ] * 50
    flood = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000
    links = [connected(server) for _ in range(20)]
    for link in links:
        link.setblocking(False)
        with contextlib.suppress(OSError):
            link.send(flood)
    time.sleep(2.0)
    for link in links:
        link.close()


def test_a_body_byte_by_byte_and_one_in_tiny_chunks(server: LocalServer) -> None:
    body = json.dumps(GOOD).encode()
    with connected(server) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post("/v1/completions", body):
            link.sendall(bytes([byte]))
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")
    text = json.dumps({"prompt": "x" * 400_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    with connected(server) as link:
        link.sendall(head + JSON_BODY + b"\r\n" + chunks)
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200")


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


FIELDS = ("metadata", "stop", "messages", "tools", "tool_choice", "chat_template_kwargs", "x")


@pytest.mark.parametrize(
    "depth",
    [*(pytest.param(depth, marks=pytest.mark.long) for depth in (50, 300, 1_100)), 900, 100_000],
)
def test_deep_json_is_answered_or_refused(client: httpx.Client, depth: int) -> None:
    objects = '{"a":' * depth + "1" + "}" * depth
    message = '{"role": "user", "content": %s}'
    for deep in (nested(depth), objects):
        bodies = [f'{{"messages": [{message % deep}]}}', deep]
        for field in FIELDS:
            bodies.append(f'{{"messages": [{message % json.dumps("x")}], "{field}": {deep}}}')
        for wanted in (f'{{"json": {deep}}}', f'{{"json": {json.dumps(deep)}}}'):
            bodies.append(f'{{"prompt": "x", "structured_outputs": {wanted}}}')
        function = f'[{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
        bodies.append(f'{{"messages": [{message % json.dumps("x")}], "tools": {function}}}')
        bodies.append(bodies[-1][:-1] + ', "tool_choice": "required"}')
        for body in bodies:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"):
                limited = body[:-1] + ', "max_tokens": 1}' if body.startswith('{"') else body
                status = client.post(path, content=limited).status_code
                assert status < 500, (path, status, body[:200])


TOO_LARGE = ("1e400", "-1e400", "1" * 5_000)
FRACTIONS = ("1e-5000", "0." + "9" * 5_000)
INTEGERS = (str(2**63), str(-(2**64)))
TAKEN = {"temperature": FRACTIONS, "logit_bias": FRACTIONS, "user": FRACTIONS + INTEGERS}
"""Lists accepted values by field. The server does not read `user`."""


def test_huge_numbers_are_refused_by_name(client: httpx.Client) -> None:
    fields = ("max_tokens", "n", "seed", "temperature", "top_k", "priority", "logit_bias", "user")
    for number in TOO_LARGE + FRACTIONS + INTEGERS:
        for field in fields:
            value = f'{{"1": {number}}}' if field == "logit_bias" else number
            content = f'{{"prompt": "x", "max_tokens": 1, "{field}": {value}}}'
            if field == "max_tokens":
                content = f'{{"prompt": "x", "max_tokens": {number}}}'
            answer = client.post("/v1/completions", content=content)
            told = (field, number[:20], answer.text)
            if number in TAKEN.get(field, ()):
                assert answer.status_code == 200, told
            else:
                assert answer.status_code == 400, told
                assert answer.json()["error"]["param"] == field, told


@pytest.mark.long
def test_streams_that_nobody_reads_and_requests_that_trickle(server: LocalServer) -> None:
    body = json.dumps({"prompt": [7] * 9, "max_tokens": 300, "stream": True, "n": 4}).encode()
    links = [connected(server) for _ in range(120)]
    for number, link in enumerate(links):
        if number % 3 == 0:
            link.sendall(post("/v1/completions", body))
        elif number % 3 == 1:
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        else:
            link.sendall(post("/v1/completions", body)[:-20])
    for _ in range(50):
        for number, link in enumerate(links):
            if number % 3:
                with contextlib.suppress(OSError):
                    link.send(b" " if number % 3 == 2 else b"a: b\r\n")
        time.sleep(0.05)
    for link in links:
        link.close()


def test_bombs_in_grammars_end_no_process(server: LocalServer, client: httpx.Client) -> None:
    chain = "\n".join(f"r{n}: r{n + 1}" for n in range(7_000))
    links = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3_000)}
    bombs: list[tuple[dict[str, Any], set[int]]] = [
        ({"grammar": f'start: r0\n{chain}\nr7000: "a"'}, {400}),
        ({"json": {"$ref": "#/$defs/d0", "$defs": {**links, "d3000": {}}}}, {400}),
        ({"json": {"type": "integer", "multipleOf": 1_000_003}}, {400}),
        ({"regex": "(a{1000}){1000}"}, {200, 400}),
        ({"grammar": 'start: e\ne: e e | e e e | "a" | '}, {200, 400}),
        ({"json": {"type": "string", "minLength": 10**9}}, {200, 400}),
    ]
    workers = server.worker_pids()
    for bomb, allowed in bombs:
        sent = {"prompt": "x", "max_tokens": 8, "structured_outputs": bomb}
        answer = client.post("/v1/completions", json=sent)
        assert answer.status_code in allowed, answer.text
    assert server.worker_pids() == workers
