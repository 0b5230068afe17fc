"""`moonpool bench agreement|overload|peers-live|colocated`: live clusters and simulations."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any

import click
import msgspec

from moonpool.cli.options import COUNT, TOKEN_SHARE, json_option
from moonpool.cli.output import fail, run_measurement
from moonpool.config import Admission, choices

_POSITIVE = click.FloatRange(min=0, min_open=True)


class _Shares(click.ParamType[tuple[float, ...]]):
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
COLOCATED_S = 20.0
"""Of each of the dozen live runs that `bench colocated` makes by default."""


def live_options(command: Any, seconds: float = 60.0) -> Any:
    """What describes the local cluster and what is sent to it, for so long by default."""
    options = [
        *_cluster_options(),
        click.option(
            "--trace",
            "trace_file",
            default="",
            help="Trace file to use instead of a generated conversation.",
        ),
        click.option(
            "--scale-tokens",
            "scale",
            type=TOKEN_SHARE,
            default="1/32",
            show_default=True,
            help="Share of each prompt and answer to keep, such as 1/32.",
        ),
        click.option(
            "--longest",
            type=COUNT,
            default=2048,
            show_default=True,
            help="Leave out requests of more tokens than this, after scaling.",
        ),
        click.option(
            "--seconds",
            type=_POSITIVE,
            default=seconds,
            show_default=True,
            help="Seconds that one run takes.",
        ),
        click.option(
            "--seed", type=int, default=1, show_default=True, help="Seed of all random choices."
        ),
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _cluster_options() -> list[Any]:
    return [
        click.option(
            "--model",
            default="random:m30",
            show_default=True,
            help="Model: a built-in, or a Hugging Face folder or id.",
        ),
        click.option(
            "--kv-tokens",
            type=COUNT,
            default=65_536,
            show_default=True,
            help="Tokens of KVCache per instance.",
        ),
        click.option(
            "--block-size",
            type=COUNT,
            default=16,
            show_default=True,
            help="Tokens of one KVCache block.",
        ),
        click.option(
            "--max-num-batched-tokens",
            type=COUNT,
            default=512,
            show_default=True,
            help="Most tokens of one step (the prefill chunk).",
        ),
        click.option(
            "--threads",
            type=COUNT,
            default=1,
            show_default=True,
            help="CPU threads per engine process.",
        ),
    ]


def cluster_and_workload(flags: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    from moonpool.profiling.live_cluster import LiveCluster, LiveWorkload

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


@click.command()
@live_options
@click.option(
    "--prefill",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Number of prefill instances.",
)
@click.option(
    "--decode",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Number of decode instances.",
)
@click.option(
    "--mixed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of instances that both prefill and decode.",
)
@click.option(
    "--attention",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of attention workers, also while the cluster is profiled.",
)
@click.option(
    "--attention-own-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Tokens of KVCache that instances keep outside these workers.",
)
@click.option(
    "--load",
    "loads",
    type=NUMBERS,
    default="0.5,0.8",
    show_default=True,
    help="Loads to run, as shares of the capacity.",
)
@click.option(
    "--admission",
    type=click.Choice(choices(Admission)),
    default="early",
    help="Policy that rejects requests whose service levels would be missed.",
)
@click.option(
    "--repeats",
    type=COUNT,
    default=1,
    show_default=True,
    help="Live runs of the same requests; their spread shows what is chance.",
)
def agreement(
    loads: tuple[float, ...],
    repeats: int,
    prefill: int,
    decode: int,
    mixed: int,
    attention: int,
    attention_own_tokens: int,
    admission: Admission,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare the simulator with the local cluster on the same requests."""
    from benchmarks.suite.live.agreement import bench_agreement

    cluster, workload = cluster_and_workload(flags, prefill=prefill, decode=decode, mixed=mixed)
    cluster = cluster.with_(
        admission=admission, attention=attention, attention_own_tokens=attention_own_tokens
    )
    found = run_measurement(
        lambda: bench_agreement(cluster, workload, loads, flags["seconds"], click.echo, repeats),
        json_file,
    )
    if not found["passes"]:
        raise SystemExit(1)


@click.command()
@live_options
@click.option(
    "--prefill", type=COUNT, default=1, show_default=True, help="Number of prefill instances."
)
@click.option(
    "--decode", type=COUNT, default=1, show_default=True, help="Number of decode instances."
)
@click.option(
    "--admissions",
    default=",".join(choices(Admission)),
    show_default=True,
    help="Admission policies to run, separated by commas.",
)
@click.option(
    "--loads",
    type=NUMBERS,
    default="1,2,3,4,5",
    show_default=True,
    help="Loads to run, as multiples of the capacity.",
)
@click.option(
    "--burst",
    type=click.FloatRange(min=1, max=4.9),
    default=2.5,
    show_default=True,
    help="How much denser requests come in the first 2 of every 10 seconds.",
)
@click.option(
    "--prompts", type=COUNT, help="Tokens of every prompt, instead of those of the workload."
)
@click.option(
    "--answers",
    type=COUNT,
    help="Tokens of every answer; long answers make decoding the bottleneck.",
)
@click.option(
    "--slo-ttft",
    type=_POSITIVE,
    help="Service level for TTFT in seconds; 10 times the unloaded P90 unless given.",
)
@click.option(
    "--slo-tbt",
    type=_POSITIVE,
    help="Service level for TBT in seconds; 5 times the unloaded P90 unless given.",
)
def overload(
    admissions: str,
    loads: tuple[float, ...],
    burst: float,
    prompts: int | None,
    answers: int | None,
    slo_ttft: float | None,
    slo_tbt: float | None,
    prefill: int,
    decode: int,
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
    run_measurement(
        lambda: bench_overload(
            cluster, workload, chosen, sorted(loads), flags["seconds"], click.echo, *slo
        ),
        json_file,
    )


@click.command("peers-live")
@live_options
@click.option(
    "--peer-url", default="", help="Address of a vLLM that already serves the same model."
)
@click.option("--peer-python", default="", help="Python of a vLLM installation to start it with.")
@click.option("--peer-cores", default="", help="Cores of vLLM, such as 0-1; all unless given.")
@click.option("--peer-eager", is_flag=True, help="Keep vLLM from compiling.")
@click.option(
    "--peer-batched-tokens",
    "batched",
    multiple=True,
    type=COUNT,
    help="Value of vLLM's --max-num-batched-tokens; repeat for more, ours unless given.",
)
@click.option(
    "--peer-shape",
    "shapes",
    multiple=True,
    type=click.Choice(["one", "two", "pair", "pool"]),
    default=("one",),
    show_default=True,
    help="Shape of the peer: one vLLM; two with a request to either; 1P+1D over its"
    " Mooncake connector; two that share a Mooncake Store. Repeat for more.",
)
@click.option(
    "--client",
    type=click.Choice(["moonpool", "vllm"]),
    default="moonpool",
    show_default=True,
    help="Client that sends the requests: ours, or `vllm bench serve` of --peer-python.",
)
@click.option(
    "--loads",
    type=NUMBERS,
    default="0.25,0.5,1,1.5,2,3",
    show_default=True,
    help="Loads to run, as multiples of what two colocated instances should bear.",
)
@click.option(
    "--slo-ttft",
    type=_POSITIVE,
    help="Service level for TTFT in seconds; 10 times the unloaded P90 unless given.",
)
@click.option(
    "--slo-tbt",
    type=_POSITIVE,
    help="Service level for TBT in seconds; 5 times the unloaded P90 unless given.",
)
@click.option(
    "--admission",
    type=click.Choice(choices(Admission)),
    help="Admission of moonpool; predictive, but none for vLLM's client, to which a"
    " rejection is a failure.",
)
def peers_live(
    peer_url: str,
    peer_python: str,
    peer_cores: str,
    peer_eager: bool,
    batched: tuple[int, ...],
    shapes: tuple[Any, ...],
    client: Any,
    loads: tuple[float, ...],
    slo_ttft: float | None,
    slo_tbt: float | None,
    admission: Admission | None,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare moonpool (1P+1D, and 2 mixed) with vLLM on the same requests through HTTP.

    --model must be a checkpoint's folder with tokeniser files, which both can serve.
    """
    from benchmarks.suite.live.peers_live import bench_peers_live
    from benchmarks.suite.live.vllm_shapes import VllmTarget
    from moonpool.types import Slo

    if bool(peer_url) == bool(peer_python):
        fail("which vLLM? give --peer-url of one that runs, or --peer-python to start one")
    if peer_url and (client == "vllm" or batched or shapes != ("one",)):
        fail("--client vllm, --peer-shape and --peer-batched-tokens need --peer-python")
    if (slo_ttft is None) != (slo_tbt is None):
        fail("give both --slo-ttft and --slo-tbt, or neither")
    slo = None if slo_ttft is None or slo_tbt is None else Slo(ttft_s=slo_ttft, tbt_s=slo_tbt)
    admission = admission or ("none" if client == "vllm" else "predictive")
    cluster, workload = cluster_and_workload(flags, admission=admission)
    sizes = batched or (cluster.chunk_tokens,)
    peers = [
        VllmTarget(peer_url, peer_python, peer_cores, peer_eager, shape, size)
        for shape in dict.fromkeys(shapes)
        for size in sorted(set(sizes))
    ]
    run_measurement(
        lambda: bench_peers_live(
            cluster, workload, peers, client, slo, sorted(loads), flags["seconds"], click.echo
        ),
        json_file,
    )


@click.command()
@partial(live_options, seconds=COLOCATED_S)
@click.option(
    "--prompt",
    "prompts",
    type=COUNT,
    multiple=True,
    default=(64, 256, 1024),
    show_default=True,
    help="Tokens of every prompt; one sweep for each, repeat for more.",
)
@click.option("--answers", type=COUNT, default=32, show_default=True, help="Tokens of each answer.")
@click.option(
    "--loads",
    type=NUMBERS,
    default="0.6,1.5",
    show_default=True,
    help="Loads to run, as multiples of the higher simulated capacity.",
)
@click.option(
    "--admission",
    type=click.Choice(choices(Admission)),
    default="predictive",
    help="Policy that rejects requests whose service levels would be missed.",
)
@click.option(
    "--simulated-only", is_flag=True, help="Run the simulations alone, without live runs."
)
def colocated(
    prompts: tuple[int, ...],
    answers: int,
    loads: tuple[float, ...],
    admission: Admission,
    simulated_only: bool,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare 1 prefill + 1 decode instance with 2 mixed ones on the same cores.

    The result is who serves more within the SLOs, by prompt length and load, simulated beforehand
    and live. About six minutes.
    """
    from benchmarks.suite.live.colocated import bench_colocated

    cluster, workload = cluster_and_workload(flags, admission=admission)
    workload = workload.with_(answers=answers)
    run_measurement(
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
