"""Sends a workload's calls to vLLMs in order, and times each answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

import httpx
import msgspec

from benchmarks.suite.pool_in_vllm.workload import PoolCall
from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool_lab.trial.answer import Answer, AnswerReceiver

PATH = "/v1/completions"
ALTERNATIVES = 5
FRESH = b"Connection: close\r\n"
"""A new connection for each call: vLLM closes idle connections, so a request on a kept one could
fail, which would count against the pool."""
_COUNTER = r"^vllm:{}_total\{{.*?\}} (\S+)$"


class Played(msgspec.Struct, frozen=True):
    """`Played` is one call with its answer. `ttft_s` is 0 where no token came."""

    call: PoolCall
    answer: Answer
    ttft_s: float


class TimedReceiver(AnswerReceiver):
    """Notes when the first token came: a completion's stream begins with it."""

    first_s = 0.0

    def on_body(self, data: bytes, now_s: float) -> None:
        if not self.first_s and self.status == 200:
            self.first_s = now_s
        super().on_body(data, now_s)


async def play(
    urls: Sequence[str], model: str, calls: Sequence[PoolCall], concurrency: int, timeout_s: float
) -> tuple[list[Played], float]:
    """Sends each call to the vLLM of its turn, `concurrency` at a time. Returns the answers and the
    total seconds. A turn waits for the turn before it."""
    clients = [HttpClient(url) for url in urls]
    ended = {(call.session, call.turn): asyncio.Event() for call in calls}
    found: list[Played] = []
    left = iter(calls)

    async def ask_on() -> None:
        for call in left:
            before = ended.get((call.session, call.turn - 1))
            if before is not None:
                await before.wait()
            client = clients[call.target % len(clients)]
            found.append(await _ask(client, model, call, True, 0, timeout_s))
            ended[call.session, call.turn].set()

    began_s = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(ask_on())
    finally:
        for client in clients:
            client.close()
    return found, time.monotonic() - began_s


async def ask_alone(
    urls: Sequence[str], model: str, calls: Sequence[PoolCall], timeout_s: float
) -> list[Played]:
    """Sends the calls with logprobs, one after another at each server. No server gets two of these
    calls at once."""

    async def ask_all(url: str, mine: Sequence[PoolCall]) -> list[Played]:
        client = HttpClient(url)
        try:
            return [
                await _ask(client, model, call, False, ALTERNATIVES, timeout_s) for call in mine
            ]
        finally:
            client.close()

    shares = [ask_all(url, calls[at :: len(urls)]) for at, url in enumerate(urls)]
    return [played for share in await asyncio.gather(*shares) for played in share]


async def _ask(
    client: HttpClient,
    model: str,
    call: PoolCall,
    streamed: bool,
    logprobs: int,
    timeout_s: float,
) -> Played:
    receiver = TimedReceiver(streamed)
    body = call.question.body(model, streamed, logprobs)
    sent_s = time.monotonic()
    failure = ""
    try:
        async with asyncio.timeout(timeout_s):
            await client.post(PATH, body, receiver, FRESH)
    except TimeoutError:
        answer = receiver.end(f"no end within {timeout_s:g} s")
        answer.outcome, answer.detail = "hung", f"no end within {timeout_s:g} s"
        return Played(call, answer, 0.0)
    except ConnectionFailedError as error:
        failure = str(error)
    answer = receiver.end(failure)
    return Played(call, answer, receiver.first_s - sent_s if receiver.first_s else 0.0)


class CacheCounts(msgspec.Struct, frozen=True):
    """Prompt tokens of vLLMs since their start: looked up, found in their KVCache, and found in a
    pool."""

    asked: float = 0.0
    local: float = 0.0
    external: float = 0.0

    def since(self, before: CacheCounts) -> CacheCounts:
        return CacheCounts(
            self.asked - before.asked, self.local - before.local, self.external - before.external
        )


def cache_counts(urls: Sequence[str]) -> CacheCounts:
    """Raises httpx.HTTPError."""
    texts = [httpx.get(f"{url}/metrics", timeout=60).text for url in urls]
    names = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits")
    return CacheCounts(*(_sum(name, texts) for name in names))


def _sum(name: str, texts: Sequence[str]) -> float:
    return sum(float(n) for text in texts for n in re.findall(_COUNTER.format(name), text, re.M))


def tokenize(url: str, model: str, text: str) -> list[int]:
    """Returns the token ids of a text by this vLLM's tokenizer. Raises httpx.HTTPError."""
    body = {"model": model, "prompt": text}
    answer = httpx.post(f"{url}/tokenize", json=body, timeout=60)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["tokens"]
    return tokens
