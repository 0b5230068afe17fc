"""Measures how much time the KVCache pool saves: TTFT of a long prompt, computed and fetched.

One prefill and one decode instance. The prompt is computed once, so the decode instance holds its
blocks; then the prefill instance is killed, and its successor, which has no blocks, must fetch them
from the decode instance's memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

from benchmarks.errors import BenchError
from moonpool_lab.demo.client import ClientResponse, CompletionClient
from moonpool_lab.demo.local_server import LocalServer

WARM_TOKENS = 600
REJOIN_S = 60.0


def bench_cached(model: str, prefix_tokens: int, repeats: int) -> dict[str, Any]:
    """TTFT in seconds: computed, from the own cache, fetched. Each figure is the best of `repeats`,
    each with new tokens."""
    # An SLO that no step meets, so that no prompt is computed inline on the decode instance, which
    # has the blocks.
    arguments = [model, "--prefill", "1", "--decode", "1", "--slo-ttft", "600", "--slo-tbt", "1e-6"]
    arguments += ["--admission", "none", "--keep-memory", "off"]
    arguments += ["--kv-tokens", str(4 * (prefix_tokens + 2048)), "--threads", "1"]
    with LocalServer(arguments) as server:
        return asyncio.run(_measure(server, prefix_tokens, repeats))


async def _measure(server: LocalServer, prefix_tokens: int, repeats: int) -> dict[str, Any]:
    client = CompletionClient(server.url)
    rng = random.Random(1)
    found: dict[str, list[float]] = {"computed": [], "own_cache": [], "fetched": []}
    cached_tokens: dict[str, int] = {}
    await _ask(client, _tokens(rng, WARM_TOKENS))
    for _ in range(repeats):
        prefix = _tokens(rng, prefix_tokens)
        for name in ("computed", "own_cache"):
            answer = await _ask(client, prefix + _tokens(rng, 16))
            cached_tokens[name] = (await client.explain(answer.request_id))["cached_tokens"]
            found[name].append(answer.ttft_s)
        await _restart_prefill(client)
        await _ask(client, _tokens(rng, WARM_TOKENS))  # a new process is slow at first
        answer = await _ask(client, prefix + _tokens(rng, 16))
        fetched_tokens = (await client.explain(answer.request_id))["fetched_tokens"]
        cached_tokens["fetched"] = fetched_tokens
        if fetched_tokens < prefix_tokens - 256:
            raise BenchError(f"only {fetched_tokens} tokens were fetched, not the prefix")
        found["fetched"].append(answer.ttft_s)
    client.close()
    best = {name: min(values) for name, values in found.items()}
    return {
        "prefix_tokens": prefix_tokens,
        "fetched_tokens": cached_tokens["fetched"],
        "cached_tokens": cached_tokens,
        "ttft_s": best,
        "fetched_over_computed": best["fetched"] / best["computed"],
        "own_cache_over_computed": best["own_cache"] / best["computed"],
        "all_ttft_s": found,
    }


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


async def _ask(client: CompletionClient, prompt: list[int]) -> ClientResponse:
    answer = await client.complete(prompt, temperature=0, max_tokens=4, ignore_eos=True)
    if answer.error or not answer.token_instants_s:
        raise BenchError(f"a request failed: {answer.status} {answer.error}")
    return answer


async def _restart_prefill(client: CompletionClient) -> None:
    """Kills the prefill instance and waits for its successor."""
    old = await _prefill(client)
    assert old is not None
    os.kill(old["pid"], signal.SIGKILL)
    for _ in range(int(REJOIN_S / 0.1)):
        await asyncio.sleep(0.1)
        new = await _prefill(client)
        if new is not None and new["pid"] != old["pid"]:
            return
    raise BenchError("the killed prefill instance did not come back")


async def _prefill(client: CompletionClient) -> dict[str, Any] | None:
    instances = (await client.cluster())["instances"]
    return next((i for i in instances if i["role"] == "prefill"), None)
