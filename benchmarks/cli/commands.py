"""The commands that a checkout adds to `moonpool bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.cli.admission import admission
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
from benchmarks.cli.plan import plan
from benchmarks.cli.reuse import prefetch, reuse
from benchmarks.cli.roles import autoscale, role_balance, role_decisions
from benchmarks.cli.speculation import speculation
from benchmarks.cli.start import start
from benchmarks.cli.trials import trials
from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import fail, show_figures
from moonpool.config import Admission, ConductorConfig, Placement, choices


@click.group()
def bench() -> None:
    """Benchmarks of the parts."""


bench.add_command(reuse)
bench.add_command(prefetch)
bench.add_command(attention)
bench.add_command(agreement)
bench.add_command(overload)
bench.add_command(colocated)
bench.add_command(peers_live)
bench.add_command(conversations)
bench.add_command(engine)
bench.add_command(quantization)
bench.add_command(formats)
bench.add_command(kv_formats)
bench.add_command(sarathi)
bench.add_command(pipeline)
bench.add_command(tensor)
bench.add_command(fronts)
bench.add_command(idle)
bench.add_command(start)
bench.add_command(faults)
bench.add_command(kills)
bench.add_command(plan)
bench.add_command(admission)
bench.add_command(speculation)
bench.add_command(trials)
bench.add_command(role_balance)
bench.add_command(role_decisions)
bench.add_command(autoscale)


@bench.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option(
    "--threads", type=COUNT, default=1, show_default=True, help="CPU threads per engine process."
)
@click.option(
    "--seconds",
    type=click.FloatRange(1.0),
    default=20.0,
    show_default=True,
    help="Seconds that one run takes.",
)
@click.option(
    "--rounds",
    type=COUNT,
    default=3,
    show_default=True,
    help="Measure each case this often, in turn.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@json_option
def pinning(
    model: str, threads: int, seconds: float, rounds: int, seed: int, json_file: str | None
) -> None:
    """Measure gaps between tokens of 1 prefill + 1 decode, with engines pinned to cores or not."""
    import httpx

    from benchmarks.suite.live.pinning import PinningBenchError, bench_pinning
    from moonpool.demo.local_server import ServerError

    try:
        found = bench_pinning(model, threads, seconds, rounds, seed, click.echo)
    except (PinningBenchError, ServerError, httpx.HTTPError) as error:
        fail(str(error))
    show_figures(found, json_file)


@bench.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option(
    "--prefix-tokens",
    type=COUNT,
    default=4096,
    show_default=True,
    help="Tokens of the shared prefix.",
)
@click.option(
    "--repeats", type=COUNT, default=3, show_default=True, help="Measure each case this often."
)
@json_option
def cached(model: str, prefix_tokens: int, repeats: int, json_file: str | None) -> None:
    """Measure TTFT of a long prompt: computed, cached here, and fetched from another process."""
    import httpx

    from benchmarks.suite.live.cached import CachedBenchError, bench_cached
    from moonpool.demo.local_server import ServerError

    try:
        found = bench_cached(model, prefix_tokens, repeats)
    except (CachedBenchError, ServerError, httpx.HTTPError) as error:
        fail(str(error))
    show_figures(found | {"model": model}, json_file)


@bench.command()
@click.argument("model", default="smollm2")
@click.option(
    "--prefix-tokens",
    type=COUNT,
    default=4096,
    show_default=True,
    help="Tokens of the long conversation.",
)
@click.option(
    "--repeats", type=COUNT, default=1, show_default=True, help="Long conversations to measure."
)
@json_option
def restart(model: str, prefix_tokens: int, repeats: int, json_file: str | None) -> None:
    """Kill a whole server and start it again: TTFT and hits, from SSD and from kept memory.

    The SSD's files are below the folder for temporary files (TMPDIR).
    """
    import httpx

    from benchmarks.suite.live.restart import RestartBenchError, bench_restart
    from moonpool.demo.local_server import ServerError

    try:
        found = bench_restart(model, prefix_tokens, repeats)
    except (RestartBenchError, ServerError, httpx.HTTPError) as error:
        fail(str(error))
    show_figures(found | {"model": model}, json_file)


@bench.command()
@click.option(
    "--concurrency",
    multiple=True,
    type=COUNT,
    default=(1, 8),
    show_default=True,
    help="Number of clients at once; repeat for more.",
)
@json_option
def head(concurrency: tuple[int, ...], json_file: str | None) -> None:
    """Measure the CPU time of the head per request and per token on a real cluster."""
    import httpx

    from benchmarks.suite.live.head import bench_head
    from moonpool.demo.local_server import ServerError

    try:
        found = bench_head(concurrency)
    except (ServerError, httpx.HTTPError) as error:
        fail(f"the server failed: {type(error).__name__}: {error}")
    show_figures(found, json_file)


@bench.command()
@click.option(
    "--instances",
    multiple=True,
    type=COUNT,
    default=(16, 100, 1000, 3000),
    show_default=True,
    help="Number of instances; repeat for more.",
)
@click.option(
    "--blocks", type=COUNT, default=1000, show_default=True, help="Cached blocks per instance."
)
@click.option(
    "--in-flight",
    type=COUNT,
    default=10,
    show_default=True,
    help="Requests in flight per instance.",
)
@click.option(
    "--decisions", type=COUNT, default=500, show_default=True, help="Number of decisions to time."
)
@click.option(
    "--placement",
    type=click.Choice(choices(Placement)),
    default="kvcache-centric",
    help="Policy that chooses the prefill instance of a request.",
)
@click.option(
    "--admission",
    type=click.Choice(choices(Admission)),
    default="predictive",
    help="Policy that rejects requests whose service levels would be missed.",
)
@json_option
def conductor(
    instances: tuple[int, ...],
    blocks: int,
    in_flight: int,
    decisions: int,
    placement: Placement,
    admission: Admission,
    json_file: str | None,
) -> None:
    """Measure microseconds per decision, ending, token and block event over the instances."""
    from benchmarks.suite.cluster.conductor import bench_conductor

    if min(instances) < 2:
        fail("--instances must be at least 2: one for prefill and one for decode")
    config = ConductorConfig(placement=placement, admission=admission)
    found = bench_conductor(instances, blocks, in_flight, decisions, config, click.echo)
    show_figures(found | {"blocks_per_instance": blocks, "decisions": decisions}, json_file)


@bench.command()
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=(COUNT, COUNT),
    default=((16, 12_031), (100, 25_000), (1000, 100_000)),
    show_default=True,
    help="Instances and requests; repeat for more. The default takes some minutes.",
)
@json_option
def simulator(sizes: tuple[tuple[int, int], ...], json_file: str | None) -> None:
    """Measure time and memory of a simulation over its size."""
    from benchmarks.suite.cluster.simulator import SimulatorBenchError, bench_simulator

    if min(instances for instances, _ in sizes) < 2:
        fail("--size needs at least 2 instances: one for prefill and one for decode")
    runs = []
    try:
        for found in bench_simulator(sizes):
            click.echo(
                f"{found['instances']:>6} instances {found['requests']:>9,} requests"
                f" {found['wall_s']:>9.1f} s {found['us_per_request']:>7.0f} us each,"
                f" {found['peak_mib']:,} MiB"
            )
            runs.append(found)
    except SimulatorBenchError as error:
        fail(str(error))
    show_figures({"runs": runs}, json_file)


@bench.command()
@click.option(
    "--blocks",
    type=COUNT,
    default=1_000_000,
    show_default=True,
    help="Number of blocks in the index.",
)
@click.option(
    "--instances", type=COUNT, default=1000, show_default=True, help="Number of instances."
)
@json_option
def index(blocks: int, instances: int, json_file: str | None) -> None:
    """Measure memory of the Conductor's index, and time to match 256 blocks, against limits."""
    from benchmarks.suite.pool.index import IndexBenchError, bench_index

    try:
        found = bench_index(blocks, instances, click.echo)
    except IndexBenchError as error:
        fail(str(error))
    show_figures(found, json_file)


@bench.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option(
    "--batch", type=COUNT, default=4, show_default=True, help="Answers to decode at once."
)
@click.option(
    "--phase",
    type=click.FloatRange(min=0.2),
    default=1.5,
    show_default=True,
    help="Seconds of one phase.",
)
@click.option(
    "--rounds",
    type=COUNT,
    default=14,
    show_default=True,
    help="Number of quiet and busy phases each.",
)
@click.option(
    "--tokens-per-s",
    type=COUNT,
    default=16_000,
    show_default=True,
    help="Tokens of KVCache per second that the SSD reads or writes.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder on the disk to use; that of temporary files unless given.",
)
@json_option
def demotion(
    model: str,
    batch: int,
    phase: float,
    rounds: int,
    tokens_per_s: int,
    folder: Path | None,
    json_file: str | None,
) -> None:
    """Measure time between tokens with the instance's SSD busy and idle. Three minutes."""
    from benchmarks.suite.pool.demotion import DemotionBenchError, bench_demotion

    try:
        found = bench_demotion(model, batch, phase, rounds, tokens_per_s, folder, click.echo)
    except DemotionBenchError as error:
        fail(str(error))
    show_figures(found, json_file)


@bench.command()
@click.option(
    "--trace",
    "trace_file",
    help="Trace file to simulate, in the format of Mooncake, Azure or BurstGPT.",
)
@click.option("--live", is_flag=True, help="Run conversations on a real local cluster instead.")
@click.option(
    "--engine-tokens",
    type=COUNT,
    help="Tokens of KVCache in engine memory; 500000 unless given, live 2048.",
)
@click.option(
    "--kv-tokens", type=COUNT, help="Tokens of KVCache in DRAM; 1000000 unless given, live 6144."
)
@click.option(
    "--ssd-tokens",
    type=COUNT,
    help="Tokens of KVCache on the SSD; 20000000 unless given, live 65536.",
)
@click.option("--requests", type=COUNT, help="Use only the first requests of the trace, this many.")
@click.option(
    "--model", default="random:m150", show_default=True, help="Model of the live cluster."
)
@click.option(
    "--sessions", type=COUNT, default=16, show_default=True, help="Number of live conversations."
)
@click.option(
    "--turns", type=COUNT, default=5, show_default=True, help="Turns of each live conversation."
)
@click.option(
    "--seconds", type=COUNT, default=150, show_default=True, help="Most seconds of live answering."
)
@json_option
def tiers(
    trace_file: str | None,
    live: bool,
    engine_tokens: int | None,
    kv_tokens: int | None,
    ssd_tokens: int | None,
    requests: int | None,
    model: str,
    sessions: int,
    turns: int,
    seconds: int,
    json_file: str | None,
) -> None:
    """Measure what each tier of the KVCache pool adds: engine memory, DRAM, remote DRAM, SSD."""
    if live == bool(trace_file):
        fail("give --trace FILE to simulate, or --live for a real cluster")
    if live:
        sizes = (engine_tokens or 2048, kv_tokens or 6144, ssd_tokens or 65_536)
        show_figures(_tiers_live(model, sessions, turns, sizes, seconds), json_file)
        return
    from benchmarks.suite.pool.tiers import bench_tiers
    from moonpool.config import ConfigError
    from moonpool.trace.row import TraceError

    assert trace_file is not None
    sizes = (engine_tokens or 500_000, kv_tokens or 1_000_000, ssd_tokens or 20_000_000)
    try:
        found = bench_tiers(trace_file, *sizes, requests, click.echo)
    except (ConfigError, TraceError) as error:
        fail(str(error))
    show_figures(found, json_file)


def _tiers_live(
    model: str, sessions: int, turns: int, sizes: tuple[int, int, int], seconds: int
) -> dict[str, Any]:
    import httpx

    from benchmarks.suite.pool.tiers_live import LiveTiersError, bench_tiers_live
    from moonpool.demo.local_server import ServerError

    try:
        return bench_tiers_live(model, sessions, turns, sizes, seconds, None, click.echo)
    except (LiveTiersError, ServerError, httpx.HTTPError) as error:
        fail(str(error))


@bench.command()
@click.option("--model", help="Model; a random one with 32 KiB of KVCache per token unless given.")
@click.option(
    "--prefix-tokens",
    multiple=True,
    type=COUNT,
    default=(1024, 4096, 8192),
    show_default=True,
    help="Tokens of the loaded prefix; repeat for more.",
)
@click.option(
    "--new-tokens",
    type=COUNT,
    default=64,
    show_default=True,
    help="Prompt tokens after the prefix.",
)
@click.option(
    "--prompt-tokens",
    multiple=True,
    type=COUNT,
    default=(512, 1024, 2048),
    show_default=True,
    help="Tokens of a prompt that is computed and stored; repeat for more.",
)
@click.option(
    "--rounds",
    type=COUNT,
    default=9,
    show_default=True,
    help="Measure each case this often, in turn.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder on the disk to load from; that of temporary files unless given.",
)
@click.option("--mooncake", default="", help="HOST:PORT of a mooncake_master to load from, too.")
@json_option
def layers(
    model: str | None,
    prefix_tokens: tuple[int, ...],
    new_tokens: int,
    prompt_tokens: tuple[int, ...],
    rounds: int,
    folder: Path | None,
    mooncake: str,
    json_file: str | None,
) -> None:
    """Compare layer-wise load and store with whole ones: SSD, shared memory and TCP."""
    from benchmarks.suite.pool.layers import DEFAULT_MODEL, bench_layers
    from benchmarks.suite.pool.layers_local import LayersBenchError
    from moonpool.engine.spec import ModelError
    from moonpool.storage.folder import StoreError
    from moonpool.transfer.arena import ArenaError

    try:
        found = bench_layers(
            model or DEFAULT_MODEL,
            prefix_tokens,
            new_tokens,
            prompt_tokens,
            rounds,
            click.echo,
            folder,
            mooncake,
        )
    except (ArenaError, LayersBenchError, ModelError, StoreError) as error:
        fail(str(error))
    show_figures(found, json_file)
