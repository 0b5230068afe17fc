"""The HTTP client of one server of any make: reads its health and its properties, and sends
completions."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import msgspec

from moonpool.config.vllm import split_rank
from moonpool.http_client.client import (
    ConnectionFailedError,
    HttpClient,
    HttpResponse,
    TooLargeError,
    UnreachableError,
    header_lines,
)
from moonpool.protocol.model_offer import COMPLETIONS
from moonpool.server_events import DONE, MAX_EVENT_BYTES, ServerEventReader
from moonpool.types import MALFORMED
from moonpool.vllm.dialect import REFUSALS

CONNECT_S = 5.0
ASK_S = 10.0
HEALTH_S = 5.0
IDLE_S = 2.0
"""How long a connection is kept for another request. A llama-server closes it after 5 s."""
MAX_ERROR_BYTES = 64 << 10
MAX_METRICS_BYTES = 16 << 20
MAX_FORWARDED_BYTES = 48 << 20
"""The largest response that can be forwarded in one piece, because it goes to the head in one
frame."""
EVENTS = b"text/event-stream"
LACKS = (404, 405, 501)
"""Statuses by which a server says that it does not serve a path."""
RANK_HEADER = "X-data-parallel-rank"
"""The header that makes vLLM compute a request on one of its ranks."""
NO_RANK = re.compile(r"data_parallel_rank \d+ is out of range")


Health = Literal["well", "unwell", "silent", "gone"]
"""`silent`: the server listens, but does not answer in time. `gone`: no server listens at the
address."""


def _is_done(event: bytes) -> bool:
    return False


class VllmError(Exception):
    """A request to a server failed; one line says why. Clients of the API may read it, so it does
    not contain the server's address. `refused`: whether the request itself is at fault.
    """

    def __init__(self, message: str, refused: bool = False, status: int = 0) -> None:
        """`status`: the HTTP status, if the server responded."""
        super().__init__(message)
        self.refused = refused
        self.status = status


class RankGoneError(VllmError):
    """The server has no such data-parallel rank, or no longer has it because it was scaled down."""


class VllmSilentError(VllmError):
    """The server listens, and did not answer in time: it is busy, or hangs."""


@cache
def _tls_context() -> ssl.SSLContext:
    """Shared by all clients: reading the authorities takes 20 ms, and there may be 1,000
    servers."""
    return ssl.create_default_context()


class VllmClient:
    """Calls the server at `url`, which may end with "@" and one of its data-parallel ranks, and
    then with "#" and one of its models. `api_key` is the key that the server was started with, if
    any."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises VllmError if no request can be sent with this URL or key."""
        address, _, self.model = url.partition("#")
        address, self.rank = split_rank(address)
        self.url = address.rstrip("/")
        rank = {} if self.rank is None else {RANK_HEADER: str(self.rank)}
        tls = _tls_context() if self.url.startswith("https") else None
        # Answers have no time limit here: the caller cancels a request at its deadline.
        try:
            self._http = HttpClient(
                self.url, api_key, CONNECT_S, headers=rank, idle_s=IDLE_S, tls=tls
            )
        except ValueError as error:
            raise VllmError(f"it cannot be called: {error}") from None

    def close(self) -> None:
        self._http.close()

    async def health(self) -> Health:
        """Returns the server's state of health, within HEALTH_S."""
        try:
            async with asyncio.timeout(HEALTH_S):
                status = await self._status("/health")
                if status in LACKS:
                    status = await self._status("/v1/models")
        except UnreachableError:
            return "gone"
        except TimeoutError:
            return "silent"
        except (ConnectionFailedError, TooLargeError):
            return "unwell"
        return "well" if status == 200 else "unwell"

    async def _status(self, path: str) -> int:
        async with self._http.stream("GET", path) as response:
            await response.read(MAX_METRICS_BYTES)
            return response.status

    async def event_sources(self) -> dict[str, Any] | None:
        """Reads where each rank of the server publishes its KV events, by the names of the ranks;
        for a client of one rank, only that rank. Returns None if the server does not tell."""
        try:
            found = msgspec.json.decode(await self.get("/kv_event_sources", optional=True))
        except (VllmError, *MALFORMED):
            return None
        if not isinstance(found, dict) or self.rank is None:
            return found if isinstance(found, dict) else None
        # the numbers of ranks may begin above 0
        names = sorted(found, key=lambda name: (len(name), name))
        return {name: found[name] for name in names[self.rank : self.rank + 1]}

    async def forward(self, path: str, body: bytes, traceparent: str = "") -> AsyncGenerator[bytes]:
        """Yields the parts of a response to a client's own body: each event of a stream, or the
        whole response. The first part begins with a line, the content type. Raises VllmError."""
        with _told():
            async with self._http.stream("POST", path, body, _traced(traceparent)) as response:
                kind = response.headers.get(b"content-type", b"application/octet-stream")
                begin = kind + b"\n"
                if response.status != 200 or not kind.startswith(EVENTS):
                    whole = await response.read(MAX_FORWARDED_BYTES)
                    _check(response, whole)
                    yield begin + whole
                    return
                async for part in _whole_events(response):
                    yield begin + part
                    begin = b""

    async def get(self, path: str, optional: bool = False) -> bytes:
        """`optional`: whether to return b"" if the server does not have the path. Raises
        VllmError."""
        return await self._ask("GET", path, b"", optional, ASK_S)

    async def post(
        self, path: str, fields: Any, optional: bool = False, timeout_s: float = ASK_S
    ) -> bytes:
        """Posts a JSON body and returns the body of the response. `optional`: as in `get`. Raises
        VllmError."""
        return await self._ask("POST", path, msgspec.json.encode(fields), optional, timeout_s)

    async def _ask(
        self, method: str, path: str, body: bytes, optional: bool, timeout_s: float
    ) -> bytes:
        with _told(f"no answer within {timeout_s:g} s"):
            async with (
                asyncio.timeout(timeout_s),
                self._http.stream(method, path, body) as response,
            ):
                found = await response.read(MAX_METRICS_BYTES)
                if optional and response.status in LACKS:
                    return b""
                if response.status == 404:
                    raise VllmError(f"it has no {path.partition('?')[0]}", status=404)
                _check(response, found)
                return found

    async def answer(
        self,
        body: bytes,
        streamed: bool,
        traceparent: str = "",
        path: str = COMPLETIONS,
        is_done: Callable[[bytes], bool] = _is_done,
    ) -> AsyncGenerator[bytes]:
        """Yields the events of a completion, or the whole completion. Raises VllmError.

        `is_done`: whether an event says that the response is complete, in addition to `[DONE]`.

        `traceparent` makes the server's own spans part of the request's trace.
        Closing the iterator early also aborts the request at the server. Reading to the end keeps
        the connection for the next request.
        """
        done = False
        with _told():
            async with self._http.stream("POST", path, body, _traced(traceparent)) as response:
                if response.status != 200 or not streamed:
                    whole = await response.read(MAX_EVENT_BYTES)
                    _check(response, whole)
                    yield whole
                    return
                async for event in _events(response):
                    if event == DONE:
                        done = True
                    elif not done:
                        done = is_done(event)
                        yield event
        if not done:
            raise VllmError("the server closed the connection in the middle of an output")


async def _events(response: HttpResponse) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events."""
    reader = ServerEventReader()
    async for chunk in response.parts():
        for event in reader.feed(chunk):
            yield event
        if reader.num_left_out:
            raise VllmError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")


async def _whole_events(response: HttpResponse) -> AsyncIterator[bytes]:
    """Yields server-sent events as they are. A comment between events counts as an event, too."""
    buffer = bytearray()
    async for chunk in response.parts():
        buffer += chunk
        while (end := buffer.find(b"\n\n")) >= 0:
            yield bytes(buffer[: end + 2])
            del buffer[: end + 2]
        if len(buffer) > MAX_EVENT_BYTES:
            raise VllmError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
    if buffer:
        yield bytes(buffer)


def _check(response: HttpResponse, body: bytes) -> None:
    if response.status == 401:
        raise VllmError(
            "the server requires an API key: set VLLM_API_KEY to the key that it was started with"
        )
    if response.status != 200:
        text = body[:MAX_ERROR_BYTES].decode(errors="replace")
        message = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', text)
        what = (message.group(1) if message else text).strip().replace("\n", " ")[:300]
        status = response.status
        what = what or f"the server responded with status {status}"
        if status == REFUSALS[0] and NO_RANK.search(what):
            raise RankGoneError(what, status=status)
        raise VllmError(what, status in REFUSALS, status)


def _traced(traceparent: str) -> bytes:
    return header_lines({"traceparent": traceparent}) if traceparent else b""


@contextmanager
def _told(too_late: str = "") -> Iterator[None]:
    """Raises VllmError for a request that fails."""
    try:
        yield
    except UnreachableError:
        raise VllmError("no server listens there") from None
    except (ConnectionFailedError, TooLargeError) as error:
        raise VllmError(str(error)) from None
    except TimeoutError:
        raise VllmSilentError(too_late) from None
