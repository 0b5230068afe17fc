"""Measures the head's CPU time per request and per token: HTTP, tokenising, Conductor and
streaming.

A real cluster serves a tiny model; the head's own CPU time is read from the kernel before and
after. Two loads, with few and with many tokens per answer, separate the cost of a request from that
of a token.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx

from benchmarks.suite.live.relay import relay_cpu_s
from moonpool_lab.demo.local_server import LocalServer

MODEL = "random:hidden=32,layers=1,heads=2,kv_heads=1,inter=32,vocab=300"
SHAPES = ((1000, 2), (100, 258))  # (requests, tokens of each)
ROUNDS = 3  # the best counts


def bench_head(concurrencies: tuple[int, ...], prompt_chars: int = 500) -> dict[str, Any]:
    """Milliseconds of CPU per request and microseconds per token, streamed to real sockets.

    `floor_us_per_token`: what a bare relay of one message to another socket costs here.
    """
    arguments = [MODEL, "--prefill", "1", "--decode", "1", "--slo-ttft", "600", "--slo-tbt", "60"]
    with LocalServer([*arguments, "--kv-tokens", "65536"]) as server:
        found: dict[str, Any] = {
            f"concurrency_{n}": asyncio.run(_measure(server, n, prompt_chars))
            for n in concurrencies
        }
    return found | {"prompt_chars": prompt_chars, "floor_us_per_token": 1e6 * relay_cpu_s(cpu_s)}


async def _measure(server: LocalServer, concurrency: int, prompt_chars: int) -> dict[str, Any]:
    spent: list[tuple[int, int, float]] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        await _load(client, 50, 8, concurrency, prompt_chars)
        for requests, tokens in SHAPES:
            rounds_s = []
            for _ in range(ROUNDS):
                began_s = cpu_s(server.pid)
                await _load(client, requests, tokens, concurrency, prompt_chars)
                rounds_s.append(cpu_s(server.pid) - began_s)
            spent.append((requests, tokens, min(rounds_s)))
    (n1, t1, s1), (n2, t2, s2) = spent
    per_1, per_2 = s1 / n1, s2 / n2
    token_s = (per_2 - per_1) / (t2 - t1)
    return {
        "cpu_ms_per_request": 1e3 * (per_1 - t1 * token_s),
        "cpu_us_per_token": 1e6 * token_s,
        "cpu_s": {f"{n}x{t}": s for n, t, s in spent},
    }


async def _load(
    client: httpx.AsyncClient, requests: int, tokens: int, concurrency: int, prompt_chars: int
) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        prompt = f"{number:06d}" + "x" * prompt_chars
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        async with gate, client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass

    await asyncio.gather(*(one(i) for i in range(requests)))


def cpu_s(pid: int) -> float:
    """User and system CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
