"""A server that speaks vLLM's HTTP and KV events, and takes the time of a `TimedEngine`.

    python -m benchmarks.suite.routers.stub_server --port 8100 --model FOLDER [--factor 2]

The stub replaces a vLLM on a GPU: routers see its queue, its batch and its cache as they would see
vLLM's. Answers are token ids without meaning.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn

from benchmarks.suite.routers.timed_engine import (
    BlockNews,
    EngineSize,
    EngineSpeed,
    TimedEngine,
    TimedRequest,
    TimedToken,
)

COMPLETIONS = "/v1/completions"
KEPT_BATCHES = 10_000
Message = dict[str, Any]
Answer = tuple[int, bytes]


class StubServer:
    """The engine's loop, and the ASGI application in front of it."""

    def __init__(self, model: str, size: EngineSize, speed: EngineSpeed, events: Any) -> None:
        self._model, self._engine, self._events = model, TimedEngine(size, speed), events
        self._names = map(str, itertools.count())
        self._answers: dict[str, asyncio.Queue[TimedToken]] = {}
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Steps as long as there is work; runs until cancelled."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time()
        while True:
            took_s = self._engine.begin_step()
            if not took_s:
                self._work.clear()
                await self._work.wait()
                ends_s = loop.time()
                continue
            # the clock neither drifts nor catches up
            ends_s = max(ends_s, loop.time() - took_s) + took_s
            await asyncio.sleep(max(ends_s - loop.time(), 0.0))
            for token in self._engine.end_step():
                if token.name in self._answers:
                    self._answers[token.name].put_nowait(token)
            await self._publish()

    async def _publish(self) -> None:
        news, self._engine.news = self._engine.news, []
        if news and self._events is not None:
            await self._events.publish(news, self._engine.size.block_tokens)

    # HTTP

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == COMPLETIONS:
            await self._complete(body, receive, send)
            return
        await _whole(send, *self._plain(scope["path"]))

    def _plain(self, path: str) -> Answer:
        size = self._engine.size
        card = {"id": self._model, "object": "model", "root": self._model, "parent": None}
        answers: dict[str, Callable[[], Any]] = {
            "/health": dict,
            "/v1/models": lambda: {
                "object": "list",
                "data": [card | {"max_model_len": size.max_model_tokens}],
            },
            "/openapi.json": lambda: {"paths": {COMPLETIONS: {}}},
            "/reset_prefix_cache": lambda: {"success": self._engine.forget()},
            "/metrics": lambda: (
                f'vllm:cache_config_info{{block_size="{size.block_tokens}",'
                f'num_gpu_blocks="{size.num_blocks}"}} 1.0\n'
                f'vllm:prefix_cache_queries_total{{engine="0"}} {float(self._engine.queries)}\n'
                f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self._engine.hits)}\n'
                f'vllm:num_preemptions_total{{engine="0"}} {float(self._engine.preemptions)}\n'
                f'vllm:kv_cache_usage_perc{{engine="0"}} {self._engine.usage}\n'
                f'vllm:num_requests_running{{engine="0"}} {float(len(self._engine.running))}\n'
                f'vllm:num_requests_waiting{{engine="0"}} {float(len(self._engine.waiting))}\n'
            ),
        }
        make = answers.get(path)
        if make is None:
            return 404, b"{}"
        made = make()
        return 200, made.encode() if isinstance(made, str) else json.dumps(made).encode()

    async def _complete(
        self,
        body: bytes,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        try:
            asked = json.loads(body)
            request = self._request(asked)
            self._engine.submit(request)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            await _whole(send, 400, json.dumps({"error": {"message": str(error)}}).encode())
            return
        found = self._answers[request.name] = asyncio.Queue()
        self._work.set()
        gone = asyncio.create_task(_until_gone(receive))
        say = asyncio.create_task(_say(self._model, asked, request, found, send))
        try:
            await asyncio.wait((gone, say), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._answers[request.name]
            self._engine.cancel(request.name)
            for task in (gone, say):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await say

    def _request(self, asked: dict[str, Any]) -> TimedRequest:
        for name, value in (asked.get("vllm_xargs") or {}).items():
            if not isinstance(value, str | int | float | list):
                raise ValueError(f"vllm_xargs.{name} must be a text, a number or a list")
        prompt = asked["prompt"]
        tokens = list(prompt.encode()) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens:
            raise ValueError("the prompt is empty")
        most = int(asked.get("max_tokens") or 16)
        salt = str(asked.get("cache_salt") or "").encode()
        return TimedRequest(next(self._names), tokens, len(tokens), most, salt)


async def _until_gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(send: Callable[[Message], Awaitable[None]], status: int, data: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _say(
    model: str,
    asked: dict[str, Any],
    request: TimedRequest,
    found: asyncio.Queue[TimedToken],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Sends the answer as a stream of events or as one response."""
    common = {"id": f"cmpl-{request.name}", "object": "text_completion", "model": model}
    streams, tokens = bool(asked.get("stream")), list[int]()
    if streams:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    while True:
        token = await found.get()
        tokens.append(token.token)
        choice = _choice([token.token], token.is_last)
        if streams:
            await _event(send, common | {"choices": [choice]})
        if token.is_last:
            break
    usage = {
        "prompt_tokens": request.num_prompt,
        "completion_tokens": len(tokens),
        "prompt_tokens_details": {"cached_tokens": token.cached},
    }
    if not streams:
        whole = common | {"choices": [_choice(tokens, True)], "usage": usage}
        await _whole(send, 200, json.dumps(whole).encode())
        return
    await _event(send, common | {"choices": [], "usage": usage})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _choice(tokens: list[int], is_last: bool) -> dict[str, Any]:
    return {
        "index": 0,
        "text": "".join(chr(97 + token % 26) for token in tokens),
        "token_ids": tokens,
        "finish_reason": "length" if is_last else None,
    }


async def _event(send: Callable[[Message], Awaitable[None]], event: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


class EventPublisher:
    """vLLM's KV events over ZeroMQ, with a replay endpoint."""

    def __init__(self, events_port: int, replay_port: int) -> None:
        import zmq.asyncio

        names: Any = zmq
        context = zmq.asyncio.Context.instance()
        self._out, self._again = context.socket(names.PUB), context.socket(names.ROUTER)
        self._out.bind(f"tcp://127.0.0.1:{events_port}")
        self._again.bind(f"tcp://127.0.0.1:{replay_port}")
        self._sent: list[tuple[int, bytes]] = []
        self._number = 0

    async def publish(self, news: list[BlockNews], block_tokens: int) -> None:
        events = [block_event(one, block_tokens) for one in news]
        payload = msgspec.msgpack.encode([asyncio.get_running_loop().time(), events, 0])
        number, self._number = self._number, self._number + 1
        self._sent = [*self._sent[-KEPT_BATCHES:], (number, payload)]
        await self._out.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def repeat(self) -> None:
        """Sends missed events again to subscribers that ask for them; runs until cancelled."""
        while True:
            client, _, first = await self._again.recv_multipart()
            for number, payload in self._sent:
                if number >= int.from_bytes(first, "big"):
                    named = number.to_bytes(8, "big")
                    await self._again.send_multipart([client, b"", b"", named, payload])
            await self._again.send_multipart([client, b"", b"", b"\xff" * 8, b""])


def block_event(one: BlockNews, block_tokens: int) -> dict[str, Any]:
    """Returns the event as vLLM 0.32 encodes it: a map with field names."""
    common = {"block_hashes": [_number(one.key)], "medium": "GPU", "group_idx": 0}
    if one.token_ids is None:
        return {"type": "BlockRemoved"} | common
    return {
        "type": "BlockStored",
        "parent_block_hash": None if one.parent is None else _number(one.parent),
        "token_ids": list(one.token_ids),
        "block_size": block_tokens,
        "lora_id": None,
        "lora_name": None,
    } | common


def _number(key: bytes) -> int:
    """vLLM names blocks by 64 bits on the wire."""
    return int.from_bytes(key[:8], "big")


async def serve(given: argparse.Namespace) -> None:
    size = msgspec.convert(
        {key: getattr(given, key) for key in EngineSize.__struct_fields__}, EngineSize
    )
    events = EventPublisher(given.events_port, given.replay_port) if given.events_port else None
    stub = StubServer(given.model, size, EngineSpeed(factor=given.factor), events)
    config = uvicorn.Config(
        stub, host="127.0.0.1", port=given.port, log_level="warning", lifespan="off"
    )
    tasks = [asyncio.create_task(stub.run())]
    if events is not None:
        tasks.append(asyncio.create_task(events.repeat()))
    try:
        await uvicorn.Server(config).serve()
    finally:
        for task in tasks:
            task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--events-port", type=int, default=0)
    parser.add_argument("--replay-port", type=int, default=0)
    for name in EngineSize.__struct_fields__:
        default = getattr(EngineSize(), name)
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
