"""Tests the HTTP client against sockets that send exactly what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from moonpool.http_client.client import (
    MAX_HEAD_BYTES,
    MOST_WAITING_BYTES,
    ConnectionFailedError,
    HttpClient,
    TooLargeError,
    UnreachableError,
    header_lines,
)

Serve = Callable[["Exchange"], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX-Kind: whole\r\n\r\nbody"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Exchange:
    """Holds one request, on the connection with this number."""

    def __init__(
        self, number: int, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number, self.head, self.reader, self.writer = number, head, reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[str]:
    """Serves one exchange after another on each connection, until `serve` closes it."""
    count = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        number = count
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                await serve(Exchange(number, head, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def run(serve: Serve, use: Callable[[str], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), server(serve) as url:
            await use(url)

    asyncio.run(whole())


async def answer_whole(exchange: Exchange) -> None:
    await exchange.send(WHOLE)


def test_parts_come_before_the_response_has_ended_and_the_connection_serves_again() -> None:
    read_first = asyncio.Event()
    numbers = []

    async def serve(exchange: Exchange) -> None:
        numbers.append(exchange.number)
        await exchange.send(CHUNKED + b"3\r\none\r\n")
        await read_first.wait()
        read_first.clear()
        await exchange.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async def use(url: str) -> None:
        client = HttpClient(url)
        for _ in range(2):
            async with client.stream("GET", "/") as response:
                assert response.status == 200
                parts = response.parts()
                assert await anext(parts) == b"one"
                read_first.set()
                assert b"".join([part async for part in parts]) == b"two"
        client.close()

    run(serve, use)
    assert numbers == [1, 1]


def test_one_who_leaves_early_ends_the_connection() -> None:
    left = asyncio.Event()

    async def serve(exchange: Exchange) -> None:
        assert await exchange.reader.readexactly(2) == b"{}"
        await exchange.send(CHUNKED + b"3\r\none\r\n")
        assert await exchange.reader.read() == b""
        left.set()
        exchange.writer.close()

    async def use(url: str) -> None:
        async with HttpClient(url).stream("POST", "/", b"{}") as response:
            assert await anext(response.parts()) == b"one"
        await left.wait()

    run(serve, use)


def test_a_slow_reader_slows_the_server() -> None:
    total, sent = 64 * MOST_WAITING_BYTES, 0

    async def serve(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            await exchange.send(b"x" * MOST_WAITING_BYTES)
            sent += MOST_WAITING_BYTES

    async def use(url: str) -> None:
        client = HttpClient(url)
        async with client.stream("GET", "/") as response:
            for _ in range(50):
                await asyncio.sleep(0.01)
            assert sent < total
            assert sum([len(part) async for part in response.parts()]) == total
        assert await client.get("/") and sent == total
        client.close()

    async def twice(exchange: Exchange) -> None:
        await (serve(exchange) if not sent else answer_whole(exchange))

    run(twice, use)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (CHUNKED + b"3\r\none\r\n", "before the end of its answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbo", "before the end of its answer"),
        (b"", "before the end of its answer"),
        (b"SSH-2.0-OpenSSH\r\n", "is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * MAX_HEAD_BYTES, "has more than"),
    ],
)
def test_what_breaks_off_is_no_answer(said: bytes, why: str) -> None:
    async def serve(exchange: Exchange) -> None:
        await exchange.send(said)
        exchange.writer.close()

    async def use(url: str) -> None:
        with pytest.raises(ConnectionFailedError, match=why):
            await HttpClient(url).get("/")
        with pytest.raises(ConnectionFailedError, match=why):
            async with HttpClient(url).stream("GET", "/") as response:
                await response.read(100)

    run(serve, use)


def test_a_body_that_is_read_whole_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.http_client.client.MAX_BODY_BYTES", 3)

    async def serve(exchange: Exchange) -> None:
        await exchange.send(WHOLE)

    async def use(url: str) -> None:
        with pytest.raises(ConnectionFailedError, match="more than 3 bytes"):
            await HttpClient(url).get("/")

    run(serve, use)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def serve(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.0 200 OK\r\n\r\nbody")
        exchange.writer.close()

    async def use(url: str) -> None:
        assert await HttpClient(url).get("/") == (200, b"body")
        async with HttpClient(url).stream("GET", "/") as response:
            assert await response.read(4) == b"body"

    run(serve, use)


def test_a_body_that_is_too_large_is_not_read() -> None:
    async def use(url: str) -> None:
        with pytest.raises(TooLargeError, match="more than 3 bytes"):
            async with HttpClient(url).stream("GET", "/") as response:
                await response.read(3)

    run(answer_whole, use)


def test_an_interim_response_is_passed_over() -> None:
    async def serve(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        await exchange.send(WHOLE)

    async def use(url: str) -> None:
        client = HttpClient(url)
        assert await client.get("/") == (200, b"body")
        async with client.stream("GET", "/") as response:
            assert (response.status, response.headers.get(b"link")) == (200, None)
            assert response.headers[b"x-kind"] == b"whole"
            assert await response.read(4) == b"body"
        client.close()

    run(serve, use)


def test_a_connection_is_not_used_after_its_time() -> None:
    numbers = []

    async def serve(exchange: Exchange) -> None:
        numbers.append(exchange.number)
        await answer_whole(exchange)

    async def use(url: str) -> None:
        client = HttpClient(url, idle_s=0.0)
        await client.get("/")
        await asyncio.sleep(0.01)
        await client.get("/")
        client.close()

    run(serve, use)
    assert numbers == [1, 2]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("idle_s", [None, 60.0])
def test_a_request_goes_out_again_only_where_the_server_may_have_closed_before(
    streams: bool, idle_s: float | None
) -> None:
    numbers = []

    async def serve(exchange: Exchange) -> None:
        numbers.append(exchange.number)
        if numbers == [1, 1]:
            exchange.writer.close()  # the server has read the request, and does not answer
        else:
            await answer_whole(exchange)

    async def ask(client: HttpClient) -> bytes:
        if not streams:
            return (await client.get("/"))[1]
        async with client.stream("GET", "/") as response:
            return await response.read(4)

    async def use(url: str) -> None:
        client = HttpClient(url) if idle_s is None else HttpClient(url, idle_s=idle_s)
        assert await ask(client) == b"body"
        if idle_s is None:
            assert await ask(client) == b"body"
        else:
            with pytest.raises(ConnectionFailedError):
                await ask(client)
        client.close()

    run(serve, use)
    assert numbers == [1, 1, 2] if idle_s is None else [1, 1]


def test_what_comes_without_a_request_belongs_to_none() -> None:
    numbers = []

    async def serve(exchange: Exchange) -> None:
        numbers.append(exchange.number)
        await answer_whole(exchange)
        if exchange.number == 1:
            await asyncio.sleep(0.05)
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")

    async def use(url: str) -> None:
        client = HttpClient(url)
        assert await client.get("/") == (200, b"body")
        await asyncio.sleep(0.3)
        assert await client.get("/") == (200, b"body")
        client.close()

    run(serve, use)
    assert numbers == [1, 2]


def test_what_is_sent_names_its_host_and_who_asks() -> None:
    heads = []

    async def serve(exchange: Exchange) -> None:
        heads.append(exchange.head)
        await answer_whole(exchange)

    async def use(url: str) -> None:
        await HttpClient(f"{url}/v1/", "key", headers={"X-Rank": "3"}).get("/models")
        port = url.rpartition(":")[2]
        client = HttpClient(f"http://me:a%20b@localhost:{port}/base")
        assert client.url == f"http://localhost:{port}/base"
        await client.get("/x?y=1", header_lines({"traceparent": "00-1"}))
        assert b"Host: localhost:%b\r\n" % port.encode() in heads[1]

    run(serve, use)
    assert heads[0].startswith(b"GET /models HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer key\r\nX-Rank: 3\r\n" in heads[0]
    assert heads[1].startswith(b"GET /base/x?y=1 HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Basic bWU6YSBi\r\n" in heads[1]
    assert b"\r\ntraceparent: 00-1\r\n" in heads[1]


def test_nothing_of_another_request_hides_in_a_header_or_a_path() -> None:
    for value in ("a\r\nX: y", "a\n", "a\0"):
        with pytest.raises(ValueError, match="X-Key"):
            header_lines({"X-Key": value})
    with pytest.raises(ValueError, match="Authorization"):
        HttpClient("http://127.0.0.1:1", "key\n")

    async def ask(path: str) -> None:
        await HttpClient("http://127.0.0.1:1").get(path)

    for path in ("/a b", "/a\r\nHost: x", "/\u00e9"):
        with pytest.raises(ValueError, match="no path"):
            asyncio.run(ask(path))


def test_nobody_listens() -> None:
    async def ask() -> None:
        async with server(answer_whole) as url:
            pass
        await HttpClient(url).get("/")

    with pytest.raises(UnreachableError, match="cannot connect"):
        asyncio.run(ask())
