"""Measures whether engines pinned to their own cores have more even token gaps: the same load with
and without pinning, in turns.

One prefill and one decode instance; some clients, each asking again as soon as it has its answer.
Gaps are the client's, over HTTP.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from benchmarks.errors import BenchError
from moonpool.distributions import percentiles
from moonpool_lab.demo.client import ClientResponse, CompletionClient
from moonpool_lab.demo.local_server import LocalServer

CLIENTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 384, 48
WARM_S = 3.0
KINDS = {"pinned": "on", "free": "off"}
Say = Callable[[str], None]


def bench_pinning(
    model: str, threads: int, seconds: float, rounds: int, seed: int, say: Say
) -> dict[str, Any]:
    """Returns figures by kind over all rounds, and of each round. Raises BenchError."""
    found: dict[str, list[list[ClientResponse]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        order = list(KINDS) if number % 2 == 0 else list(reversed(KINDS))
        for kind in order:
            arguments = [model, "--prefill", "1", "--decode", "1", "--threads", str(threads)]
            arguments += ["--slo-ttft", "600", "--slo-tbt", "60", "--pinning", KINDS[kind]]
            with LocalServer(arguments) as server:
                answers = asyncio.run(_load(server.url, seconds, seed + number))
            found[kind].append(answers)
            say(f"{kind:<7} round {number}: {_line(_figures(answers, seconds))}")
    whole = {
        kind: _figures([answer for each in runs for answer in each], seconds * rounds)
        for kind, runs in found.items()
    }
    for kind, figures in whole.items():
        say(f"{kind:<7} all: {_line(figures)}")
    return {
        "model": model,
        "threads": threads,
        "seconds": seconds,
        "seed": seed,
        **whole,
        "rounds": {kind: [_figures(r, seconds) for r in runs] for kind, runs in found.items()},
    }


async def _load(url: str, seconds: float, seed: int) -> list[ClientResponse]:
    """Runs the clients, which all stop together, and returns the answers that began after the
    warm-up."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    answers: list[ClientResponse] = []

    async def ask_again_and_again(rng: random.Random) -> None:
        client = CompletionClient(url)
        while (at_s := loop.time() - began_s) < WARM_S + seconds:
            prompt = [rng.randrange(256) for _ in range(PROMPT_TOKENS)]
            answer = await client.complete(
                prompt, temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True
            )
            if answer.error or answer.generated_tokens != ANSWER_TOKENS:
                raise BenchError(f"a request failed: {answer.status} {answer.error}")
            if at_s >= WARM_S:
                answers.append(answer)
        client.close()

    draws = [random.Random(seed * CLIENTS + i) for i in range(CLIENTS)]
    await asyncio.gather(*(ask_again_and_again(rng) for rng in draws))
    return answers


def _figures(answers: list[ClientResponse], seconds: float) -> dict[str, float]:
    gaps = [gap for answer in answers for gap in answer.gaps_s] or [float("nan")]
    firsts = [answer.ttft_s for answer in answers] or [float("nan")]
    return {
        "answers": len(answers),
        "tokens_per_s": sum(answer.generated_tokens for answer in answers) / seconds,
        **{f"ttft_{p}_s": each_s for p, each_s in percentiles(firsts, 50, 99).items()},
        **{f"tbt_{p}_s": each_s for p, each_s in percentiles(gaps, 50, 90, 99).items()},
        "tbt_max_s": max(gaps),
    }


def _line(figures: dict[str, float]) -> str:
    return (
        f"TBT P50 {1e3 * figures['tbt_p50_s']:.1f}, P99 {1e3 * figures['tbt_p99_s']:.1f}, most"
        f" {1e3 * figures['tbt_max_s']:.0f} ms; TTFT P50 {1e3 * figures['ttft_p50_s']:.0f} ms;"
        f" {figures['tokens_per_s']:.1f} tokens/s"
    )
