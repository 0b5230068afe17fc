"""Measures the cost of a miss with two vLLMs in turns, one of which uses a pool that never has a
prompt.

The pool stores all that its vLLM computes. Each round sends both vLLMs the same number of new
prompts, and they alternate in going first. The figures are ratios within rounds. CPU seconds are of
all processes of a vLLM and of the pool: they show the additional work even on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.suite.live.idle import cpu_s, family
from benchmarks.suite.live.vllm_server import cpu_sizes
from benchmarks.suite.pool_in_vllm.fleet import GroupedVllm
from benchmarks.suite.pool_in_vllm.play import PATH, TimedReceiver
from benchmarks.suite.pool_in_vllm.pools import MoonpoolPool
from moonpool.host_pool.messages import PROTOCOL, Describe, JoinPool, PoolMessage, PoolState
from moonpool.http_client.client import HttpClient
from moonpool.types import Struct
from moonpool_engine.vllm.pool_link import PoolLink
from moonpool_lab.demo.local_server import ServerError

CONCURRENCY = 4
ANSWER_TOKENS = 8
STEP_TOKENS = 512
ANSWER_S = 60.0
WITHOUT, POOL = "without", "pool"


class MissPlan(Struct, frozen=True):
    """`prompts` for each vLLM in each of `rounds`, after one that warms up."""

    python: str
    model: str
    rounds: int
    prompts: int
    prompt_tokens: int


class Round(Struct, frozen=True):
    """The times of one vLLM for the prompts of a round. `ttft_s` is their mean."""

    seconds: float
    ttft_s: float
    cpu_s: float


def misses(plan: MissPlan, pool: MoonpoolPool) -> dict[str, Any]:
    """Returns the median and the standard error of the pool's additional cost, as ratios. Raises
    ServerError."""
    context, core = plan.prompt_tokens + 64, str(min(os.sched_getaffinity(0)))
    options = cpu_sizes(2 * CONCURRENCY * context, context, STEP_TOKENS)
    told = ["--enforce-eager", "--kv-transfer-config", json.dumps(pool.connector())]
    given = {WITHOUT: (told[:1], {}), POOL: (told, pool.environment())}
    rounds: dict[str, list[Round]] = {WITHOUT: [], POOL: []}
    with ExitStack() as stack:
        vllms = {
            name: GroupedVllm(plan.python, plan.model, core, options, flags, environment)
            for name, (flags, environment) in given.items()
        }
        with ThreadPoolExecutor(len(vllms)) as threads:
            starts = [threads.submit(stack.enter_context, vllm) for vllm in vllms.values()]
        for start in starts:
            start.result()
        for number in range(plan.rounds + 1):
            for name in (WITHOUT, POOL) if number % 2 else (POOL, WITHOUT):
                pids = [*family(vllms[name].pid), *(pool.pids if name == POOL else ())]
                prompts = _prompts(plan, f"{number} {name}")
                taken = asyncio.run(_ask_all(vllms[name].url, plan.model, prompts, pids))
                if number:
                    rounds[name].append(taken)
        stored = stored_blocks(pool)
    if not stored:
        raise ServerError("the vLLM over the pool has stored nothing: it served without the pool")
    pairs = list(zip(rounds[WITHOUT], rounds[POOL], strict=True))
    found: dict[str, Any] = {"added": {}, "stored_blocks": stored}
    for name in Round.__struct_fields__:
        ratios = [getattr(mine, name) / getattr(alone, name) - 1 for alone, mine in pairs]
        found["added"][name] = {
            "median": statistics.median(ratios),
            "standard_error": statistics.stdev(ratios) / math.sqrt(len(ratios)),
            "rounds": ratios,
        }
        found[name] = {
            kind: statistics.median(getattr(one, name) for one in taken)
            for kind, taken in rounds.items()
        }
    return found


def stored_blocks(pool: MoonpoolPool) -> int:
    """How many blocks the pool has in memory and on the SSD; one in both counts twice. Raises
    ServerError."""
    has_answer, states = threading.Event(), list[PoolState]()

    def take(message: PoolMessage) -> None:
        if isinstance(message, PoolState):
            states.append(message)
            has_answer.set()

    link = PoolLink(pool.socket_path, JoinPool(protocol=PROTOCOL), take, lambda: None)
    link.start()
    try:
        for _ in range(int(10 * ANSWER_S)):
            link.send(Describe())
            if has_answer.wait(0.1):
                break
        else:
            raise ServerError("the pool does not say what it has")
    finally:
        link.close()
    spaces = [space for group in states[0].groups for space in group.spaces]
    return sum(space.cached + space.ssd_cached for space in spaces)


def _prompts(plan: MissPlan, name: str) -> list[list[int]]:
    rng = np.random.default_rng([*name.encode()])
    found: list[list[int]] = rng.integers(300, 2000, (plan.prompts, plan.prompt_tokens)).tolist()
    return found


async def _ask_all(
    url: str, model: str, prompts: Sequence[list[int]], pids: Sequence[int]
) -> Round:
    left, ttfts = iter(prompts), list[float]()
    clock = asyncio.get_running_loop().time

    async def ask_on() -> None:
        for prompt in left:
            body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True}
            body |= {"temperature": 0, "ignore_eos": True}
            receiver, client = TimedReceiver(True), HttpClient(url)
            sent_s = clock()
            await client.post(PATH, json.dumps(body).encode(), receiver)
            client.close()
            if not receiver.first_s:
                raise ServerError(f"vLLM did not answer: {receiver.end().detail}")
            ttfts.append(receiver.first_s - sent_s)

    began_cpu_s, began_s = sum(map(cpu_s, pids)), clock()
    await asyncio.gather(*(ask_on() for _ in range(CONCURRENCY)))
    taken_s, used_s = clock() - began_s, sum(map(cpu_s, pids)) - began_cpu_s
    return Round(taken_s, statistics.fmean(ttfts), used_s)
