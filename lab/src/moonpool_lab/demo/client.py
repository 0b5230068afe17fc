"""A client of the completions API; it notes the time of each token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from moonpool.http_client.client import ConnectionFailedError, HttpClient, header_lines
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId
from moonpool_lab.replay.stream import NO_SLO, CompletionReceiver


@dataclass(slots=True)
class ClientResponse:
    """The answer to one request; times are seconds since it was sent."""

    request_id: str = ""
    text: str = ""
    status: int = 0
    error: str = ""
    finish_reason: str = ""
    token_instants_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_instants_s[0] if self.token_instants_s else float("nan")

    @property
    def gaps_s(self) -> list[float]:
        times = self.token_instants_s
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def tbt_s(self) -> float:
        """Returns the mean gap between tokens."""
        gaps = self.gaps_s
        return sum(gaps) / len(gaps) if gaps else float("nan")


class CompletionClient:
    """Sends completions to one server and measures them."""

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        """`timeout_s`: time limit of a whole answer."""
        self._client = HttpClient(url)
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._client.close()

    async def complete(
        self,
        prompt: str | list[int],
        on_text: Callable[[str], None] | None = None,
        request_id: str = "",
        **parameters: Any,
    ) -> ClientResponse:
        """Streams one completion. A rejection is a response with its status and error. The server
        chooses the id of the request if `request_id` is empty. Raises ConnectionFailedError."""
        fields = {
            "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        body = msgspec.json.encode(fields)
        answer = ClientResponse()
        began_s = time.monotonic()

        def note(text: str, now_s: float) -> None:
            answer.text += text
            answer.token_instants_s.append(now_s - began_s)
            if on_text is not None:
                on_text(text)

        receiver = CompletionReceiver(RequestRecord(RequestId(""), 0, NO_SLO, began_s), note)
        headers = header_lines({"x-request-id": request_id} if request_id else {})
        async with self._limit():
            await self._client.post("/v1/completions", body, receiver, headers)
        receiver.on_end()
        answer.seconds = time.monotonic() - began_s
        answer.request_id, answer.status = receiver.request_id, receiver.status
        answer.error = receiver.error_message or receiver.error_code
        answer.finish_reason = receiver.finish_reason
        answer.prompt_tokens = receiver.prompt_tokens
        answer.generated_tokens = receiver.completion_tokens
        answer.cached_tokens = receiver.record.cached_tokens
        return answer

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Raises ConnectionFailedError."""
        return await self._get(f"/explain/{request_id}")

    async def cluster(self) -> dict[str, Any]:
        """Raises ConnectionFailedError."""
        return await self._get("/cluster")

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._limit():
            status, body = await self._client.get(path)
        if status != 200:
            raise ConnectionFailedError(f"the server responded to {path} with status {status}")
        found: dict[str, Any] = msgspec.json.decode(body)
        return found

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            text = f"the server did not answer within {self._timeout_s:g} s"
            raise ConnectionFailedError(text) from None
