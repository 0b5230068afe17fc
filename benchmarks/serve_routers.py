"""Routers of Ray Serve on the same replicas: power of two choices, Serve's prefix-aware router and
moonpool's Conductor.

    python -m benchmarks.serve_routers --rate 6 --seconds 30

A replica is a model of an engine, not an engine: prompts wait for each other, answers share steps,
and a prefix cache of a given size evicts the least recently used blocks. Conversations arrive by a
Poisson process and ask again after a pause. Serve's prefix-aware router needs `ray[llm]` and one of
its engines; without these its row is left out. Timings on a busy machine say little; rows of one
table were measured one after another.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import click

from moonpool.distributions import nearest_rank

PREFILL_S_PER_CHAR = 5e-5
STEP_S, STEP_S_PER_ANSWER = 0.02, 0.001
PIECE_CHARS = 64
NEW_CHARS = 400
PREFIX_AWARE = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
TWO_CHOICES = "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter"
CONDUCTOR = "moonpool.ray.ConductorRouter"


class ModelReplica:
    """Computes one prompt at a time, and a token of each answer in each step."""

    def __init__(self, cache_chars: int) -> None:
        self._most = cache_chars // PIECE_CHARS
        self._cached: OrderedDict[str, None] = OrderedDict()
        self._prompts = asyncio.Lock()
        self._num_answers = 0

    async def answer(self, body: SimpleNamespace) -> AsyncIterator[str]:
        text, max_tokens = body.prompt, body.max_tokens
        async with self._prompts:
            hit_chars = self._hit(text)
            await asyncio.sleep((len(text) - hit_chars) * PREFILL_S_PER_CHAR)
        self._num_answers += 1
        try:
            for number in range(max_tokens):
                yield f"data: {{{hit_chars if not number else 0}}}"
                await asyncio.sleep(STEP_S + STEP_S_PER_ANSWER * self._num_answers)
        finally:
            self._num_answers -= 1

    def _hit(self, text: str) -> int:
        """Returns the cached characters at the start of a prompt, and caches all of it."""
        ends = range(PIECE_CHARS, len(text) + 1, PIECE_CHARS)
        keys = [text[:end] for end in ends]
        num_hits = next((n for n, key in enumerate(keys) if key not in self._cached), len(keys))
        for key in keys:
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self._most:
            self._cached.popitem(last=False)
        return num_hits * PIECE_CHARS


@dataclass(slots=True)
class OfferedCall:
    prompt_chars: int
    hit_chars: int = 0
    ttft_s: float = float("inf")
    tbt_s: float = float("inf")
    status: int = 200


@dataclass(frozen=True, slots=True)
class CallLoad:
    rate: float
    seconds: float
    turns: int
    seed: int
    ttft_s: float
    tbt_s: float


async def converse(handle: Any, load: CallLoad, number: int, calls: list[OfferedCall]) -> None:
    chance = random.Random(load.seed * 10_007 + number)
    text = f"conversation {number} " + chance.choice("abcd") * (NEW_CHARS * chance.choice((2, 8)))
    for turn in range(load.turns):
        call = OfferedCall(len(text))
        calls.append(call)
        await send(handle, text, chance.choice((8, 24)), call)
        text += f" turn {turn} " + chance.choice("efgh") * NEW_CHARS
        await asyncio.sleep(chance.expovariate(1.0))


async def send(handle: Any, text: str, max_tokens: int, call: OfferedCall) -> None:
    began_s = time.perf_counter()
    times_s = []
    try:
        async for item in handle.remote(SimpleNamespace(prompt=text, max_tokens=max_tokens)):
            times_s.append(time.perf_counter())
            call.hit_chars += int(item[7:-1])
    except Exception as error:
        call.status = int(getattr(error, "status_code", 500))
        return
    call.ttft_s = times_s[0] - began_s
    call.tbt_s = (times_s[-1] - times_s[0]) / max(len(times_s) - 1, 1)


async def offer(handle: Any, load: CallLoad) -> list[OfferedCall]:
    """Conversations arrive in open loop, whether earlier ones were answered or not."""
    chance, calls, tasks = random.Random(load.seed), list[OfferedCall](), []
    began_s, at_s, number = time.perf_counter(), 0.0, 0
    while at_s < load.seconds:
        at_s += chance.expovariate(load.rate / load.turns)
        await asyncio.sleep(max(began_s + at_s - time.perf_counter(), 0.0))
        tasks.append(asyncio.create_task(converse(handle, load, number, calls)))
        number += 1
    await asyncio.gather(*tasks)
    return calls


def row(name: str, calls: list[OfferedCall], load: CallLoad) -> str:
    served = sorted(call.ttft_s for call in calls if call.status == 200)
    good = [c for c in calls if c.ttft_s <= load.ttft_s and c.tbt_s <= load.tbt_s]
    refused = sum(call.status == 429 for call in calls)
    failed = sum(call.status not in (200, 429) for call in calls)
    hits = sum(call.hit_chars for call in calls)
    chars = sum(call.prompt_chars for call in calls if call.status == 200)
    p50 = statistics.median(served) if served else float("nan")
    p99 = nearest_rank(served, 0.99) if served else float("nan")
    return (
        f"{name:<28} {len(calls):>6} {len(good):>6} {refused:>8} {failed:>7}"
        f" {p50:>9.3f} {p99:>9.3f} {hits / max(chars, 1):>6.0%}"
    )


def run_router(
    app: str, path: str, settings: dict[str, Any], replicas: int, cache: int, load: CallLoad
) -> Any:
    """Deploys new replicas as `app` behind this router, and returns the calls."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    config = RequestRouterConfig(request_router_class=path, request_router_kwargs=settings)
    deployment = serve.deployment(ModelReplica).options(
        num_replicas=replicas, max_ongoing_requests=1000, request_router_config=config
    )
    serve.run(deployment.bind(cache), name=app, route_prefix=None)
    try:
        handle = serve.get_app_handle(app).options(stream=True, method_name="answer")
        return asyncio.run(offer(handle, load))
    finally:
        serve.delete(app)


@click.command()
@click.option("--rate", default=6.0, help="Calls per second that are offered.")
@click.option("--seconds", default=30.0, help="How long conversations arrive.")
@click.option("--replicas", default=3, help="Replicas of each router.")
@click.option("--turns", default=4, help="Calls of a conversation.")
@click.option("--cache-chars", default=60_000, help="What the cache of one replica holds.")
@click.option("--ttft", "ttft_s", default=0.5, help="Service level in seconds.")
@click.option("--tbt", "tbt_s", default=0.05, help="Service level in seconds.")
@click.option("--runs", default=1, help="Runs of each router, with a seed each.")
def serve_routers(
    rate: float,
    seconds: float,
    replicas: int,
    turns: int,
    cache_chars: int,
    ttft_s: float,
    tbt_s: float,
    runs: int,
) -> None:
    """Compare routers of Ray Serve on the same replicas, under the same calls."""
    import ray

    ray.init(address="local", num_cpus=replicas + 4, include_dashboard=False, log_to_driver=False)
    levels = {"ttft_s": ttft_s, "tbt_s": tbt_s}
    routers: dict[str, tuple[str, dict[str, Any]]] = {
        "power of two choices": (TWO_CHOICES, {}),
        "prefix-aware (Serve LLM)": (PREFIX_AWARE, {}),
        "Conductor": (CONDUCTOR, {"kv_tokens": cache_chars // 4}),
        "Conductor with its SLOs": (CONDUCTOR, {"kv_tokens": cache_chars // 4, **levels}),
    }
    columns = f"{'calls':>6} {'good':>6} {'refused':>8} {'failed':>7} {'TTFT p50':>9} {'p99':>9}"
    click.echo(f"{'router':<28} {columns} {'hits':>6}")
    for seed in range(runs):
        load = CallLoad(rate, seconds, turns, seed, ttft_s, tbt_s)
        for number, (name, (path, settings)) in enumerate(routers.items()):
            app = f"bench-{seed}-{number}"  # each app has a separate Conductor
            try:
                calls = run_router(app, path, settings, replicas, cache_chars, load)
            except ImportError as error:
                click.echo(f"{name:<28} left out: {str(error).splitlines()[0]}")
                continue
            click.echo(row(name, calls, load))
    ray.shutdown()


if __name__ == "__main__":
    serve_routers()
