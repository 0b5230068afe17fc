"""The HTTP client of one vLLM server: its health, its properties, and its completions."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache
from typing import Any, Literal

import httpx
import msgspec

from moonpool.types import MALFORMED
from moonpool.vllm.dialect import REFUSALS, DialectError
from moonpool.vllm.facts import VllmFacts, read_counts, read_facts
from moonpool.vllm.known_cache import PrefixCounts

CONNECT_S = 5.0
ASK_S = 10.0
HEALTH_S = 5.0
MAX_EVENT_BYTES = 16 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_METRICS_BYTES = 16 << 20
MAX_FORWARDED_BYTES = 48 << 20
"""Largest response that is passed on whole: it goes to the head in one frame."""
EVENTS = "text/event-stream"
_DONE = b"[DONE]"
logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log each request


Health = Literal["well", "unwell", "gone"]
"""`gone`: no server listens at the address."""


class VllmError(Exception):
    """A request to vLLM failed; one line says why. Clients of the API may read it, so it does not
    contain the server's address. `refused`: the request itself is at fault.
    """

    def __init__(self, message: str, refused: bool = False, status: int = 0) -> None:
        """`status`: of HTTP, if the server responded."""
        super().__init__(message)
        self.refused = refused
        self.status = status


@cache
def _tls_context() -> ssl.SSLContext:
    """Of all clients: to read the authorities takes 20 ms, and there may be 1,000 servers."""
    return httpx.create_ssl_context(trust_env=False)


class VllmClient:
    """Calls the vLLM server at `url`. `api_key` is the key it was started with, if any."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        # No read timeout: the caller cancels a response whose request has run out of time.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            limits=limits,
            trust_env=False,
            verify=_tls_context(),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> Health:
        """Returns the server's state of health, within HEALTH_S."""
        try:
            found = await self._http.get("/health", timeout=HEALTH_S)
        except httpx.ConnectError:
            return "gone"
        except httpx.HTTPError:
            return "unwell"
        return "well" if found.status_code == 200 else "unwell"

    async def facts(self) -> VllmFacts:
        """Reads the properties of a healthy server. Raises VllmError."""
        health = await self.health()
        if health != "well":
            raise VllmError(
                "no server listens there" if health == "gone" else "the server is not healthy"
            )
        try:
            models = await self._get("/v1/models")
            metrics = await self._get("/metrics")
            document = await self._get("/openapi.json", optional=True)
            return read_facts(models, metrics.decode(errors="replace"), document)
        except DialectError as error:
            raise VllmError(str(error)) from None

    async def prefix_counts(self) -> PrefixCounts | None:
        """Reads the hits of the server's prefix cache; None: it does not tell. Raises VllmError."""
        return read_counts((await self._get("/metrics")).decode(errors="replace"))

    async def event_sources(self) -> dict[str, Any] | None:
        """Reads where the server publishes its KV events, by rank; None: it does not tell."""
        try:
            found = msgspec.json.decode(await self._get("/kv_event_sources", optional=True))
        except (VllmError, *MALFORMED):
            return None
        return found if isinstance(found, dict) else None

    async def forward(self, path: str, body: bytes, traceparent: str = "") -> AsyncGenerator[bytes]:
        """Yields the parts of a response to a client's own body: each event of a stream, or the
        whole. The first one begins with a line, the content type. Raises VllmError."""
        headers = {"traceparent": traceparent} if traceparent else {}
        try:
            async with self._http.stream("POST", path, content=body, headers=headers) as response:
                kind = response.headers.get("content-type", "application/octet-stream")
                begin = kind.encode("ascii", "replace").replace(b"\n", b" ") + b"\n"
                if response.status_code != 200 or not kind.startswith(EVENTS):
                    whole = await _read(response, MAX_FORWARDED_BYTES)
                    _check(response, whole)
                    yield begin + whole
                    return
                async for part in _whole_events(response):
                    yield begin + part
                    begin = b""
        except httpx.HTTPError as error:
            raise VllmError(_why(error)) from None

    async def _get(self, path: str, optional: bool = False) -> bytes:
        """`optional`: a server without it gives b""."""
        try:
            async with self._http.stream("GET", path, timeout=ASK_S) as response:
                body = await _read(response, MAX_METRICS_BYTES)
                if response.status_code == 404 and optional:
                    return b""
                if response.status_code == 404:
                    raise VllmError(f"it has no {path}: it is another server than vLLM")
                _check(response, body)
                return body
        except httpx.HTTPError as error:
            raise VllmError(_why(error)) from None

    async def answer(
        self, body: bytes, streamed: bool, traceparent: str = ""
    ) -> AsyncGenerator[bytes]:
        """Yields the events of a completion, or the whole of it. Raises VllmError.

        `traceparent` makes the server's own spans part of the request's trace.
        Closing the iterator early also aborts the request at the server. Reading to the end keeps
        the connection for the next request.
        """
        done = False
        try:
            headers = {"traceparent": traceparent} if traceparent else {}
            async with self._http.stream(
                "POST", "/v1/completions", content=body, headers=headers
            ) as response:
                if response.status_code != 200 or not streamed:
                    whole = await _read(response, MAX_EVENT_BYTES)
                    _check(response, whole)
                    yield whole
                    return
                async for event in _events(response):
                    if event == _DONE:
                        done = True
                    elif not done:
                        yield event
        except httpx.HTTPError as error:
            raise VllmError(_why(error)) from None
        if not done:
            raise VllmError("vLLM closed the connection in the middle of an output")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events."""
    buffer = bytearray()
    async for chunk in response.aiter_raw():
        buffer += chunk
        while (end := buffer.find(b"\n\n")) >= 0:
            event = bytes(buffer[:end]).strip()
            del buffer[: end + 2]
            if event.startswith(b"data:"):
                yield event[5:].strip()
        if len(buffer) > MAX_EVENT_BYTES:
            raise VllmError(f"vLLM sent an event of more than {MAX_EVENT_BYTES} bytes")


async def _whole_events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields server-sent events as they are. A comment between them is one, too."""
    buffer = bytearray()
    async for chunk in response.aiter_bytes():
        buffer += chunk
        while (end := buffer.find(b"\n\n")) >= 0:
            yield bytes(buffer[: end + 2])
            del buffer[: end + 2]
        if len(buffer) > MAX_EVENT_BYTES:
            raise VllmError(f"vLLM sent an event of more than {MAX_EVENT_BYTES} bytes")
    if buffer:
        yield bytes(buffer)


async def _read(response: httpx.Response, most_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > most_bytes:
            raise VllmError(f"vLLM sent a response of more than {most_bytes} bytes")
    return bytes(body)


def _check(response: httpx.Response, body: bytes) -> None:
    if response.status_code == 401:
        raise VllmError(
            "vLLM requires an API key: set VLLM_API_KEY to the key that it was started with"
        )
    if response.status_code != 200:
        text = body[:MAX_ERROR_BYTES].decode(errors="replace")
        message = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', text)
        what = (message.group(1) if message else text).strip().replace("\n", " ")[:300]
        status = response.status_code
        what = what or f"vLLM responded with status {status}"
        raise VllmError(what, status in REFUSALS, status)


def _why(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "no server listens there"
    return " ".join(str(error).split()) or type(error).__name__
