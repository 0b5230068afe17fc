"""Tests that a silent stream sends keep-alives, which no client takes for a part of the answer.

The silences end when the client has received what the test waits for, so no result depends on a
time.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from scripted_head import ScriptedHead, Step, served, spoken

from moonpool.api.serving_backend import ApiOptions, Output, RequestRefused
from moonpool.types import FinishReason, Token

OFTEN = ApiOptions(keepalive_s=0.02)
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
REFUSED = RequestRefused(429, "slo_ttft", "too late", 3.0)


class Gated:
    """A head that is silent before and within its answer, until the test opens the gates."""

    def __init__(self, *steps: Step) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        self.head = ScriptedHead(lambda _: self._steps(*steps))

    def _steps(self, *steps: Step) -> list[Step]:
        if steps:
            return [self.first, *steps]
        one, *rest = spoken("He", "llo")
        return [self.first, one, self.second, *rest]


@contextmanager
def asked(gated: Gated, path: str, **fields: Any) -> Iterator[httpx.Response]:
    """Returns the response of a stream as soon as it has a header."""
    with (
        served(gated.head, OFTEN) as url,
        httpx.stream(
            "POST", url + path, json=CALLS[path] | {"stream": True} | fields, timeout=60
        ) as response,
    ):
        try:
            yield response
        finally:
            gated.first.set()
            gated.second.set()


def said(path: str) -> bytes:
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    return ping if path == "/v1/messages" else b": prefill\n\n"


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_speaks_before_its_first_token_and_between_two(path: str) -> None:
    gated, raw = Gated(), b""
    with asked(gated, path) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        for part in response.iter_raw():
            raw += part
            if raw.count(said(path)) >= 2:
                gated.first.set()
            begun, _, rest = raw.partition(b"He")
            if rest.count(said(path)) >= 2:
                gated.second.set()
    assert begun.startswith(said(path) * 2)
    assert b"llo" in rest
    plain = httpx_answer(path)
    assert without_ids(raw.replace(said(path), b"")) == without_ids(plain)


def test_a_comment_comes_within_the_time_that_was_set() -> None:
    """Whether a proxy that cuts after that time keeps the stream, whenever the last token came."""

    def silence_s() -> float:
        quiet = threading.Event()
        head = ScriptedHead(lambda _: [0.05, *spoken("He", finish=None), quiet, *spoken("llo")])
        body, raw, heard_s = CALLS["/v1/completions"] | {"stream": True}, b"", 0.0
        with (
            served(head, ApiOptions(keepalive_s=1.0)) as url,
            httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response,
        ):
            for part in response.iter_raw():
                raw += part
                if b"prefill" in part:
                    quiet.set()
                    return time.monotonic() - heard_s
                heard_s = time.monotonic()
        raise AssertionError(raw)

    assert any(silence_s() < 1.5 for _ in range(5)), "a busy machine may be late, but not each time"


def httpx_answer(path: str) -> bytes:
    with served(ScriptedHead(lambda _: spoken("He", "llo"))) as url:
        body = CALLS[path] | {"stream": True}
        return httpx.post(url + path, json=body, timeout=60).content


def without_ids(raw: bytes) -> list[Any]:
    """Returns the events without the fields that are drawn for each call."""
    drawn = {"id", "created", "created_at", "item_id"}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k not in drawn}
        return [plain(v) for v in value] if isinstance(value, list) else value

    blocks = raw.decode().split("\n\n")[:-1]
    data = [block.split("data: ", 1)[1] for block in blocks]
    return [plain(json.loads(text)) for text in data if text != "[DONE]"]


def test_text_that_is_held_back_is_silence_too() -> None:
    """Tokens of a tool call arrive, but no bytes leave until the call is complete."""
    gated = Gated()
    call = '{"name": "f", "arguments": {}}'
    held = [Output(tokens=tuple(map(Token, call[:9].encode()))), gated.second]
    rest = [Output(tokens=tuple(map(Token, call[9:].encode()))), *spoken()]
    gated.head.script = lambda _: [*held, *rest]
    gated.head.tokenizer.use_chat_template("{{ messages[0].content }}{% if tools %}{% endif %}")
    raw = b""
    with asked(gated, "/v1/chat/completions", tools=[TOOL]) as response:
        for part in response.iter_raw():
            raw += part
            if raw.count(b": prefill\n\n") >= 3:
                gated.second.set()
    assert b'"name":"f"' in raw.replace(b": prefill\n\n", b"")


def test_a_refusal_before_the_placement_has_its_own_status() -> None:
    gated = Gated(REFUSED)
    gated.head.is_placed = False
    opening = threading.Timer(0.3, gated.first.set)  # waits many periods without a keep-alive
    opening.start()
    with asked(gated, "/v1/chat/completions") as response:
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert b"too late" in response.read()


@pytest.mark.parametrize("path", CALLS)
def test_a_refusal_after_a_comment_is_an_event(path: str) -> None:
    gated, raw = Gated(REFUSED), b""
    with asked(gated, path) as response:
        assert response.status_code == 200
        for part in response.iter_raw():
            raw += part
            gated.first.set()
    assert raw.replace(said(path), b"").count(b"too late") == 1
    assert b"[DONE]" not in raw and b"message_stop" not in raw


def test_it_can_be_turned_off_and_whole_answers_are_left_alone() -> None:
    for options, stream in [(ApiOptions(keepalive_s=0), True), (OFTEN, False)]:
        head = ScriptedHead(lambda _: [0.2, *spoken("a")])
        with served(head, options) as url:
            body = CALLS["/v1/completions"] | {"stream": stream}
            answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
        assert answer.content[:1] in (b"d", b"{")
        assert b"\n: " not in answer.content
    with pytest.raises(ValueError, match="keepalive_s"):
        ApiOptions(keepalive_s=-1)


@pytest.mark.long
def test_clients_of_openai_and_anthropic_pass_over_it() -> None:
    anthropic = pytest.importorskip("anthropic")
    script = [0.1, *spoken("He"), 0.1, *spoken("llo")]
    script = [step for step in script if not (isinstance(step, Output) and step.finish_reason)]
    head = ScriptedHead(lambda _: [*script, Output(finish_reason=FinishReason.STOP)])
    with (
        served(head, OFTEN) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as other,
    ):
        chunks = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello"
        parts = client.completions.create(model="fake", prompt="Hi", stream=True)
        assert "".join(part.choices[0].text for part in parts) == "Hello"
        with client.responses.stream(model="fake", input="Hi") as events:
            assert events.get_final_response().output_text == "Hello"
        with other.messages.stream(model="fake", max_tokens=9, messages=MESSAGES) as stream:
            assert "".join(stream.text_stream) == "Hello"
            assert stream.get_final_message().content[0].text == "Hello"


@pytest.mark.long
@pytest.mark.parametrize("is_forwarded", [False, True])
def test_a_proxy_that_cuts_silent_connections_keeps_a_stream(is_forwarded: bool) -> None:
    """The proxy cuts after two seconds without a byte; the head is silent for six."""
    head = ScriptedHead(lambda _: [6.0, *spoken("Hello")])
    body = CALLS["/v1/chat/completions"] | {"stream": True}
    if is_forwarded:
        part = Output(tokens=(Token(0, payload=b"text/event-stream\ndata: [DONE]\n\n"),))
        head.script = lambda _: [6.0, part, *spoken()]
        head.card = structs.replace(
            head.card, forwards=("/v1/chat/completions",), parses=("reasoning",)
        )
    for keepalive_s, whole in [(0.25, True), (0.0, False)]:
        with served(head, ApiOptions(keepalive_s=keepalive_s)) as url, proxied(url, 2.0) as front:
            try:
                text = httpx.post(front + "/v1/chat/completions", json=body, timeout=60).text
            except httpx.HTTPError:
                text = ""
        assert text.endswith("data: [DONE]\n\n") == whole


@contextmanager
def proxied(url: str, idle_s: float) -> Iterator[str]:
    """Runs a proxy before the server that ends a connection if no byte comes back for a time."""
    host, port = url.removeprefix("http://").split(":")
    places: queue.Queue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def back(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await asyncio.wait_for(source.read(1 << 16), idle_s):
                sink.write(data)
        except TimeoutError:
            sink.transport.abort()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source, sink = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as both:
            both.create_task(back(source, writer))
            while data := await reader.read(1 << 16):
                sink.write(data)
            sink.close()

    async def serve() -> None:
        end = asyncio.Event()
        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        places.put((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), end))
        await end.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    own_port, loop, end = places.get(timeout=60)
    try:
        yield f"http://127.0.0.1:{own_port}"
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(60)
