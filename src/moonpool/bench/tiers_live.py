"""What each tier of the KVCache pool adds, live: one conversation workload, a cluster of real
processes for each row, with one tier more at a time.

On the CPU an instance's engine computes in its own arena, so "engine memory" and "DRAM" are one
tier here: own memory, + other instances' memory, + SSD. The conversations are more than all memory
holds, and too many are open at a time for any of them to stay there until its next turn.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.bench.client import Answer, CompletionClient
from moonpool.bench.local_server import LocalServer

INSTANCES = 2
OPENINGS = 4
OPENING_TOKENS = 256
FIRST_TOKENS = 256
TURN_TOKENS = 192
ANSWER_TOKENS = 4
WARM_TOKENS = 600
_VOCABULARY = 256


class LiveTiersError(RuntimeError):
    """A request failed; the text says how."""


@dataclass(slots=True)
class _Talk:
    """One conversation: what has been said, and how many turns are left."""

    tokens: list[int]
    turns: list[list[int]]
    busy: bool = False


@dataclass(slots=True)
class _Sums:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    loaded_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)


def bench_tiers_live(
    model: str,
    sessions: int,
    turns: int,
    kv_tokens: int,
    ssd_tokens: int,
    folder: Path | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Raises LiveTiersError, ServerError, httpx.HTTPError."""
    rows = []
    for name, flags in _configs(kv_tokens, ssd_tokens):
        with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=folder) as ssd:
            arguments = [model, *flags]
            if "--ssd-tokens" in flags:
                arguments += ["--ssd-folder", ssd]
            with LocalServer(arguments) as server:
                sums = asyncio.run(_converse(server.url, _talks(sessions, turns)))
        row = {"tiers": name, **_row(sums)}
        rows.append(row)
        echo(
            f"{name:<18} hit {row['hit_ratio']:6.1%} (others {row['others']:5.1%}, SSD"
            f" {row['ssd']:5.1%}), TTFT {row['mean_ttft_s']:.3f} s, P99 {row['p99_ttft_s']:.2f}"
        )
    times = [row["mean_ttft_s"] for row in rows]
    pays = all(later < sooner for sooner, later in itertools.pairwise(times))
    return {
        "model": model,
        "sessions": sessions,
        "turns": turns,
        "kv_tokens": kv_tokens,
        "ssd_tokens": ssd_tokens,
        "instances": INSTANCES,
        "every_tier_pays": pays,
        "rows": rows,
    }


def _configs(kv_tokens: int, ssd_tokens: int) -> Iterator[tuple[str, list[str]]]:
    common = ["--prefill", "0", "--decode", "0", "--mixed", str(INSTANCES), "--threads", "1"]
    common += ["--kv-tokens", str(kv_tokens), "--admission", "none"]
    common += ["--slo-ttft", "600", "--slo-tbt", "60"]
    yield "nothing kept", [*common, "--no-enable-prefix-caching"]
    yield "own memory", [*common, "--placement", "cache-aware"]
    pooled = [*common, "--placement", "kvcache-centric"]
    yield "+ others' memory", pooled
    yield "+ SSD", [*pooled, "--ssd-tokens", str(ssd_tokens)]


def _talks(sessions: int, turns: int) -> list[_Talk]:
    """The same for every row."""
    rng = random.Random(0)
    openings = [_draw(rng, OPENING_TOKENS) for _ in range(OPENINGS)]
    talks = []
    for _ in range(sessions):
        first = _draw(rng, FIRST_TOKENS)
        rest = [_draw(rng, TURN_TOKENS) for _ in range(turns - 1)]
        talks.append(_Talk(list(rng.choice(openings)), [first, *rest]))
    return talks


async def _converse(url: str, talks: list[_Talk]) -> _Sums:
    """As many users as instances: each takes up any conversation that is not being held, so a
    prompt waits for nobody, and TTFT is what its own prefill took."""
    client = CompletionClient(url)
    rng, sums = random.Random(1), _Sums()
    try:
        for _ in range(2 * INSTANCES):
            await _ask(client, _draw(rng, WARM_TOKENS))

        async def user() -> None:
            while open_ := [talk for talk in talks if talk.turns and not talk.busy]:
                talk = rng.choice(open_)
                talk.busy = True
                talk.tokens += talk.turns.pop(0)
                answer = await _ask(client, talk.tokens)
                _add(sums, answer, await client.explain(answer.request_id))
                talk.busy = False

        await asyncio.gather(*(user() for _ in range(INSTANCES)))
    finally:
        await client.close()
    return sums


async def _ask(client: CompletionClient, prompt: list[int]) -> Answer:
    answer = await client.complete(prompt, temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    if answer.error or not answer.token_instants_s:
        raise LiveTiersError(f"a request failed: {answer.status} {answer.error}")
    return answer


def _add(sums: _Sums, answer: Answer, explained: dict[str, Any]) -> None:
    sums.prompt_tokens += answer.prompt_tokens
    sums.cached_tokens += explained["cached_tokens"]
    sums.fetched_tokens += explained["fetched_tokens"]
    sums.loaded_tokens += explained["loaded_tokens"]
    sums.ttfts_s.append(answer.ttft_s)


def _row(sums: _Sums) -> dict[str, Any]:
    total = max(sums.prompt_tokens, 1)
    ordered = sorted(sums.ttfts_s)
    return {
        "requests": len(ordered),
        "hit_ratio": round(sums.cached_tokens / total, 4),
        "others": round(sums.fetched_tokens / total, 4),
        "ssd": round(sums.loaded_tokens / total, 4),
        "mean_ttft_s": round(statistics.fmean(ordered), 4),
        "p99_ttft_s": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
    }


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(count)]
