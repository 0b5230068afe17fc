"""Runs a small HTTP server of which the test determines every byte."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# a list has the pieces to send, a moment apart; the connection closes after b""
Reply = bytes | list[bytes]
Script = Callable[[str, dict[str, str], Any], Reply]


def whole(status: int, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def models(*names: str) -> bytes:
    return whole(200, {"data": [{"id": name} for name in names]})


def token_event(*ids: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": "", "token_ids": list(ids), "finish_reason": finish}]}


def stream(*events: Any, cut: int = 0) -> list[bytes]:
    """Sends chunks; `cut` > 0 also breaks the bytes into pieces of that size."""
    parts = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    parts.append(b"data: [DONE]\n\n")
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    pieces = [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]
    if not cut:
        return pieces
    data = b"".join(pieces)
    return [data[at : at + cut] for at in range(0, len(data), cut)]


class ScriptedServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[tuple[str, dict[str, str], Any]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = head[0].split()[1]
                pairs = (line.partition(": ") for line in head[1:] if line)
                headers = {name.lower(): value for name, _, value in pairs}
                size = int(headers.get("content-length", 0))
                body = json.loads(await reader.readexactly(size)) if size else None
                self.calls.append((path, headers, body))
                reply = self.script(path, headers, body)
                for piece in [reply] if isinstance(reply, bytes) else reply:
                    if piece == b"":
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            return
        finally:
            writer.close()


@contextmanager
def scripted(script: Script) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script)
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.serve, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:

        async def end() -> None:
            listening.close()
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
