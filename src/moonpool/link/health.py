"""A worker's answers to the probes of an orchestrator: is it alive, and has it joined?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

REQUEST_S = 5.0
"""A probe that takes longer to send its request is disconnected."""
MAX_LINE_BYTES = 1024
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HealthServer:
    """Answers GET `/live` and `/ready` over HTTP, without a key: both tell nothing but a state.

    `/live` returns 200 as long as the worker's event loop turns. `/ready` returns 200 while the
    instance is joined, and 503 with the reason otherwise. `HealthServer` accepts the same HTTP
    methods as the head's port.
    """

    def __init__(self, not_ready: Callable[[], str]) -> None:
        """`not_ready` returns "", or the reason why the worker serves no requests."""
        self._not_ready = not_ready
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError if the address cannot be had."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                line = await reader.readline()
                while await reader.readline() not in (b"\r\n", b"\n", b""):
                    pass  # this server ignores headers
                writer.write(self._answer(line.decode("latin-1").split()))
                await writer.drain()
        except (
            OSError,
            ValueError,
        ):  # includes a timeout, and a line without an end
            pass
        finally:
            writer.close()

    def _answer(self, words: list[str]) -> bytes:
        method, path = (*words, "", "")[:2]
        status, said = self._state(path.partition("?")[0])
        if method not in ("GET", "HEAD"):
            status, said = 405, {"error": "GET /live or /ready"}
        body = msgspec.json.encode(said)
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else body)

    def _state(self, path: str) -> tuple[int, dict[str, object]]:
        if path == "/live":
            return 200, {"live": True}
        if path == "/ready":
            reason = self._not_ready()
            return 503 if reason else 200, {"ready": not reason, "reason": reason or None}
        return 404, {"error": "GET /live or /ready"}
