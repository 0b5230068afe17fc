"""Measures the gain of each tier of the KVCache pool: one workload of conversations on four
clusters of real processes, each with one more tier than the previous one.

On the CPU an instance's engine computes in its own arena. So "engine memory" is a smaller arena
than "+ DRAM", of the size of an accelerator's memory. The conversations do not fit into memory, and
so many are open at a time that none stays there until its next turn.

The clusters take turns at every step of the same schedule: while one answers, the others idle. So
other work on the machine affects all of them equally, and an interrupted run still gives a fair
comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError
from moonpool.distributions import nearest_rank
from moonpool_lab.demo.client import ClientResponse, CompletionClient
from moonpool_lab.demo.local_server import LocalServer

INSTANCES = 2
OPENINGS = 4
OPENING_TOKENS = 256
FIRST_TOKENS = 256
TURN_TOKENS = 192
ANSWER_TOKENS = 4
WARM_TOKENS = 600
_VOCABULARY = 256


@dataclass(slots=True)
class TierSums:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    loaded_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)


def bench_tiers_live(
    model: str,
    sessions: int,
    turns: int,
    tokens: tuple[int, int, int],
    seconds: float,
    folder: Path | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """`tokens`: the sizes of the engine memory, DRAM and SSD of each instance. No step begins after
    this many `seconds` of answering. Raises BenchError, ServerError, ConnectionFailedError."""
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        servers = []
        for name, flags in tier_configs(*tokens):
            arguments = [model, *flags]
            if "--ssd-tokens" in flags:
                ssd = tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=folder)
                arguments += ["--ssd-folder", stack.enter_context(ssd)]
            servers.append(stack.enter_context(LocalServer(arguments)))
            names.append(name)
        urls = [server.url for server in servers]
        sums, skipped = asyncio.run(_converse(urls, draw_schedule(sessions, turns), seconds))
    rows: list[dict[str, Any]] = []
    for name, one, before in zip(names, sums, [None, *sums], strict=False):
        row = {"tiers": name, **_row(one), **saved_by_tier(one, before)}
        rows.append(row)
        echo(
            f"{name:<16} hit {row['hit_ratio']:6.1%} (others {row['others']:5.1%}, SSD"
            f" {row['ssd']:5.1%}), TTFT {row['mean_ttft_s']:.3f} s, P99 {row['p99_ttft_s']:.2f};"
            f" saves {row['saved_s']:+.3f} s +- {row['saved_error_s']:.3f}"
        )
    return {
        "model": model,
        "sessions": sessions,
        "turns": turns,
        "engine_tokens": tokens[0],
        "kv_tokens": tokens[1],
        "ssd_tokens": tokens[2],
        "instances": INSTANCES,
        "every_tier_pays": all(row["saved_s"] > 0 for row in rows[1:]),
        "skipped_requests": skipped,
        "rows": rows,
    }


def tier_configs(
    engine_tokens: int, kv_tokens: int, ssd_tokens: int
) -> Iterator[tuple[str, list[str]]]:
    common = ["--prefill", "0", "--decode", "0", "--mixed", str(INSTANCES), "--threads", "1"]
    common += ["--admission", "none", "--slo-ttft", "600", "--slo-tbt", "60"]
    dram = [*common, "--kv-tokens", str(kv_tokens)]
    alone = ["--placement", "cache-aware"]
    yield "engine memory", [*common, "--kv-tokens", str(engine_tokens), *alone]
    yield "+ DRAM", [*dram, *alone]
    pooled = [*dram, "--placement", "kvcache-centric"]
    yield "+ remote DRAM", pooled
    yield "+ SSD", [*pooled, "--ssd-tokens", str(ssd_tokens)]


def draw_schedule(sessions: int, turns: int) -> list[list[list[int]]]:
    """Returns prompts in steps, with one prompt per instance. The prompts of a step are next turns
    of different conversations. The schedule is the same for every cluster."""
    rng = random.Random(0)
    openings = [_draw(rng, OPENING_TOKENS) for _ in range(OPENINGS)]
    talks = [list(rng.choice(openings)) for _ in range(sessions)]
    said = [0] * sessions
    steps = []
    while open_ := [number for number in range(sessions) if said[number] < turns]:
        step = []
        for number in rng.sample(open_, min(INSTANCES, len(open_))):
            talks[number] += _draw(rng, TURN_TOKENS if said[number] else FIRST_TOKENS)
            said[number] += 1
            step.append(list(talks[number]))
        steps.append(step)
    return steps


async def _converse(
    urls: list[str], steps: list[list[list[int]]], seconds: float
) -> tuple[list[TierSums], int]:
    """Returns each cluster's results, and the number of requests for which there was no time."""
    clients = [CompletionClient(url) for url in urls]
    rng, sums = random.Random(1), [TierSums() for _ in urls]
    try:
        for client in clients:
            for _ in range(2 * INSTANCES):
                await _ask(client, _draw(rng, WARM_TOKENS))
        end_s = time.monotonic() + seconds
        for number, step in enumerate(steps):
            if time.monotonic() > end_s:
                return sums, sum(map(len, steps[number:]))
            for client, one in zip(clients, sums, strict=True):
                answers = await asyncio.gather(*(_ask(client, prompt) for prompt in step))
                for answer in answers:
                    _add(one, answer, await client.explain(answer.request_id))
    finally:
        for client in clients:
            client.close()
    return sums, 0


async def _ask(client: CompletionClient, prompt: list[int]) -> ClientResponse:
    answer = await client.complete(prompt, temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    if answer.error or not answer.token_instants_s:
        raise BenchError(f"a request failed: {answer.status} {answer.error}")
    return answer


def _add(sums: TierSums, answer: ClientResponse, explained: dict[str, Any]) -> None:
    sums.prompt_tokens += answer.prompt_tokens
    sums.cached_tokens += explained["cached_tokens"]
    sums.fetched_tokens += explained["fetched_tokens"]
    sums.loaded_tokens += explained["loaded_tokens"]
    sums.ttfts_s.append(answer.ttft_s)


def _row(sums: TierSums) -> dict[str, Any]:
    total = max(sums.prompt_tokens, 1)
    ordered = sorted(sums.ttfts_s)
    return {
        "requests": len(ordered),
        "hit_ratio": round(sums.cached_tokens / total, 4),
        "others": round(sums.fetched_tokens / total, 4),
        "ssd": round(sums.loaded_tokens / total, 4),
        "mean_ttft_s": round(statistics.fmean(ordered), 4),
        "p99_ttft_s": round(nearest_rank(ordered, 0.99), 4),
    }


def saved_by_tier(sums: TierSums, before: TierSums | None) -> dict[str, float]:
    """Returns the seconds of TTFT that the tier saves per request, compared with the same requests
    without it."""
    if before is None:
        return {"saved_s": 0.0, "saved_error_s": 0.0}
    saved_s = [b - a for a, b in zip(sums.ttfts_s, before.ttfts_s, strict=True)]
    error_s = statistics.stdev(saved_s) / len(saved_s) ** 0.5 if len(saved_s) > 1 else 0.0
    return {"saved_s": round(statistics.fmean(saved_s), 4), "saved_error_s": round(error_s, 4)}


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]
