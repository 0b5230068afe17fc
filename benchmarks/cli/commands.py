"""The commands that a checkout adds to `moonpool bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import click

from benchmarks.cli.admission import admission, admission_workloads
from benchmarks.cli.annotated import Model, Repeats, Rounds, Seed, options
from benchmarks.cli.attention import attention
from benchmarks.cli.conversations import conversations
from benchmarks.cli.engine import (
    engine,
    formats,
    kv_formats,
    pipeline,
    quantization,
    sarathi,
    tensor,
)
from benchmarks.cli.faults import faults
from benchmarks.cli.fronts import fronts
from benchmarks.cli.idle import idle
from benchmarks.cli.kills import kills
from benchmarks.cli.live import agreement, colocated, overload, peers_live
from benchmarks.cli.output import show
from benchmarks.cli.plan import plan
from benchmarks.cli.pool_in_vllm import pool_in_vllm
from benchmarks.cli.programs import programs
from benchmarks.cli.reuse import prefetch, reuse
from benchmarks.cli.roles import autoscale, role_balance, role_decisions
from benchmarks.cli.routers import routers
from benchmarks.cli.speculation import speculation
from benchmarks.cli.start import start
from benchmarks.cli.trials import trials
from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import fail, show_figures
from moonpool.config.tables import Admission, ConductorConfig, Placement


@click.group()
def bench() -> None:
    """Benchmarks of moonpool's parts."""


for command in (
    reuse,
    prefetch,
    programs,
    attention,
    agreement,
    overload,
    colocated,
    peers_live,
    conversations,
    engine,
    quantization,
    formats,
    kv_formats,
    sarathi,
    pipeline,
    tensor,
    fronts,
    routers,
    pool_in_vllm,
    idle,
    start,
    faults,
    kills,
    plan,
    admission,
    admission_workloads,
    speculation,
    trials,
    role_balance,
    role_decisions,
    autoscale,
):
    bench.add_command(command)


@bench.command()
@options
@json_option
def pinning(
    *,
    model: Model = "random:m150",
    threads: Annotated[int, "CPU threads per engine process."] = 1,
    seconds: Annotated[float, "Seconds that one run takes.", click.FloatRange(1.0)] = 20.0,
    rounds: Rounds = 3,
    seed: Seed = 0,
    json_file: str | None,
) -> None:
    """Measure gaps between tokens of 1 prefill + 1 decode, with engines pinned to cores or not."""
    from benchmarks.suite.live.pinning import bench_pinning

    show(lambda: bench_pinning(model, threads, seconds, rounds, seed, click.echo), json_file)


@bench.command()
@options
@json_option
def cached(
    *,
    model: Model = "random:m150",
    prefix_tokens: Annotated[int, "Tokens of the shared prefix."] = 4096,
    repeats: Repeats = 3,
    json_file: str | None,
) -> None:
    """Measure TTFT of a long prompt: computed, cached here, and fetched from another process."""
    from benchmarks.suite.live.cached import bench_cached

    show(lambda: bench_cached(model, prefix_tokens, repeats) | {"model": model}, json_file)


@bench.command()
@click.argument("model", default="smollm2")
@options
@json_option
def restart(
    *,
    prefix_tokens: Annotated[int, "Tokens of the long conversation."] = 4096,
    repeats: Annotated[int, "Long conversations to measure."] = 1,
    model: str,
    json_file: str | None,
) -> None:
    """Kill a whole server and start it again: TTFT and hits, from SSD and from kept memory.

    The SSD's files are below the folder for temporary files (TMPDIR).
    """
    from benchmarks.suite.live.restart import bench_restart

    show(lambda: bench_restart(model, prefix_tokens, repeats) | {"model": model}, json_file)


@bench.command()
@options
@json_option
def head(
    *,
    concurrency: Annotated[tuple[int, ...], "Number of clients at once; repeat for more."] = (1, 8),
    json_file: str | None,
) -> None:
    """Measure the CPU time of the head per request and per token on a real cluster."""
    from benchmarks.suite.live.head import bench_head

    show(lambda: bench_head(concurrency), json_file)


@bench.command()
@options
@json_option
def conductor(
    *,
    instances: Annotated[tuple[int, ...], "Number of instances; repeat for more."] = (
        16,
        100,
        1000,
        3000,
    ),
    blocks: Annotated[int, "Cached blocks per instance."] = 1000,
    in_flight: Annotated[int, "Requests in flight per instance."] = 10,
    decisions: Annotated[int, "Number of decisions to time."] = 500,
    placement: Annotated[
        Placement, "Policy that chooses the prefill instance of a request."
    ] = "kvcache-centric",
    admission: Annotated[
        Admission, "Policy that rejects requests whose service levels would be missed."
    ] = "goodput",
    json_file: str | None,
) -> None:
    """Measure CPU time per decision, ending, token and block event over the instances."""
    from benchmarks.suite.cluster.conductor import bench_conductor

    if min(instances) < 2:
        fail("--instances must be at least 2: one for prefill and one for decode")
    config = ConductorConfig(placement=placement, admission=admission)
    found = bench_conductor(instances, blocks, in_flight, decisions, config, click.echo)
    show_figures(found | {"blocks_per_instance": blocks, "decisions": decisions}, json_file)


@bench.command()
@options
@json_option
def simulator(
    *,
    sizes: Annotated[
        tuple[tuple[int, int], ...],
        "Instances and requests; repeat for more. The default takes some minutes.",
        "--size",
        (COUNT, COUNT),
    ] = ((16, 12_031), (100, 25_000), (1000, 100_000)),
    json_file: str | None,
) -> None:
    """Measure time and memory of a simulation over its size."""
    from benchmarks.suite.cluster.simulator import bench_simulator

    if min(instances for instances, _ in sizes) < 2:
        fail("--size needs at least 2 instances: one for prefill and one for decode")

    def run() -> dict[str, Any]:
        runs = []
        for found in bench_simulator(sizes):
            click.echo(
                f"{found['instances']:>6} instances {found['requests']:>9,} requests"
                f" {found['wall_s']:>9.1f} s {found['us_per_request']:>7.0f} us each,"
                f" {found['peak_mib']:,} MiB"
            )
            runs.append(found)
        return {"runs": runs}

    show(run, json_file)


@bench.command()
@options
@json_option
def index(
    *,
    blocks: Annotated[int, "Number of blocks in the index."] = 1_000_000,
    instances: Annotated[int, "Number of instances."] = 1000,
    json_file: str | None,
) -> None:
    """Measure memory of the Conductor's index, and time to match 256 blocks, against limits."""
    from benchmarks.suite.pool.index import bench_index

    show(lambda: bench_index(blocks, instances, click.echo), json_file)


@bench.command()
@options
@json_option
def demotion(
    *,
    model: Model = "random:m150",
    batch: Annotated[int, "Answers to decode at once."] = 4,
    phase: Annotated[float, "Seconds of one phase.", click.FloatRange(min=0.2)] = 1.5,
    rounds: Annotated[int, "Number of quiet and busy phases each."] = 14,
    tokens_per_s: Annotated[
        int, "Tokens of KVCache per second that the SSD reads or writes."
    ] = 16_000,
    folder: Annotated[
        Path | None,
        "Folder on the disk to use; that of temporary files unless given.",
        click.Path(file_okay=False, exists=True, path_type=Path),
    ] = None,
    json_file: str | None,
) -> None:
    """Measure time between tokens with the instance's SSD busy and idle. Three minutes."""
    from benchmarks.suite.pool.demotion import bench_demotion

    show(
        lambda: bench_demotion(model, batch, phase, rounds, tokens_per_s, folder, click.echo),
        json_file,
    )


@bench.command()
@options
@json_option
def tiers(
    *,
    trace_file: Annotated[
        str | None,
        "Trace file to simulate, in the format of Mooncake, Azure or BurstGPT.",
        "--trace",
    ] = None,
    live: Annotated[bool, "Run conversations on a real local cluster instead."] = False,
    engine_tokens: Annotated[
        int | None, "Tokens of KVCache in engine memory; 500000 unless given, live 2048."
    ] = None,
    kv_tokens: Annotated[
        int | None, "Tokens of KVCache in DRAM; 1000000 unless given, live 6144."
    ] = None,
    ssd_tokens: Annotated[
        int | None, "Tokens of KVCache on the SSD; 20000000 unless given, live 65536."
    ] = None,
    requests: Annotated[int | None, "Use only the first requests of the trace, this many."] = None,
    model: Annotated[str, "Model of the live cluster."] = "random:m150",
    sessions: Annotated[int, "Number of live conversations."] = 16,
    turns: Annotated[int, "Turns of each live conversation."] = 5,
    seconds: Annotated[int, "Most seconds of live answering."] = 150,
    json_file: str | None,
) -> None:
    """Measure what each tier of the KVCache pool adds: engine memory, DRAM, remote DRAM, SSD."""
    if live == bool(trace_file):
        fail("give --trace FILE to simulate, or --live for a real cluster")
    from benchmarks.suite.pool.tiers import bench_tiers
    from benchmarks.suite.pool.tiers_live import bench_tiers_live

    def run() -> dict[str, Any]:
        if trace_file is None:
            sizes = (engine_tokens or 2048, kv_tokens or 6144, ssd_tokens or 65_536)
            return bench_tiers_live(model, sessions, turns, sizes, seconds, None, click.echo)
        sizes = (engine_tokens or 500_000, kv_tokens or 1_000_000, ssd_tokens or 20_000_000)
        return bench_tiers(trace_file, *sizes, requests, click.echo)

    show(run, json_file)


@bench.command()
@options
@json_option
def layers(
    *,
    model: Annotated[
        str | None, "Model; a random one with 32 KiB of KVCache per token unless given."
    ] = None,
    prefix_tokens: Annotated[tuple[int, ...], "Tokens of the loaded prefix; repeat for more."] = (
        1024,
        4096,
        8192,
    ),
    new_tokens: Annotated[int, "Prompt tokens after the prefix."] = 64,
    prompt_tokens: Annotated[
        tuple[int, ...], "Tokens of a prompt that is computed and stored; repeat for more."
    ] = (512, 1024, 2048),
    rounds: Rounds = 9,
    folder: Annotated[
        Path | None,
        "Folder on the disk to load from; that of temporary files unless given.",
        click.Path(file_okay=False, exists=True, path_type=Path),
    ] = None,
    mooncake: Annotated[str, "HOST:PORT of a mooncake_master to load from, too."] = "",
    json_file: str | None,
) -> None:
    """Compare layer-wise load and store with whole ones: SSD, shared memory and TCP."""
    from benchmarks.suite.pool.layers import DEFAULT_MODEL, bench_layers

    show(
        lambda: bench_layers(
            model or DEFAULT_MODEL,
            prefix_tokens,
            new_tokens,
            prompt_tokens,
            rounds,
            click.echo,
            folder,
            mooncake,
        ),
        json_file,
    )
