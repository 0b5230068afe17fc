"""Tests processes that read large bodies: responses and errors are the same as without them, and
the event loop is not blocked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import httpx
import pytest
import uvloop
from scripted_head import ScriptedHead, served

from moonpool.api import body_pool, turns
from moonpool.api.serving_backend import ApiOptions, RequestRefused
from tests.processes import children

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/chat/completions", {"messages": [USER], "n": 2, "temperature": 0.5, "seed": 7}),
    ("/v1/chat/completions", {"messages": [USER], "response_format": SCHEMA}),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [USER], "temperature": 9}),
    ("/v1/chat/completions", {"messages": [USER], "logit_bias": {"7": 1.5}}),
    ("/v1/completions", {"prompt": ["ab", "c"], "echo": True, "stop": "q", "max_tokens": 9}),
    ("/v1/completions", {"prompt": [1, 2, 3]}),
    ("/v1/completions", {"prompt": [1, 2, 999]}),
    ("/v1/completions", {"prompt": "x" * 300}),
    ("/v1/completions", {"prompt": "x", "model": "other"}),
    ("/v1/responses", {"input": "Hello", "instructions": "Be brief", "metadata": {"a": "b"}}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 9, "model": "fake"}),
    ("/v1/messages/count_tokens", {"messages": [USER], "model": "fake"}),
    ("/v1/responses/input_tokens", {"input": "Hello", "model": "fake"}),
    ("/tokenize", {"prompt": "é", "return_token_strs": True}),
    ("/detokenize", {"tokens": [72, 105]}),
    ("/detokenize", {"tokens": [-1]}),
]


def shape(response: httpx.Response) -> Any:
    """Returns the response without the fields that differ from call to call."""
    found = response.json()
    for name in ("id", "created", "created_at", "completed_at"):
        found.pop(name, None)
    for item in found.get("output", ()):
        item.pop("id", None)
    return response.status_code, found


def ask_all(options: ApiOptions) -> tuple[list[Any], list[Any]]:
    """Returns the responses, and the requests that reached the head."""
    head = ScriptedHead()
    with served(head, options) as url, httpx.Client(base_url=url, timeout=60) as client:
        responses = [shape(client.post(path, json=body)) for path, body in CALLS]
    requests = [
        (tuple(r.token_ids), r.sampling if "seed" in str(r) and r.sampling.seed < 99 else r.slo)
        for r in head.requests
    ]
    return responses, requests


def test_another_process_reads_every_body_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ask_all(ApiOptions())
    monkeypatch.setattr(body_pool, "LARGE_BYTES", 0)
    there = ask_all(ApiOptions(tokenizer="bytes"))
    assert there[0] == here[0]
    assert there[1] == here[1]
    assert {status for status, _ in here[0]} == {200, 400, 404}


@pytest.mark.long
def test_the_loop_turns_while_a_huge_body_is_read_and_its_deadline_holds() -> None:
    huge = json.dumps({"tokens": [7] * 3_000_000}).encode()

    async def ask(url: str) -> None:
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            late = client.post(
                "/detokenize", content=huge, headers=headers | {"x-request-timeout-ms": "50"}
            )
            assert (await late).status_code == 504
            whole = asyncio.create_task(client.post("/detokenize", content=huge, headers=headers))
            longest_s = turns = 0.0
            while not whole.done():
                asked_s = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                longest_s, turns = max(longest_s, time.monotonic() - asked_s), turns + 1
            answer = await whole
            assert answer.status_code == 200
            assert len(answer.json()["prompt"]) == 3_000_000
            assert turns > 3, f"the longest of them took {longest_s} s"

    with served(ScriptedHead(), ApiOptions(tokenizer="bytes")) as url:
        asyncio.run(ask(url))


def test_tenants_take_turns_and_what_waits_is_bounded() -> None:
    async def run() -> None:
        places = turns.FairTurns("things", "too_many", most_waiting=40)
        order: list[str] = []

        async def take(tenant: str, name: str) -> None:
            async with places.turn(tenant):
                await asyncio.sleep(0.001)
                order.append(name)

        names = [("a", f"a{n}") for n in range(30)] + [("b", f"b{n}") for n in range(2)]
        tasks = [asyncio.create_task(take(*name)) for name in names]
        await asyncio.sleep(0)
        tasks[5].cancel()  # this client leaves while it waits
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, RequestRefused) for one in found) == 9
        assert order[0] == "a0"
        assert order.index("b0") < 3 and order.index("b1") < 5
        assert "a5" not in order
        again = [take("c", f"c{n}") for n in range(1 + 20)]
        # passes only if all places are free again
        await asyncio.wait_for(asyncio.gather(*again), 60)

    asyncio.run(run())


def test_a_body_for_a_process_whose_end_is_not_known_yet_is_read() -> None:
    """The pipe to the process breaks before the head learns that the process has ended."""
    body, others = json.dumps({"tokens": [72] * 50_000}).encode(), children()

    async def run() -> None:
        reader = body_pool.BodyReader(ScriptedHead(), ApiOptions(tokenizer="bytes"))
        await reader.respond("detokenize", body, "", 60.0)
        [pid] = children() - others
        os.kill(pid, signal.SIGKILL)
        while pid in children():  # blocks the event loop until the process has ended
            time.sleep(0.001)
        assert len(await reader.respond("detokenize", body, "", 60.0)) > 50_000
        reader.close()

    uvloop.run(run())


def test_a_process_that_dies_is_replaced() -> None:
    body, others = json.dumps({"tokens": [72] * 50_000}), children()

    async def run() -> None:
        head = ScriptedHead()
        reader = body_pool.BodyReader(head, ApiOptions(tokenizer="bytes"))
        for _ in range(2):
            found = await reader.respond("detokenize", body.encode(), "", 60.0)
            assert len(found) > 50_000
            [pid] = children() - others
            os.kill(pid, signal.SIGKILL)
        reader.close()

    asyncio.run(run())
