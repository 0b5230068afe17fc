"""A streaming client of the completions API, by httpx; it notes the time of each token.

The load generator has a client of its own for thousands of streams (`replay.http_client`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from moonpool.server_events import DONE, ServerEventReader


@dataclass(slots=True)
class ClientResponse:
    """The answer to one request; times are seconds since it was sent."""

    request_id: str
    text: str = ""
    status: int = 0
    error: str = ""
    finish_reason: str | None = None
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
        """Mean gap between tokens."""
        gaps = self.gaps_s
        return sum(gaps) / len(gaps) if gaps else float("nan")


class CompletionClient:
    """Sends completions to one server and measures them."""

    def __init__(self, url: str, timeout_s: float = 300.0) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=timeout_s)

    async def close(self) -> None:
        await self._client.aclose()

    async def complete(
        self,
        prompt: str | list[int],
        on_text: Callable[[str], None] | None = None,
        request_id: str = "",
        **parameters: Any,
    ) -> ClientResponse:
        """Streams one completion. A rejection is a response with its status and error. The server
        chooses the id of the request if `request_id` is empty."""
        body = {
            "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        answer = ClientResponse(request_id="")
        began_s = time.perf_counter()
        headers = {"x-request-id": request_id} if request_id else {}
        async with self._client.stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            answer.status = response.status_code
            answer.request_id = response.headers.get("x-request-id", "")
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")
                return answer
            events = ServerEventReader()
            async for part in response.aiter_bytes():
                now_s = time.perf_counter() - began_s
                for event in events.feed(part):
                    if event != DONE:
                        self._take(answer, json.loads(event), now_s, on_text)
        answer.seconds = time.perf_counter() - began_s
        return answer

    async def explain(self, request_id: str) -> dict[str, Any]:
        response = await self._client.get(f"/explain/{request_id}")
        response.raise_for_status()
        explained: dict[str, Any] = response.json()
        return explained

    async def cluster(self) -> dict[str, Any]:
        state: dict[str, Any] = (await self._client.get("/cluster")).json()
        return state

    def _take(
        self,
        answer: ClientResponse,
        chunk: dict[str, Any],
        now_s: float,
        on_text: Callable[[str], None] | None,
    ) -> None:
        if "error" in chunk:
            answer.error = chunk["error"]["message"]
            return
        for choice in chunk.get("choices", ()):
            if choice["text"]:
                answer.text += choice["text"]
                answer.token_instants_s.append(now_s)
                if on_text is not None:
                    on_text(choice["text"])
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        usage = chunk.get("usage")
        if usage:
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.generated_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens", 0)
