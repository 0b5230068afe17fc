"""`moonpool bench agreement|overload|peers-live|colocated`: live clusters and simulations."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import click
import msgspec

from benchmarks.cli.annotated import Model, Seed, options
from benchmarks.cli.output import measure
from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.options import TOKEN_SHARE, ParamType, json_option
from moonpool.cli.output import fail
from moonpool.cli.server.address import KEYS_FOR_ANYBODY, Server, asks_server
from moonpool.config.tables import Admission, choices


class _Shares(ParamType[tuple[float, ...]]):
    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(word) for word in value.split(","))
        except ValueError:
            found = ()
        if not found or not all(0 < number < 100 for number in found):
            self.fail(f"{value!r} is no list of numbers above 0 such as 0.5,0.8", param, ctx)
        return found


NUMBERS = _Shares()
WHAT_RUNS = ("--model", "--trace", "--seconds", "--scale-tokens", "--kv-tokens", "--threads")
SCREEN = (*WHAT_RUNS, "--seed", "--json")
COLOCATED_S = 20.0
"""Seconds of each of the dozen live runs that `bench colocated` makes by default."""


def live_options(command: Any, seconds: float = 60.0) -> Any:
    """Adds the options that describe the local cluster and the requests, which are sent for this
    long by default."""

    def live(
        *,
        model: Model = "random:m30",
        kv_tokens: Annotated[int, "Tokens of KVCache per instance."] = 65_536,
        block_size: Annotated[int, "Tokens of one KVCache block."] = 16,
        max_num_batched_tokens: Annotated[
            int, "Most tokens of one step (the prefill chunk)."
        ] = 512,
        threads: Annotated[int, "CPU threads per engine process."] = 1,
        trace_file: Annotated[
            str, "Trace file to use instead of a generated conversation.", "--trace"
        ] = "",
        scale: Annotated[
            Any,
            "Share of each prompt and answer to keep, such as 1/32.",
            "--scale-tokens",
            TOKEN_SHARE,
        ] = "1/32",
        longest: Annotated[
            int, "Leave out requests of more tokens than this, after scaling."
        ] = 2048,
        seconds: Annotated[float, "Seconds that one run takes."] = seconds,
        seed: Seed = 1,
    ) -> None: ...

    return options(json_option(command), live)


def cluster_and_workload(flags: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    from moonpool_lab.profiling.live_cluster import LiveCluster, LiveWorkload

    scale: Fraction = flags["scale"]
    workload = LiveWorkload(
        scale=scale,
        seed=flags["seed"],
        trace_file=flags["trace_file"],
        longest_tokens=flags["longest"],
    )
    cluster = LiveCluster(
        model=flags["model"],
        kv_tokens=flags["kv_tokens"],
        block_tokens=flags["block_size"],
        chunk_tokens=flags["max_num_batched_tokens"],
        threads=flags["threads"],
    )
    return cluster.with_(**changes), workload


@click.command(
    cls=ScreenHelp,
    screen=(
        *SCREEN,
        "--prefill",
        "--decode",
        "--mixed",
        "--load",
        "--repeats",
    ),
)
@live_options
@options
def agreement(
    *,
    prefill: Annotated[int, "Number of prefill instances.", click.IntRange(min=0)] = 1,
    decode: Annotated[int, "Number of decode instances.", click.IntRange(min=0)] = 1,
    mixed: Annotated[
        int, "Number of instances that both prefill and decode.", click.IntRange(min=0)
    ] = 0,
    attention: Annotated[
        int,
        "Number of attention workers, also while the cluster is profiled.",
        click.IntRange(min=0),
    ] = 0,
    attention_own_tokens: Annotated[
        int, "Tokens of KVCache that instances keep outside these workers.", click.IntRange(min=0)
    ] = 0,
    loads: Annotated[
        Any, "Loads to run, as shares of the capacity.", "--load", NUMBERS
    ] = "0.5,0.8",
    admission: Annotated[
        Admission, "Policy that rejects requests whose service levels would be missed."
    ] = "early",
    repeats: Annotated[
        int, "Live runs of the same requests; their spread shows what is chance."
    ] = 1,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare the simulator with the local cluster on the same requests."""
    from benchmarks.suite.live.agreement import bench_agreement

    cluster, workload = cluster_and_workload(flags, prefill=prefill, decode=decode, mixed=mixed)
    cluster = cluster.with_(
        admission=admission, attention=attention, attention_own_tokens=attention_own_tokens
    )
    found = measure(
        lambda: bench_agreement(cluster, workload, loads, flags["seconds"], click.echo, repeats),
        json_file,
    )
    if not found["passes"]:
        raise SystemExit(1)


@click.command(
    cls=ScreenHelp,
    screen=(
        *SCREEN,
        "--prefill",
        "--decode",
        "--loads",
        "--slo-ttft",
        "--slo-tbt",
    ),
)
@live_options
@options
def overload(
    *,
    prefill: Annotated[int, "Number of prefill instances."] = 1,
    decode: Annotated[int, "Number of decode instances."] = 1,
    admissions: Annotated[str, "Admission policies to run, separated by commas."] = ",".join(
        choices(Admission)
    ),
    loads: Annotated[Any, "Loads to run, as multiples of the capacity.", NUMBERS] = "1,2,3,4,5",
    burst: Annotated[
        float,
        "How much denser requests come in the first 2 of every 10 seconds.",
        click.FloatRange(min=1, max=4.9),
    ] = 2.5,
    prompts: Annotated[
        int | None, "Tokens of every prompt, instead of those of the workload."
    ] = None,
    answers: Annotated[
        int | None, "Tokens of every answer; long answers make decoding the bottleneck."
    ] = None,
    slo_ttft: Annotated[
        float | None, "Service level for TTFT in seconds; 10 times the unloaded P90 unless given."
    ] = None,
    slo_tbt: Annotated[
        float | None, "Service level for TBT in seconds; 5 times the unloaded P90 unless given."
    ] = None,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Run the four admissions on the live local cluster at several times its capacity, in bursts.

    A simulated run stands next to each live one.
    """
    from benchmarks.suite.live.overload import bench_overload

    names = dict.fromkeys(admissions.split(","))
    try:
        chosen = msgspec.convert(tuple(names), tuple[Admission, ...])
    except msgspec.ValidationError:
        fail(f"--admissions {admissions}: use some of {', '.join(choices(Admission))}")
    cluster, workload = cluster_and_workload(flags, prefill=prefill, decode=decode)
    workload = workload.with_(burst=burst, prompts=prompts or 0, answers=answers or 0)
    slo = slo_ttft, slo_tbt
    measure(
        lambda: bench_overload(
            cluster, workload, chosen, sorted(loads), flags["seconds"], click.echo, *slo
        ),
        json_file,
    )


@click.command(
    "peers-live",
    cls=ScreenHelp,
    screen=(
        *SCREEN,
        "--peer-url",
        "--peer-python",
        "--client",
        "--loads",
        "--slo-ttft",
        "--slo-tbt",
    ),
)
@asks_server(default=None, former_flag="--peer-url", keys=KEYS_FOR_ANYBODY)
@live_options
@options
def peers_live(
    *,
    server: Server | None,
    peer_python: Annotated[str, "Python of a vLLM installation to start it with."] = "",
    peer_cores: Annotated[str, "Cores of vLLM, such as 0-1; all unless given."] = "",
    peer_eager: Annotated[bool, "Keep vLLM from compiling."] = False,
    batched: Annotated[
        tuple[int, ...],
        "Value of vLLM's --max-num-batched-tokens; repeat for more, ours unless given.",
        "--peer-batched-tokens",
    ] = (),
    shapes: Annotated[
        tuple[Any, ...],
        "Shape of the peer: one vLLM; two with a request to either; 1P+1D over its"
        " Mooncake connector; two that share a Mooncake Store. Repeat for more.",
        "--peer-shape",
        click.Choice(["one", "two", "pair", "pool"]),
    ] = ("one",),
    client: Annotated[
        Any,
        "Client that sends the requests: ours, or `vllm bench serve` of --peer-python.",
        click.Choice(["moonpool", "vllm"]),
    ] = "moonpool",
    loads: Annotated[
        Any, "Loads to run, as multiples of what two colocated instances should bear.", NUMBERS
    ] = "0.25,0.5,1,1.5,2,3",
    slo_ttft: Annotated[
        float | None, "Service level for TTFT in seconds; 10 times the unloaded P90 unless given."
    ] = None,
    slo_tbt: Annotated[
        float | None, "Service level for TBT in seconds; 5 times the unloaded P90 unless given."
    ] = None,
    admission: Annotated[
        Admission | None,
        "Admission of moonpool; predictive, but none for vLLM's client, to which a"
        " rejection is a failure.",
    ] = None,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare moonpool (1P+1D, and 2 mixed) with vLLM on the same requests through HTTP.

    URL (or HOST:PORT) is a vLLM that serves the same model already. --model must be a checkpoint's
    folder with tokeniser files, which both can serve.
    """
    from benchmarks.suite.live.peers_live import OPEN, Access, bench_peers_live
    from benchmarks.suite.live.vllm_shapes import VllmTarget
    from moonpool.types import Slo

    if bool(server) == bool(peer_python):
        fail("which vLLM? give the URL of one that runs, or --peer-python to start one")
    access = Access(server.url, server.api_key, server.ca_file) if server else OPEN
    if server and (client == "vllm" or batched or shapes != ("one",)):
        fail("--client vllm, --peer-shape and --peer-batched-tokens need --peer-python")
    if (slo_ttft is None) != (slo_tbt is None):
        fail("give both --slo-ttft and --slo-tbt, or neither")
    slo = None if slo_ttft is None or slo_tbt is None else Slo(ttft_s=slo_ttft, tbt_s=slo_tbt)
    admission = admission or ("none" if client == "vllm" else "predictive")
    cluster, workload = cluster_and_workload(flags, admission=admission)
    sizes = batched or (cluster.chunk_tokens,)
    peers = [
        VllmTarget(access.url, peer_python, peer_cores, peer_eager, shape, size)
        for shape in dict.fromkeys(shapes)
        for size in sorted(set(sizes))
    ]
    asked = (cluster, workload, peers, client, slo, sorted(loads), flags["seconds"])
    measure(lambda: bench_peers_live(*asked, click.echo, access), json_file)


@click.command()
@partial(live_options, seconds=COLOCATED_S)
@options
def colocated(
    *,
    prompts: Annotated[
        tuple[int, ...], "Tokens of every prompt; one sweep for each, repeat for more.", "--prompt"
    ] = (64, 256, 1024),
    answers: Annotated[int, "Tokens of each answer."] = 32,
    loads: Annotated[
        Any, "Loads to run, as multiples of the higher simulated capacity.", NUMBERS
    ] = "0.6,1.5",
    admission: Annotated[
        Admission, "Policy that rejects requests whose service levels would be missed."
    ] = "predictive",
    simulated_only: Annotated[bool, "Run the simulations alone, without live runs."] = False,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare 1 prefill + 1 decode instance with 2 mixed ones on the same cores.

    The result is who serves more within the SLOs, by prompt length and load, simulated beforehand
    and live. Takes about six minutes.
    """
    from benchmarks.suite.live.colocated import bench_colocated

    cluster, workload = cluster_and_workload(flags, admission=admission)
    workload = workload.with_(answers=answers)
    measure(
        lambda: bench_colocated(
            cluster,
            workload,
            prompts,
            sorted(loads),
            flags["seconds"],
            not simulated_only,
            click.echo,
        ),
        json_file,
    )
