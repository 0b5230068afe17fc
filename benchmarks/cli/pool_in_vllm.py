"""`moonpool bench pool-in-vllm`: two vLLMs over moonpool's pool, and over those of others."""

from __future__ import annotations

from typing import Annotated, Any

import click

from benchmarks.cli.annotated import PeerPython, Rounds, Seed, options
from benchmarks.cli.output import measure
from moonpool.cli.options import json_option
from moonpool.cli.output import origin, write_json

POOL_CHOICES = ("none", "offload", "offload-host", "lmcache", "mooncake", "moonpool")
WORKLOAD_CHOICES = ("conversations", "agents")


@click.command("pool-in-vllm")
@options
@json_option
def pool_in_vllm(
    *,
    model: Annotated[str, "Folder of a checkpoint with tokeniser files."],
    peer_python: PeerPython,
    lmcache_python: Annotated[str, "Python of a vLLM installation with lmcache."] = "",
    mooncake_python: Annotated[str, "Python of a vLLM installation with Mooncake."] = "",
    pools: Annotated[
        tuple[Any, ...],
        "Pools to compare; repeat for more. All unless given.",
        "--pool",
        click.Choice(POOL_CHOICES),
    ] = POOL_CHOICES,
    workloads: Annotated[
        tuple[Any, ...],
        "Workloads to play; repeat for more.",
        "--workload",
        click.Choice(WORKLOAD_CHOICES),
    ] = WORKLOAD_CHOICES,
    sessions: Annotated[int | None, "Sessions of each workload."] = None,
    concurrency: Annotated[int, "Requests in flight."] = 6,
    chunk_tokens: Annotated[
        int, "Most tokens of one step (the prefill chunk).", "--max-num-batched-tokens"
    ] = 512,
    dram_mib: Annotated[int, "DRAM of each pool in MiB."] = 1024,
    rounds: Rounds = 3,
    timeout_s: Annotated[float, "Of one answer.", "--timeout"] = 300.0,
    seed: Seed = 0,
    json_file: str | None,
) -> None:
    """Compare two vLLMs without a pool and over several pools: latency, hits, wrong answers."""
    from benchmarks.suite.pool_in_vllm.bench import PoolBenchPlan, bench_pools

    others = {"lmcache": lmcache_python, "mooncake": mooncake_python}
    chosen = ("none", *(name for name in pools if name != "none"))
    plan = PoolBenchPlan(
        model=model,
        pythons={name: others.get(name) or peer_python for name in chosen},
        workloads=workloads,
        rounds=rounds,
        sessions=sessions or 0,
        concurrency=concurrency,
        chunk_tokens=chunk_tokens,
        dram_mib=dram_mib,
        timeout_s=timeout_s,
        seed=seed,
    )

    def keep(found: dict[str, Any]) -> None:
        write_json(json_file, found | {"origin": origin()})

    measure(lambda: bench_pools(plan, click.echo, keep), json_file)
