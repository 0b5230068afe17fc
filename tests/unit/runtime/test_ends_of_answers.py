"""Tests that head, record and counters agree with the client about the end of an answer, however it
ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from played_head import Burst, PlayedCluster, Step, moved, played

from moonpool.protocol.messages import AttemptSpec
from moonpool.types import FinishReason

ENDINGS = ("vllm:request_success_total", "moonpool:requests_")


def ends(before: Any, after: Any) -> dict[str, float]:
    return {name: n for name, n in moved(before, after).items() if name.startswith(ENDINGS)}


def slowly(attempt: AttemptSpec) -> Sequence[Step]:
    """Sends a letter each 10 ms, up to the limit."""
    left = attempt.sampling.max_tokens - (len(attempt.token_ids) - attempt.num_prompt_tokens)
    steps: list[Step] = [0.0]
    for number in range(left):
        last = FinishReason.LENGTH if number == left - 1 else None
        steps += [0.01, Burst("abcdefgh"[number % 8], last)]
    return steps


def at_once(attempt: AttemptSpec) -> Sequence[Step]:
    return [0.0, Burst("ab"), Burst("cdef", FinishReason.LENGTH)]


async def whole(cluster: PlayedCluster, path: str, body: dict[str, Any]) -> httpx.Response:
    return await cluster.http.post(path, json=body)


CALLS = {
    "/v1/completions": ({"prompt": "Hi"}, "stop"),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, "stop"),
    "/v1/messages": (
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
        "stop_sequences",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("play", [slowly, at_once])
def test_a_stop_string_is_a_success(path: str, stream: bool, play: Any) -> None:
    body, name = CALLS[path]

    async def run() -> None:
        async with played(play) as cluster:
            before = cluster.samples()
            request = {**body, "max_tokens": 40, "stream": stream, name: ["c"]}
            response = await whole(cluster, path, request)
            assert response.status_code == 200, response.text
            after = cluster.samples()
            assert ends(before, after) == {"vllm:request_success_total{finished_reason=stop}": 1.0}
            grown = moved(before, after)
            assert grown["vllm:request_generation_tokens_sum"] == 3
            assert grown["vllm:e2e_request_latency_seconds_count"] == 1
            assert grown["vllm:inter_token_latency_seconds_count"] == 2
            name_of = response.headers["x-request-id"]
            record = cluster.head.explain(name_of)
            assert record is not None
            assert (record["outcome"], record["generated_tokens"]) == ("stop", 3)
            if not stream and path != "/v1/messages":
                assert "decode=" in response.headers["x-moonpool-timing"]
            assert not cluster.conductor.requests

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("text", ["abc", "ababc"])
def test_a_stop_string_in_the_engines_last_burst_decides(text: str) -> None:
    """The engine's reason is the limit, but the client must get the stop string as the reason."""

    async def run() -> None:
        async with played(lambda _: [0.0, Burst(text, FinishReason.LENGTH)]) as cluster:
            body = {"prompt": "Hi", "max_tokens": 5, "stop": "b"}
            response = await whole(cluster, "/v1/completions", body)
            choice = response.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
            grown = moved({}, cluster.samples())
            assert grown["vllm:request_success_total{finished_reason=stop}"] == 1
            assert "vllm:request_success_total{finished_reason=length}" not in grown
            assert grown["vllm:request_generation_tokens_sum"] == 2

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_a_client_that_leaves_is_an_abort_unless_its_answer_was_complete() -> None:
    async def run() -> None:
        async with played(slowly) as cluster:
            body = {"prompt": "Hi", "max_tokens": 40}
            call = asyncio.create_task(whole(cluster, "/v1/completions", body))
            while not any(t.generated for t in cluster.conductor.requests.values()):
                await asyncio.sleep(0.002)
            before = cluster.samples()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert ends(before, cluster.samples()) == {
                "moonpool:requests_failed_total{reason=abort}": 1.0
            }

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_answers_that_a_stop_of_the_server_cuts_are_no_departed_clients() -> None:
    async def run() -> None:
        async with played(slowly) as cluster:
            before = cluster.samples()
            body = {"prompt": "Hi", "max_tokens": 40}
            call = asyncio.create_task(whole(cluster, "/v1/completions", body))
            while not any(t.generated for t in cluster.conductor.requests.values()):
                await asyncio.sleep(0.002)
            cluster.head.end_answers("server_stopping", "it stops")
            assert (await call).status_code == 503
            assert ends(before, cluster.samples()) == {
                "moonpool:requests_failed_total{reason=server_stopping}": 1.0
            }
            cluster.head.refuse_new()
            assert (await whole(cluster, "/v1/completions", body)).status_code == 503
            assert ends(before, cluster.samples()) == {
                "moonpool:requests_failed_total{reason=server_stopping}": 1.0,
                "moonpool:requests_rejected_total{reason=server_stopping}": 1.0,
            }

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("n", [1, 3])
def test_hidden_output_and_scores_are_successes(n: int) -> None:
    async def run() -> None:
        async with played(lambda _: [0.0, Burst("a", FinishReason.LENGTH)]) as cluster:
            body = {"prompt": "Hi", "max_tokens": 0, "echo": True, "n": n, "stop": "a"}
            response = await whole(cluster, "/v1/completions", body)
            assert response.json()["usage"]["completion_tokens"] == 0, response.text
            assert ends({}, cluster.samples()) == {
                "vllm:request_success_total{finished_reason=length}": float(n)
            }

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_a_form_that_was_lost_is_a_failure() -> None:
    async def run() -> None:
        async with played(lambda _: [0.0, Burst("xy", FinishReason.STOP)]) as cluster:
            body = {"prompt": "Hi", "structured_outputs": {"regex": "a+b"}}
            response = await whole(cluster, "/v1/completions", body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "form_lost")
            assert ends({}, cluster.samples()) == {
                "moonpool:requests_failed_total{reason=form_lost}": 1.0
            }

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_an_embedding_is_a_success_without_tokens() -> None:
    async def run() -> None:
        burst = Burst("", FinishReason.STOP, embedding=b"\0\0\x80?" + b"\0" * 12)
        async with played(lambda _: [0.0, burst], embedding_size=4) as cluster:
            response = await whole(cluster, "/v1/embeddings", {"input": ["Hi", "there"]})
            assert response.status_code == 200, response.text
            grown = moved({}, cluster.samples())
            assert ends({}, cluster.samples()) == {
                "vllm:request_success_total{finished_reason=stop}": 2.0
            }
            assert grown["vllm:prompt_tokens_total"] == 7
            assert "vllm:generation_tokens_total" not in grown
            assert "vllm:request_generation_tokens_sum" not in grown

    asyncio.run(asyncio.wait_for(run(), 60.0))
