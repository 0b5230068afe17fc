"""Measures how much survives the death of all processes: hits of a skewed workload, and TTFT of a
long conversation.

Each case starts a server with one mixed instance, kills all of its processes (SIGKILL) and starts
it again with the same folders. With `ssd`, memory is lost and the disk stays, as in a power cut
that the disk's own buffers survive. With `keep_memory`, the machine stays up.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError
from moonpool_lab.demo.client import ClientResponse, CompletionClient
from moonpool_lab.demo.local_server import LocalServer

NUM_CONVERSATIONS = 24
NUM_REQUESTS = 96
TURN_TOKENS = 96
FIRST_TOKENS = 192
SKEW = 1.1
"""Exponent of the conversations' popularity."""
WARM_TOKENS = 600
GONE_S = 30.0
HEADROOM = 4


def bench_restart(model: str, prefix_tokens: int, repeats: int) -> dict[str, Any]:
    """Returns TTFT in seconds and hit tokens, before and after a restart, by what was kept."""
    return {
        "prefix_tokens": prefix_tokens,
        "ssd": _case(model, prefix_tokens, repeats, "ssd"),
        "keep_memory": _case(model, prefix_tokens, repeats, "keep_memory"),
    }


def _case(model: str, prefix_tokens: int, repeats: int, what: str) -> dict[str, Any]:
    tokens = HEADROOM * (prefix_tokens * repeats + NUM_REQUESTS * TURN_TOKENS + 2048)
    flags = [model, "--mixed", "1", "--slo-ttft", "600", "--admission", "none"]
    flags += ["--kv-tokens", str(tokens)]
    root = None if what == "ssd" else "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="moonpool-restart-", dir=root) as folder:
        path = str(Path(folder) / "kept")
        if what == "ssd":
            flags += ["--keep-memory", "off", "--ssd-tokens", str(tokens), "--ssd-folder", path]
        else:
            flags += ["--keep-memory", path]
        rng = random.Random(1)
        prefixes = [_tokens(rng, prefix_tokens) for _ in range(repeats)]
        with LocalServer(flags) as server:
            computed_s, talks, before = asyncio.run(_before(server.url, rng, prefixes))
            pids = server.worker_pids()
            server.kill()
            _wait_until_gone(pids)
        with LocalServer(flags) as server:
            again_s, after = asyncio.run(_after(server.url, rng, prefixes, talks))
    kept = sum(w * min(b, a) for (w, _), b, a in zip(talks, before, after, strict=True))
    return {
        "ttft_s": {"computed": min(computed_s), "after_restart": min(again_s)},
        "after_over_computed": min(again_s) / min(computed_s),
        "hits_left": kept / sum(w * b for (w, _), b in zip(talks, before, strict=True)),
        "hit_tokens": {"before": sum(before), "after": sum(after)},
        "all_ttft_s": {"computed": computed_s, "after_restart": again_s},
    }


Talk = tuple[int, list[int]]
"""How often a conversation was continued, and its tokens."""


async def _before(
    url: str, rng: random.Random, prefixes: Sequence[list[int]]
) -> tuple[list[float], list[Talk], list[int]]:
    client = CompletionClient(url)
    await _ask(client, _tokens(rng, WARM_TOKENS))
    computed_s = [(await _ask(client, prefix)).ttft_s for prefix in prefixes]
    talks = [_tokens(rng, FIRST_TOKENS) for _ in range(NUM_CONVERSATIONS)]
    uses = [0] * NUM_CONVERSATIONS
    weights = [1 / (rank + 1) ** SKEW for rank in range(NUM_CONVERSATIONS)]
    for number in rng.choices(range(NUM_CONVERSATIONS), weights, k=NUM_REQUESTS):
        if len(talks[number]) < FIRST_TOKENS + 10 * TURN_TOKENS:
            talks[number] = talks[number] + _tokens(rng, TURN_TOKENS)
        await _ask(client, talks[number], max_tokens=8)
        uses[number] += 1
    found = [(use, talk) for use, talk in zip(uses, talks, strict=True) if use]
    hits = [await _probe(client, talk) for _, talk in found]
    client.close()
    return computed_s, found, hits


async def _after(
    url: str, rng: random.Random, prefixes: Sequence[list[int]], talks: Sequence[Talk]
) -> tuple[list[float], list[int]]:
    client = CompletionClient(url)
    await _ask(client, _tokens(rng, WARM_TOKENS))  # a new process is slow at first
    again_s = []
    for prefix in prefixes:
        answer = await _ask(client, prefix + _tokens(rng, 16))
        if answer.cached_tokens < len(prefix) - 256:
            raise BenchError(f"only {answer.cached_tokens} tokens of the prefix were kept")
        again_s.append(answer.ttft_s)
    hits = [await _probe(client, talk) for _, talk in talks]
    client.close()
    return again_s, hits


async def _probe(client: CompletionClient, talk: list[int]) -> int:
    return (await _ask(client, talk, max_tokens=1)).cached_tokens


async def _ask(client: CompletionClient, prompt: list[int], max_tokens: int = 16) -> ClientResponse:
    answer = await client.complete(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if answer.error or not answer.token_instants_s:
        raise BenchError(f"a request failed: {answer.status} {answer.error}")
    return answer


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def _wait_until_gone(pids: Sequence[int]) -> None:
    deadline_s = time.monotonic() + GONE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline_s:
            raise BenchError("a killed worker did not end")
        time.sleep(0.05)
