"""Tests cases that need a real socket: clients of other projects, clients that leave, bodies in
pieces."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from scripted_head import ScriptedHead, Step, one_by_one, served, spoken, wait_until

from moonpool.api.connection.listening import PortError, listen
from moonpool.api.serving_backend import ApiOptions, Output, RequestRefused
from moonpool.api.sharing import shared_buffer
from moonpool.types import FinishReason, Request, Token

USER = {"role": "user", "content": "Hi"}
KEYS = {"key-of-ann": "ann", "key-of-bob": "bob"}


def endless(_: Request) -> Iterator[Step]:
    while True:
        yield Output(tokens=(Token(97),))
        yield 0.01


def silent(_: Request) -> list[Step]:
    return [3600.0]


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def raw_request(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {length or len(body)}\r\n\r\n".encode() + body


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_openais_client_reads_answers_and_streams() -> None:
    head = ScriptedHead(lambda _: one_by_one("Grüße 🎉".encode(), logprobs=True))
    with served(head) as url, client_of(url) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        answer = client.chat.completions.create(model="fake", messages=[USER], logprobs=True)
        assert answer.choices[0].message.content == "Grüße 🎉"
        assert answer.choices[0].logprobs is not None
        chunks = list(
            client.chat.completions.create(
                model="fake",
                messages=[USER],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Grüße 🎉"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len("Grüße 🎉".encode())
        streamed = client.completions.create(model="fake", prompt=["a", "b"], stream=True, n=2)
        texts = ["", "", "", ""]
        for chunk in streamed:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["Grüße 🎉"] * 4


def test_openais_async_client_streams_side_by_side() -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="fake", messages=[USER], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client) for _ in range(20)))

    with served(ScriptedHead(lambda _: one_by_one(b"Hello"))) as url:
        assert asyncio.run(many(url)) == ["Hello"] * 20


def test_openais_client_knows_our_errors() -> None:
    refused = ScriptedHead(lambda _: [RequestRefused(429, "ttft_slo", "busy", retry_after_s=1)])
    with served(refused) as url, client_of(url) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="fake", messages=[USER])
        assert caught.value.code == "ttft_slo"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=[USER])
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model="fake", messages=[USER], temperature=9)
        assert bad.value.param == "temperature"


def test_openais_client_sees_an_error_in_mid_stream() -> None:
    head = ScriptedHead(
        lambda _: [*spoken("a", finish=None), RequestRefused(504, "deadline", "late")]
    )
    with served(head) as url, client_of(url) as client:
        stream = client.chat.completions.create(model="fake", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="late"):
            list(stream)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [endless, silent])
def test_a_client_that_leaves_ends_its_requests(script: object, stream: bool, n: int) -> None:
    head = ScriptedHead(script)  # type: ignore[arg-type]
    body = json.dumps({"prompt": "x", "stream": stream, "n": n, "max_tokens": 255}).encode()
    with served(head) as url:
        with connected(url) as connection:
            connection.sendall(raw_request("/v1/completions", body))
            assert wait_until(lambda: len(head.requests) == n)
            if stream and script is endless:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            assert head.aborted == []
        assert wait_until(lambda: len(head.aborted) == n)
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_request_at_once(stream: bool) -> None:
    head = ScriptedHead(endless)
    body = {"prompt": "x", "stop": "aaa", "stream": stream}
    with served(head) as url:
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        assert [found[1:] for found in head.finished] == [(FinishReason.STOP, 3)]
    assert head.aborted == []


def test_a_connection_is_used_again_after_every_kind_of_answer() -> None:
    head = ScriptedHead(lambda _: spoken("a", "b"))
    with served(head) as url, httpx.Client(base_url=url) as client:
        for round_ in range(20):
            stream = round_ % 2 == 0
            good = client.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert good.status_code == 200
            assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
            assert client.get("/health").status_code == 200
    assert head.aborted == []


def test_a_body_in_pieces_is_put_together_and_bounded() -> None:
    body = json.dumps({"prompt": "x" * 200}).encode()

    def pieces(data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), 50):
            yield data[at : at + 50]
            time.sleep(0.002)

    headers = {"content-type": "application/json"}
    with served(ScriptedHead(), ApiOptions(max_body_bytes=1000)) as url:
        path = f"{url}/v1/completions"
        assert httpx.post(path, content=pieces(body), headers=headers).status_code == 200
        huge = pieces(body + b" " * 2000)
        with httpx.Client() as client:
            try:
                response = client.post(path, content=huge, headers=headers)
            # The server has closed the connection before the client had sent all.
            except httpx.WriteError:
                return
        assert response.status_code == 413


@pytest.mark.long
def test_bodies_that_never_end_hold_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffer, "SMALL_BYTES", 0)
    # leaves room for eight of the largest bodies
    monkeypatch.setattr(shared_buffer, "MAX_LARGE_BYTES", 0)
    half = raw_request("/v1/completions", b"{" + b" " * 900, length=1000)
    with served(ScriptedHead(), ApiOptions(max_body_bytes=1000)) as url:
        links = [connected(url) for _ in range(8)]
        for link in links:
            link.sendall(half)
        refused = [link for link in links if is_answered(link)]
        assert len(refused) == 4
        assert all(link.recv(4096).startswith(b"HTTP/1.1 503") for link in refused)
        for link in links:
            link.close()
        assert wait_until(
            lambda: (
                httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 200}).status_code == 200
            )
        )


def is_answered(link: socket.socket) -> bool:
    return bool(select.select([link], [], [], 0.5)[0])


def test_a_declared_size_above_the_limit_is_refused_unread() -> None:
    with served(ScriptedHead(), ApiOptions(max_body_bytes=1000)) as url, connected(url) as link:
        link.sendall(raw_request("/v1/completions", b"{", length=10**15))
        assert link.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_comes_is_408() -> None:
    with served(ScriptedHead(), ApiOptions(body_timeout_s=0.2)) as url, connected(url) as link:
        link.sendall(raw_request("/v1/completions", b"{", length=100))
        assert link.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_while_sending_leaves_nothing_behind() -> None:
    head = ScriptedHead()
    with served(head) as url:
        with connected(url) as link:
            link.sendall(raw_request("/v1/completions", b"{", length=100))
            time.sleep(0.05)
        assert httpx.get(f"{url}/health").status_code == 200
    assert head.requests == []


def test_a_key_opens_the_door_and_names_the_tenant() -> None:
    head = ScriptedHead()
    head.explanations["ann/r-ann"] = {"tenant": "ann/salt", "placed": True}
    options = ApiOptions(api_keys=KEYS)
    body = {"prompt": "x", "cache_salt": "salt"}
    with served(head, options) as url, httpx.Client(base_url=url) as client:
        for header in (
            {},
            {"authorization": "Bearer"},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic key-of-ann"},
            {"authorization": b"Bearer k\xe9y"},
        ):
            response = client.post("/v1/completions", json=body, headers=header)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert "key-of" not in response.text
        ann = {"authorization": "Bearer key-of-ann"}
        bob = {"authorization": "bearer key-of-bob"}
        assert client.post("/v1/completions", json=body, headers=ann).status_code == 200
        assert client.post("/v1/completions", json=body, headers=bob).status_code == 200
        assert client.get("/explain/r-ann", headers=ann).status_code == 200
        assert client.get("/explain/r-ann", headers=bob).status_code == 404
        assert client.get("/v1/models").status_code == 401
        assert client.get("/cluster").status_code == 401
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
    assert [request.tenant for request in head.requests] == ["ann/salt", "bob/salt"]


def test_two_calls_with_one_request_id_are_two_requests() -> None:
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 0.2, *spoken("b")])
    headers = {"x-request-id": "same"}

    async def twice(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, headers=headers) as client:
            asks = (client.post("/v1/completions", json={"prompt": "x"}) for _ in range(2))
            return await asyncio.gather(*asks)

    with served(head) as url:
        responses = asyncio.run(twice(url))
    assert [response.headers["x-request-id"] for response in responses] == ["same", "same"]
    assert len({request.request_id for request in head.requests}) == 2


def test_ids_of_one_call_never_meet_those_of_another_call_or_tenant() -> None:
    head = ScriptedHead(lambda _: [*spoken("a", finish=None), 0.2, *spoken("b")])
    ann = {"authorization": "Bearer key-of-ann"}
    bob = {"authorization": "Bearer key-of-bob"}

    async def ask(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url) as client:
            asks = (
                client.post(
                    "/v1/completions",
                    json={"prompt": "x", "n": n},
                    headers={**key, "x-request-id": given_id},
                )
                for key in (ann, bob)
                for given_id, n in (("x", 3), ("x-1", 1), ("x", 2))
            )
            return await asyncio.gather(*asks)

    with served(head, ApiOptions(api_keys=KEYS)) as url:
        responses = asyncio.run(ask(url))
    assert [response.status_code for response in responses] == [200] * 6
    ids = [request.request_id for request in head.requests]
    assert len(set(ids)) == len(ids) == 12
    assert {"ann/x", "ann/x~1", "ann/x-1", "bob/x", "bob/x-1"} <= set(ids)
    assert {response.json()["id"] for response in responses} >= {"cmpl-x", "cmpl-x-1"}


def test_a_long_prompt_is_tokenised_off_the_loop() -> None:
    head = ScriptedHead()
    encode = head.tokenizer.encode
    began, go_on = threading.Event(), threading.Event()

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        began.set()
        assert go_on.wait(60)
        return encode(text, add_special_tokens)[:10]

    head.tokenizer.encode = slow  # type: ignore[method-assign]

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            long = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x" * 200}))
            while not began.is_set():
                await asyncio.sleep(0.005)
            assert (await client.get("/health")).status_code == 200
            assert not long.done()
            go_on.set()
            assert (await long).status_code == 200

    with served(head, ApiOptions(thread_above_chars=100)) as url:
        asyncio.run(ask(url))


def test_a_taken_port_says_so() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"127.0.0.1:{port} is in use"):
            listen("127.0.0.1", port)
