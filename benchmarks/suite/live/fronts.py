"""The same two vLLMs behind different fronts: one that sends each request to whichever has less
under way, vLLM's own router by two of its policies, and moonpool.

Several users hold conversations at once, and each turn repeats the conversation so far. The vLLMs
run all the time, with one core each. The fronts take turns with different prompts, and the vLLMs
drop their prefixes in between, so no cache helps the next front. Hit ratios are those that the
vLLMs report.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx

from benchmarks.suite.live.vllm_router import RouterServer
from benchmarks.suite.live.vllm_server import CPU_BLOCK_TOKENS
from benchmarks.suite.live.vllm_shapes import FrontServer, reset_prefix_cache
from benchmarks.suite.routers.engines import EngineFleet, RunningEngine, start_engines
from moonpool.distributions import nearest_rank
from moonpool.types import Struct
from moonpool_lab.demo.client import CompletionClient
from moonpool_lab.demo.local_server import LocalServer, ServerError

LEAST_BUSY = "least busy"
OPENING_TOKENS = 256
TURN_TOKENS = 96
ANSWER_TOKENS = 16
WORDS = range(5, 900)
WARM_TURNS = 2
MEASURED_S = 180.0
_COUNTER = r"^vllm:prefix_cache_{}_total\{{.*?\}} (\S+)$"
Say = Callable[[str], None]
Start = Callable[[], AbstractContextManager[str]]


class FrontWorkload(Struct, frozen=True):
    """The options of the vLLMs, and the requests that they get."""

    model: str
    kv_tokens: int = 32_768
    chunk_tokens: int = 512
    users: int = 6
    turns: int = 6
    think_s: float = 0.5  # mean, between an answer and the next turn

    @property
    def longest_tokens(self) -> int:
        return OPENING_TOKENS + self.turns * (TURN_TOKENS + ANSWER_TOKENS) + ANSWER_TOKENS


def bench_fronts(
    python: str, router_python: str, talk: FrontWorkload, rounds: int, say: Say
) -> dict[str, Any]:
    """Rows by front, each the median of its rounds. `router_python`: the Python of an installation
    of vllm-router; "" leaves it out. Raises ServerError, httpx.HTTPError."""
    found: dict[str, list[dict[str, float]]] = {}
    sizes = talk.kv_tokens, talk.chunk_tokens, talk.longest_tokens
    fleet = EngineFleet(talk.model, python, (1.0, 1.0), *sizes)
    with start_engines(fleet) as engines:
        fronts = _fronts(python, router_python, talk, engines)
        for number in range(rounds):
            for place, (name, start) in enumerate(fronts.items()):
                for engine in engines:
                    reset_prefix_cache(engine.url)
                with start() as url:
                    asyncio.run(_converse(url, talk, WARM_TURNS, -1 - place - 8 * number))
                    before = _cache_counts(engines)
                    seed = 1 + place + len(fronts) * number
                    figures = asyncio.run(_converse(url, talk, talk.turns, seed))
                    asked, hit = (
                        b - a for a, b in zip(before, _cache_counts(engines), strict=True)
                    )
                figures["hit_ratio"] = hit / asked if asked else 0.0
                found.setdefault(name, []).append(figures)
                say(f"{number + 1}: {name:<24} {_words(figures)}")
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }
    for name, row in medians.items():
        say(f"median: {name:<24} {_words(row)}")
    return {"fronts": medians, "rounds": found}


async def _converse(url: str, talk: FrontWorkload, turns: int, seed: int) -> dict[str, float]:
    client = CompletionClient(url)
    began_s = time.monotonic()
    try:
        users = (
            _user(client, talk, turns, random.Random(f"{seed}/{u}")) for u in range(talk.users)
        )
        ttfts_s = sorted(ttft_s for said in await asyncio.gather(*users) for ttft_s in said)
    finally:
        client.close()
    return {
        "requests": len(ttfts_s),
        "seconds": time.monotonic() - began_s,
        "ttft_mean_s": statistics.fmean(ttfts_s),
        "ttft_p90_s": nearest_rank(ttfts_s, 0.9),
    }


async def _user(
    client: CompletionClient, talk: FrontWorkload, turns: int, rng: random.Random
) -> list[float]:
    """Times to the first tokens of a conversation."""
    said = [rng.choice(WORDS) for _ in range(OPENING_TOKENS)]
    ttfts_s = []
    for _ in range(turns):
        await asyncio.sleep(rng.expovariate(1 / talk.think_s))
        said += [rng.choice(WORDS) for _ in range(TURN_TOKENS)]
        answer = await client.complete(
            said, temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True
        )
        if answer.error or not answer.finish_reason:
            raise ServerError(f"a request failed: {answer.status} {answer.error}")
        if answer.token_instants_s:  # random tokens may have no text, and then no time of arrival
            ttfts_s.append(answer.ttft_s)
        said += [rng.choice(WORDS) for _ in range(ANSWER_TOKENS)]  # as if it had been that
    return ttfts_s


def _fronts(
    python: str,
    router_python: str,
    talk: FrontWorkload,
    engines: Sequence[RunningEngine],
) -> dict[str, Start]:
    urls, places = [engine.url for engine in engines], [engine.place for engine in engines]

    def ours(known: list[str]) -> Start:
        words = [word for place in known for word in ("--vllm", place)]
        return lambda: _measured_url_of(
            LocalServer([talk.model, *words, "--admission", "none"]), len(known)
        )

    def router(*flags: str) -> Start:
        return lambda: _url_of(RouterServer(router_python, urls, flags))

    routers: dict[str, Start] = {}
    if router_python:
        events = RouterServer.event_flags(talk.model, places, CPU_BLOCK_TOKENS)
        routers = {
            "vllm-router, cache_aware": router("--policy", "cache_aware"),
            "vllm-router, kv_aware": router("--policy", "kv_aware", *events),
        }
    return {
        LEAST_BUSY: lambda: _url_of(FrontServer(python, ["turns", *urls])),
        **routers,
        "moonpool, cache assumed": ours(urls),
        "moonpool, KV events": ours(places),
    }


@contextmanager
def _measured_url_of(server: LocalServer, num_engines: int) -> Iterator[str]:
    """Gives the URL of a moonpool once it has measured the times of all engines, which it does
    while it serves."""
    with server:
        until_s = time.monotonic() + MEASURED_S
        while sum("measured http" in line for line in server.log_lines()) < num_engines:
            if time.monotonic() > until_s:
                raise ServerError(f"the vLLMs were not measured: {server.last_words()}")
            time.sleep(0.2)
        yield server.url


@contextmanager
def _url_of(server: LocalServer) -> Iterator[str]:
    with server:
        yield server.url


def _cache_counts(engines: Sequence[RunningEngine]) -> tuple[float, float]:
    """Returns the prompt tokens that both vLLMs looked up, and those that were cached."""
    texts = [httpx.get(f"{engine.url}/metrics", timeout=30).text for engine in engines]
    asked, hit = (
        sum(float(n) for text in texts for n in re.findall(_COUNTER.format(name), text, re.M))
        for name in ("queries", "hits")
    )
    return asked, hit


def _words(row: dict[str, float]) -> str:
    return (
        f"hits {row['hit_ratio']:.3f}, TTFT {row['ttft_mean_s']:.3f} s (P90"
        f" {row['ttft_p90_s']:.3f}), {row['requests']:.0f} turns in {row['seconds']:.1f} s"
    )
