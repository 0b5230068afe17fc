"""Runs a server of known times: one engine with chunks and a prefix cache, behind OpenAI's
completions.

The server's code is independent of the scheduler and the simulator, like another engine.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

BLOCK = 16


@dataclass(eq=False)
class _Running:
    prompt: list[int]
    left: int
    cached: int
    computed: int = 0
    generated: int = 0
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class TimedServer:
    """A step takes `fixed_s`, and more time for each prompt token, each decode, and each token to
    which they attend. Each step takes one of `ratios` times as long. `pages` are JSON answers to
    other routes."""

    def __init__(
        self,
        fixed_s: float = 0.004,
        prompt_token_s: float = 100e-6,
        decode_s: float = 0.0003,
        context_token_s: float = 1e-7,
        chunk_tokens: int = 512,
        sequences: int = 64,
        cache_blocks: int = 4096,
        ratios: tuple[float, ...] = (1.0,),
        pages: dict[str, Any] | None = None,
    ) -> None:
        self.fixed_s = fixed_s
        self.prompt_token_s = prompt_token_s
        self.decode_s = decode_s
        self.context_token_s = context_token_s
        self.chunk_tokens = chunk_tokens
        self.sequences = sequences
        self.ratios = ratios
        self._random = Random(1)
        self._pages = {"/v1/models": {"data": [{"id": "known", "max_model_len": 8192}]}}
        self._pages |= pages or {}
        self.url = ""
        self.num_requests = 0
        self.on_request = lambda: None
        self.refuses: Callable[[int], bool] = lambda number: False
        self.longest_answer = 1 << 20
        self._cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._cache_blocks = cache_blocks
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._work = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[TimedServer]:
        engine = asyncio.create_task(self._engine())
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                server.close()
                for task in (engine, *self._answering):
                    task.cancel()
                await asyncio.gather(engine, *self._answering, return_exceptions=True)

    def _num_cached(self, prompt: list[int]) -> int:
        count = 0
        for end in range(BLOCK, len(prompt), BLOCK):
            key = tuple(prompt[:end])
            if key not in self._cache:
                break
            self._cache.move_to_end(key)
            count = end
        return count

    def _keep(self, prompt: list[int]) -> None:
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            self._cache[tuple(prompt[:end])] = None
        while len(self._cache) > self._cache_blocks:
            self._cache.popitem(last=False)

    async def _engine(self) -> None:
        while True:
            while self._waiting and len(self._running) < self.sequences:
                self._running.append(self._waiting.pop(0))
            if not self._running:
                self._work.clear()
                await self._work.wait()
                continue
            await self._step()

    async def _step(self) -> None:
        decodes = [one for one in self._running if one.computed == len(one.prompt)]
        budget, seconds = self.chunk_tokens - len(decodes), self.fixed_s
        chunks = []
        for one in self._running:
            if one.computed == len(one.prompt) or budget <= 0:
                continue
            if not one.computed:
                one.computed = one.cached = self._num_cached(one.prompt)
            num_tokens = min(budget, len(one.prompt) - one.computed)
            chunks.append((one, num_tokens))
            budget -= num_tokens
        seconds += self.prompt_token_s * sum(num_tokens for _, num_tokens in chunks)
        seconds += self.decode_s * len(decodes)
        contexts = sum(len(one.prompt) + one.generated for one in decodes)
        seconds += self.context_token_s * contexts
        await asyncio.sleep(seconds * self._random.choice(self.ratios))
        for one, num_tokens in chunks:
            one.computed += num_tokens
            if one.computed == len(one.prompt):
                self._keep(one.prompt)
        ended = [one for one, _ in chunks if one.computed == len(one.prompt)]
        for one in (*decodes, *ended):
            one.generated += 1
            one.tokens.put_nowait(one.generated)
            if one.generated == one.left:
                self._running.remove(one)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split()[1]
                lengths = [line for line in head.lower().split("\r\n") if "content-length" in line]
                size = int(lengths[0].split(":")[1]) if lengths else 0
                body = json.loads(await reader.readexactly(size)) if size else {}
                await self._reply(path, body, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            writer.close()

    async def _reply(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path != "/v1/completions":
            data = json.dumps(self._pages.get(path)).encode()
            status = b"200 OK" if path in self._pages else b"404 Not Found"
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(data), data))
            return
        self.num_requests += 1
        self.on_request()
        if self.refuses(self.num_requests):
            data = json.dumps({"error": {"message": "no room", "code": "rejected"}}).encode()
            head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
            return
        one = _Running(body["prompt"], min(body["max_tokens"], self.longest_answer), 0)
        self._waiting.append(one)
        self._work.set()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: keep-alive\r\n"
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for number in range(1, one.left + 1):
            await one.tokens.get()
            finish = "length" if number == one.left else None
            choice = {"text": "", "token_ids": [number], "finish_reason": finish}
            _send(writer, {"choices": [choice]})
        usage = {
            "prompt_tokens": len(one.prompt),
            "completion_tokens": one.left,
            "prompt_tokens_details": {"cached_tokens": one.cached},
        }
        _send(writer, {"choices": [], "usage": usage})
        writer.write(b"0\r\n\r\n")


def _send(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    data = b"data: %b\n\n" % json.dumps(event).encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
