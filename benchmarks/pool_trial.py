"""Looks for wrong answers of vLLMs over the pool while its processes are killed and its bytes
changed.

    python -m benchmarks.pool_trial --vllm venv/bin/python --model A --model B --requests 3000 \\
        --kills 100

A head, a vLLM for each model and one pool for all answer conversations of three tenants. Pool,
vLLMs and head are killed with -9 in turns, and start again. Before the pool starts, and between
kills, bytes in its memory and on its SSD are changed. Each answer is judged afterwards, token by
token, by a vLLM with the same model without a pool or cache. The same load on vLLMs without a pool
shows the differences that batching causes. `--disk-folder` names a small tmpfs with room for
`--ssd`, which another program's file fills during three kills of ten:

    mount -t tmpfs -o size=544m tmpfs /tmp/small

The exit status is 1 if answers were wrong or given up, or if nothing was found in the pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.suite.live.vllm_server import CPU_BLOCK_TOKENS
from benchmarks.suite.pool_in_vllm.judge import counts_of, judge
from benchmarks.suite.pool_in_vllm.play import CacheCounts, tokenize
from benchmarks.suite.pool_in_vllm.pools import PoolPlace
from benchmarks.suite.pool_in_vllm.trial_cluster import TrialCluster, TrialPool, TrialShape
from benchmarks.suite.pool_in_vllm.trial_load import LoadShape, TrialLoad, make_calls
from benchmarks.suite.pool_in_vllm.versions import versions_of
from moonpool.cli.output import origin, write_json
from moonpool_lab.demo.local_server import ServerError
from moonpool_lab.trial.tally import fisher_p

TOKENS_PER_WORD = 4
KILLED = ("pool",) * 7 + ("vllm",) * 2 + ("head",)
PROVEN_P = 0.01
SETTLE_S = 5.0
FULL_KILLS, OF_KILLS = 3, 10
"""During the first of this many kills the disk is full."""


def kinds_of_kills(count: int, rng: random.Random) -> list[str]:
    """Returns the kind of each kill: first each kind once, then mostly the pool, because a vLLM
    needs half a minute to start."""
    first = ["pool", "vllm", "head"]
    return (first + [rng.choice(KILLED) for _ in range(count)])[:count]


class PoolTrial:
    """One run of the load over the pool, and the disturbances in it."""

    def __init__(self, shape: TrialShape, load: LoadShape, kills: int, args: Any) -> None:
        self._shape, self._load_shape, self._args = shape, load, args
        self._rng = random.Random(f"trial kills {args.seed}")
        self._kinds = kinds_of_kills(kills, self._rng)
        self.done = Counter[str]()
        self.again: dict[str, float] = {}

    def run(self) -> tuple[TrialLoad, CacheCounts]:
        """Raises ServerError, httpx.HTTPError."""
        with tempfile.TemporaryDirectory() as folder:
            place = PoolPlace(
                self._shape.python, Path(folder), self._shape.dram_bytes, CPU_BLOCK_TOKENS
            )
            with TrialCluster(self._shape, TrialPool(place, self._shape)) as cluster:
                load = self._load(cluster)
                asyncio.run(self._under_kills(cluster, load))
                hits = cluster.hits()
                self._find_again(cluster, load)
        return load, hits

    def _load(self, cluster: TrialCluster) -> TrialLoad:
        def tokens(model: str, text: str) -> list[int]:
            return tokenize(cluster.vllms[model].url, model, text)

        shape = self._load_shape
        calls, maker = make_calls(shape, self._shape.models, tokens, self._args.seed)
        return TrialLoad(shape, calls, maker.foreign_to, self._args.seed)

    async def _under_kills(self, cluster: TrialCluster, load: TrialLoad) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(load.run(cluster.urls))
                group.create_task(self._disturb(cluster, load, running))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _disturb(
        self, cluster: TrialCluster, load: TrialLoad, running: asyncio.Task[None]
    ) -> None:
        """Kills processes at times spread over the requests, and in between damages the blocks in
        the running pool."""
        step = self._load_shape.requests / (len(self._kinds) + 1)
        for number, kind in enumerate(self._kinds):
            if not await _until(load, (number + 0.5) * step, running):
                return
            assert cluster.pool is not None
            share = self._args.damage_share
            self.done["places damaged in a running pool"] += await asyncio.to_thread(
                cluster.pool.damage, self._rng, share
            )
            if not await _until(load, (number + 1) * step, running):
                return
            if number == 0:
                cluster.check_that_pool_is_used()
            if self._args.disk_folder:
                await asyncio.to_thread(self._fill_disk, cluster.pool, number)
            await asyncio.to_thread(self._kill, cluster, kind)
            say(f"{load.num_done} answers; killed: {kind}")

    def _fill_disk(self, pool: TrialPool, number: int) -> None:
        match number % OF_KILLS:
            case 0:
                pool.fill_disk()
                self.done["times that the disk was filled"] += 1
            case part if part == FULL_KILLS:
                pool.free_disk()

    def _kill(self, cluster: TrialCluster, kind: str) -> None:
        if kind == "pool":
            changed = cluster.kill_pool(self._rng, self._args.damage_share)
            self.done["places damaged in a dead pool"] += changed
        elif kind == "vllm":
            cluster.kill_vllm(self._rng.choice(self._shape.models))
        else:
            cluster.kill_head()
        self.done[f"kills of the {kind}"] += 1

    def _find_again(self, cluster: TrialCluster, load: TrialLoad) -> None:
        """Kills all processes once more, repeats the last questions, and returns how many of their
        blocks are still found."""
        if not self._kinds:
            return
        time.sleep(SETTLE_S)
        cluster.kill_pool(self._rng, 0.0)
        for model in self._shape.models:
            cluster.kill_vllm(model)
        time.sleep(SETTLE_S)
        before = cluster.hits()
        more = load.again(min(len(load.answers), 4 * len(self._shape.models)))
        # Through the head: it scopes a tenant's salt, so other names would be asked for without it.
        asyncio.run(more.run(cluster.urls))
        found = cluster.hits().since(before)
        load.answers += more.answers
        self.again = {"prompt_tokens": found.asked, "found_in_pool": found.external}


async def _until(load: TrialLoad, count: float, running: asyncio.Task[None]) -> bool:
    """Waits until this many requests are done. Returns whether the load still runs then."""
    while load.num_done < count:
        ended, _ = await asyncio.wait({running}, timeout=0.1)
        if ended:
            return False
    return True


def twin(shape: TrialShape, load: TrialLoad, tie_nats: float) -> tuple[Any, Any]:
    """Judges the answers at vLLMs alone, after the same load on these. Raises as `run` does."""
    with TrialCluster(shape, None) as cluster:
        same = load.anew()
        asyncio.run(same.run(cluster.urls))
        judged = [counts_of(judge(cluster.urls, of.answers), tie_nats) for of in (load, same)]
    return judged[0], judged[1]


def verdict(pool: dict[str, Any], alone: dict[str, Any], given_up: list[str]) -> Iterator[str]:
    """Yields lines that say what the run proves."""
    if pool["foreign"]:
        yield f"{pool['foreign']} answers with text of other conversations"
    p = fisher_p(pool["wrong"], pool["answers"], alone["wrong"], alone["answers"])
    if pool["wrong"] and (not alone["wrong"] or p < PROVEN_P):
        yield f"{pool['wrong']} answers are wrong over the pool, {alone['wrong']} without it"
    if given_up:
        yield f"{len(given_up)} questions were never answered, first {given_up[0]}"


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--vllm", required=True, help="Python of a vLLM installation.")
    add("--model", action="append", required=True, help="Folder of a model; give two.")
    add("--requests", type=int, default=3000)
    add("--kills", type=int, default=100)
    add("--concurrency", type=int, default=6)
    add("--tenants", type=int, default=3)
    add("--sessions", type=int, default=3, help="Conversations of each tenant and model.")
    add("--kv-tokens", type=int, default=2560, help="In the memory of each vLLM.")
    add("--dram-mib", type=int, default=64)
    add("--ssd", default="1GiB")
    add("--disk-folder", default="", help="For the SSD tier: a small tmpfs, which is filled.")
    add("--damage-share", type=float, default=0.002, help="Of places of 16 KiB, each time.")
    add("--tie-nats", type=float, default=0.5)
    add("--modules", action="append", default=[], help="Further folders of modules for the vLLMs.")
    add("--seed", type=int, default=0)
    add("--json", default="")
    return parser.parse_args()


def run(args: argparse.Namespace) -> int:
    load = LoadShape(args.requests, args.concurrency, args.tenants, args.sessions)
    context = TOKENS_PER_WORD * load.longest_words
    shape = TrialShape(
        python=args.vllm,
        models=tuple(args.model),
        kv_tokens=max(args.kv_tokens, context + 4 * CPU_BLOCK_TOKENS),
        context_tokens=context,
        chunk_tokens=512,
        dram_bytes=args.dram_mib << 20,
        ssd=args.ssd,
        disk_folder=args.disk_folder,
        modules=tuple(args.modules),
    )
    began_s = time.monotonic()
    trial = PoolTrial(shape, load, args.kills, args)
    played, hits = trial.run()
    say(f"{len(played.answers)} answers in {played.seconds:.0f} s; the vLLMs without a pool")
    pool, alone = twin(shape, played, args.tie_nats)
    proven = list(verdict(pool, alone, played.given_up))
    if not hits.external:
        proven.append("nothing was found in the pool, so this says nothing of it")
    found = {
        "pool": pool,
        "without_pool": alone,
        "disturbances": dict(trial.done),
        "asked_again": dict(played.retried),
        "prompt_tokens": hits.asked,
        "found_in_vllm": hits.local,
        "found_in_pool": hits.external,
        "after_all_were_killed": trial.again,
        "proven": proven,
        "load_s": played.seconds,
        "seconds": time.monotonic() - began_s,
        "versions": versions_of({"vllm": args.vllm}),
        "origin": origin()
        | {"command": f"python -m benchmarks.pool_trial {shlex.join(sys.argv[1:])}"},
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    write_json(args.json or None, found)
    return 1 if proven else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # all processes end with this one
    try:
        sys.exit(run(arguments()))
    except (ServerError, httpx.HTTPError, OSError) as error:
        sys.exit(f"error: {error}")
