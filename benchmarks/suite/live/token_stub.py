"""A server that speaks vLLM's HTTP API without a model: each of its answers gets one token per
step.

    python -m benchmarks.suite.live.token_stub PORT GAP_S

A step writes to all streams at once, as a batch of an engine does, so with any number of streams
only the part in front of the server limits the speed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

from moonpool.api.connection.listening import listen

MODEL = "random:hidden=64,layers=1,heads=2,kv_heads=1,inter=64,vocab=300"
GENERATING = ("/v1/completions", "/v1/chat/completions")
MEASURED_SALT_CHARS = 64
"""A `cache_salt` of this many characters marks moonpool's calls to measure the server: they wait
for nothing."""
_HEADER = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_STREAM = _HEADER % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _events(path: str, finish: str | None) -> bytes:
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    if path == "/v1/completions":
        choice |= {"text": "x", "token_ids": [120]}
        body = {"object": "text_completion", "model": "m", "choices": [choice]}
    else:
        choice |= {"delta": {"content": "x"}}
        body = {"object": "chat.completion.chunk", "model": "m", "choices": [choice]}
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


_MORE = {path: _events(path, None) for path in GENERATING}
_LAST = {
    path: _events(path, "length") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    for path in GENERATING
}


def _get(path: str) -> tuple[bytes, bytes]:
    """Returns the content type and the body of the server's answer to a GET."""
    if path == "/v1/models":
        listed = {"id": "m", "object": "model", "root": MODEL, "parent": None}
        models = {"object": "list", "data": [listed | {"max_model_len": 4096}]}
        return b"application/json", json.dumps(models).encode()
    if path == "/metrics":
        text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4000000"} 1.0\n'
        return b"text/plain", text.encode()
    if path == "/openapi.json":
        return b"application/json", json.dumps(
            {"paths": {path: {} for path in GENERATING}}
        ).encode()
    return b"application/json", b"{}"


class _Connection(asyncio.Protocol):
    def __init__(self, stub: _Stub) -> None:
        self._stub = stub
        self._buffer = bytearray()
        self.transport: asyncio.Transport
        self.path = ""
        self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stub.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            size = int(length or b"0")
            if len(self._buffer) < end + 4 + size:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + size])
            path = self._buffer[:end].split(b" ", 2)[1].decode()
            del self._buffer[: end + 4 + size]
            self._answer(path, body)

    def _answer(self, path: str, raw: bytes) -> None:
        if path not in GENERATING:
            self._whole(*_get(path))
            return
        body = json.loads(raw)
        self.path, self.left = path, body.get("max_tokens") or 16
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": "length", "text": "x" * self.left}
            choice |= {"token_ids": [120] * self.left}
            if path != "/v1/completions":
                choice = {"index": 0, "finish_reason": "length"}
                choice["message"] = {"role": "assistant", "content": "x" * self.left}
            usage = {"prompt_tokens": 1, "completion_tokens": self.left}
            answer = {"model": "m", "object": "x", "choices": [choice], "usage": usage}
            self._whole(b"application/json", json.dumps(answer).encode())
            return
        self.transport.write(_STREAM)
        if len(body.get("cache_salt") or "") == MEASURED_SALT_CHARS:
            self.transport.write(_MORE[path] * (self.left - 1) + _LAST[path])
        else:
            self._stub.streams.add(self)

    def step(self) -> bool:
        """Sends a token. Returns whether this token was the answer's last."""
        self.left -= 1
        self.transport.write(_MORE[self.path] if self.left else _LAST[self.path])
        return not self.left

    def _whole(self, kind: bytes, body: bytes) -> None:
        self.transport.write(_HEADER % kind + b"content-length: %d\r\n\r\n" % len(body) + body)


class _Stub:
    def __init__(self) -> None:
        self.streams: set[_Connection] = set()

    async def run(self, port: int, gap_s: float) -> None:
        loop = asyncio.get_running_loop()
        listener = listen("127.0.0.1", port)
        await loop.create_server(lambda: _Connection(self), sock=listener, backlog=4096)
        print(listener.getsockname()[1], flush=True)
        next_s = loop.time()
        while True:
            next_s = max(next_s + gap_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            for stream in list(self.streams):
                if stream.step():
                    self.streams.discard(stream)


if __name__ == "__main__":
    uvloop.run(_Stub().run(int(sys.argv[1]), float(sys.argv[2])))
