"""HTTP to one vLLM: asks for answers, which come piece by piece, and whether it is well."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal

import httpx

from moonpool.vllm.dialect import REFUSALS, DialectError, Facts, read_facts

CONNECT_S = 5.0
ASK_S = 10.0
HEALTH_S = 5.0
MAX_EVENT_BYTES = 16 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_METRICS_BYTES = 16 << 20
_DONE = b"[DONE]"
logging.getLogger("httpx").setLevel(logging.WARNING)  # it would tell of each request


Health = Literal["well", "unwell", "gone"]
"""Gone: nobody listens there."""


class VllmError(Exception):
    """It cannot be asked, or did not answer; one line says why, and not where it is: clients of the
    API may read it. `refused`: there is something wrong with what it was asked."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class VllmClient:
    """Of the vLLM at `url`. `api_key`: what it was started with, if anything."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        # An answer takes as long as its request has time: who waits for it ends it.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> Health:
        """By its own word, within HEALTH_S."""
        try:
            found = await self._http.get("/health", timeout=HEALTH_S)
        except httpx.ConnectError:
            return "gone"
        except httpx.HTTPError:
            return "unwell"
        return "well" if found.status_code == 200 else "unwell"

    async def facts(self) -> Facts:
        """Of one that is well. Raises VllmError."""
        health = await self.health()
        if health != "well":
            raise VllmError("nobody answers there" if health == "gone" else "it is not well")
        try:
            models = await self._get("/v1/models")
            metrics = await self._get("/metrics")
            return read_facts(models, metrics.decode(errors="replace"))
        except DialectError as error:
            raise VllmError(str(error)) from None

    async def _get(self, path: str) -> bytes:
        try:
            async with self._http.stream("GET", path, timeout=ASK_S) as response:
                body = await _read(response, MAX_METRICS_BYTES)
                _check(response, body)
                return body
        except httpx.HTTPError as error:
            raise VllmError(_why(error)) from None

    async def answer(self, body: bytes, streamed: bool) -> AsyncGenerator[bytes]:
        """The events of a completion, or the whole of one. Raises VllmError. Closing the iterator
        ends the request there, too; who reads to the end leaves the connection to the next."""
        done = False
        try:
            async with self._http.stream("POST", "/v1/completions", content=body) as response:
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
            raise VllmError("vLLM broke off in the middle of an answer")


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Of a stream of server-sent events, what follows `data: `."""
    buffer = bytearray()
    async for piece in response.aiter_raw():
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            event = bytes(buffer[:end]).strip()
            del buffer[: end + 2]
            if event.startswith(b"data:"):
                yield event[5:].strip()
        if len(buffer) > MAX_EVENT_BYTES:
            raise VllmError(f"vLLM sends events of more than {MAX_EVENT_BYTES} bytes")


async def _read(response: httpx.Response, most_bytes: int) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > most_bytes:
            raise VllmError(f"vLLM answers with more than {most_bytes} bytes")
    return bytes(body)


def _check(response: httpx.Response, body: bytes) -> None:
    if response.status_code == 401:
        raise VllmError(
            "vLLM wants an API key: set VLLM_API_KEY to the one that it was started with"
        )
    if response.status_code != 200:
        text = body[:MAX_ERROR_BYTES].decode(errors="replace")
        said = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', text)
        what = (said.group(1) if said else text).strip().replace("\n", " ")[:300]
        refused = response.status_code in REFUSALS
        raise VllmError(what or f"vLLM answered with {response.status_code}", refused)


def _why(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "nobody answers there"
    return " ".join(str(error).split()) or type(error).__name__
