"""Tokens that are sent in the turn of the loop that brings them give the bytes that a task which
waits for each of them gives."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from scripted_head import Script, ScriptedHead, Step, one_by_one, served, spoken

from moonpool.api.serving_backend import Output
from moonpool.conductor.actions import Deliver
from moonpool.head.answers import ResponseStream
from moonpool.types import FinishReason, Request, RequestId, Token, TokenLogprobs

LONG = ("Grüße 🎉, " * 40).encode()
TOLD = {"x-request-id": "asked"}


class ListeningHead(ScriptedHead):
    """A head whose outputs come as those of a real one do."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.streams: dict[RequestId, ResponseStream] = {}
        self.num_taken = self.num_waited = 0

    async def _outputs(self, request: Request) -> AsyncGenerator[Output, None]:
        stream = self.streams[request.request_id] = ResponseStream()
        feeding = asyncio.create_task(self._feed(request, stream))
        try:
            while True:
                yield (output := await stream.next_output())
                if output.finish_reason is not None:
                    return
        finally:
            feeding.cancel()
            del self.streams[request.request_id]

    async def _feed(self, request: Request, stream: ResponseStream) -> None:
        for step in self.script(request):
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Output):
                action = Deliver(request.request_id, step.tokens, step.finish_reason, 0)
                if stream.take_at_once(action):
                    self.num_taken += 1
                else:
                    self.num_waited += 1
                    stream.deliver(action)
                await asyncio.sleep(0)

    def listen(self, request_id: RequestId, take: Callable[[Output], bool]) -> None:
        self.streams[request_id].listener = take


def slowly(data: bytes) -> list[Step]:
    return [each for step in one_by_one(data) for each in (step, 0.0)]


def streamed(head: ScriptedHead, path: str, body: dict[str, Any]) -> str:
    """What a call is answered, without what was drawn for it."""
    with served(head) as url:
        found = httpx.post(f"{url}{path}", json=body | {"stream": True}, headers=TOLD, timeout=60)
    assert found.status_code == 200
    return re.sub(r'"created(_at)?":\d+|"(id|item_id)":"[^"]*"', "", found.text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "Hi", "stop": "no such text", "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"model": "fake", "input": "Hi"}),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]},
        ),
    ],
)
def test_streams_have_the_bytes_of_a_task_that_waits(path: str, body: dict[str, Any]) -> None:
    listening = ListeningHead(lambda _: slowly(LONG))
    waiting = ScriptedHead(lambda _: one_by_one(LONG))
    assert streamed(listening, path, body) == streamed(waiting, path, body)
    if "stop" in body:
        assert not listening.num_taken
    else:
        assert listening.num_taken > len(LONG) / 2


def test_whole_answers_are_gathered_without_their_task() -> None:
    head = ListeningHead(lambda _: slowly(LONG))
    with served(head) as url:
        body = {"prompt": "Hi", "max_tokens": 999}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert found["choices"][0]["text"] == LONG.decode()
    assert head.num_taken > len(LONG) / 2


def test_an_error_of_one_answer_ends_that_answer_alone() -> None:
    first = Token(97, TokenLogprobs(-0.5, ((97, -0.5),)))
    steps = [Output(tokens=(first,)), 0.01, Output(tokens=(Token(98),)), 0.01, *spoken("c")]
    with served(ListeningHead(lambda _: steps)) as url:
        body = {"prompt": "Hi", "stream": True, "logprobs": 1}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in found.split("\n\n") if line.startswith("data: {")]
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["code"] == "internal_error"
    assert "[DONE]" not in found


def test_a_client_that_reads_late_gets_all_in_order() -> None:
    data = bytes(97 + number % 26 for number in range(20_000))
    head = ListeningHead(lambda _: [Output(tokens=(Token(b),)) for b in data[:-1]] + spoken("z"))
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 99_999}).encode()
    with served(head) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            head_lines = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            head_lines += f"x-request-id: {'long' * 30}\r\n"  # in each event, so that all wait
            head_lines += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head_lines.encode() + body)
            time.sleep(0.5)
            found = b"".join(iter(lambda: client.recv(1 << 16), b""))
    texts = re.findall(rb'"text":"([a-z]*)"', found)
    assert b"".join(texts) == data[:-1] + b"z"
    assert head.num_taken
    assert FinishReason.STOP.value.encode() in found
