"""`moonpool bench agreement|overload|peers-live|colocated`, `moonpool compare`: life beside
simulation."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import click
import httpx
import msgspec

from moonpool.cli.output import COUNT, fail, write_json
from moonpool.cli.scale import SHARE, check_folders
from moonpool.cli.settings import read_text
from moonpool.config import Admission, choices

PROFILED_TOKENS = 2560
"""The longest prompt with its answer that a live profile asks for."""
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


@click.command()
@click.argument("simulated_file", type=click.Path())
@click.argument("live_file", type=click.Path())
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write the rows.")
def compare(simulated_file: str, live_file: str, json_file: str | None) -> None:
    """Lay `simulate --json` and `replay --json` side by side.

    Mean and P90 of TTFT and TBT must lie within 15 % of each other, rejections within 10 %. Ends
    with status 1 if they do not.
    """
    from moonpool.bench.comparison import compare as compared

    check_folders(json_file)
    try:
        comparison = compared(_figures(simulated_file), _figures(live_file))
    except (KeyError, TypeError) as error:
        fail(f"one of the files is no result of `simulate --json` or `replay --json`: no {error}")
    for line in comparison.lines():
        click.echo(line)
    write_json(json_file, msgspec.to_builtins(comparison) | {"passes": comparison.passes})
    if not comparison.passes:
        raise SystemExit(1)


def _figures(path: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(read_text(path, "the figures"))
    except msgspec.DecodeError as error:
        fail(f"{path} is no JSON: {error}")
    if not isinstance(found, dict):
        fail(f"{path} holds no figures")
    return found


def live_options(command: Any, seconds: float = 60.0) -> Any:
    """What describes the local cluster and what is sent to it, for so long by default."""
    options = [
        click.option("--model", default="random:m30", show_default=True),
        click.option("--kv-tokens", type=COUNT, default=65_536, show_default=True),
        click.option("--block-size", type=COUNT, default=16, show_default=True),
        click.option("--max-num-batched-tokens", type=COUNT, default=512, show_default=True),
        click.option("--threads", type=COUNT, default=1, show_default=True),
        click.option("--trace", "trace_file", default="", help="Instead of a drawn conversation."),
        click.option("--scale-tokens", "scale", type=SHARE, default="1/32", show_default=True),
        click.option(
            "--longest",
            type=COUNT,
            default=2048,
            show_default=True,
            help="Leave out requests of more tokens, scaled.",
        ),
        click.option("--seconds", type=_POSITIVE, default=seconds, show_default=True),
        click.option("--seed", type=int, default=1, show_default=True),
        click.option("--json", "json_file", type=click.Path(dir_okay=False)),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def cluster_and_workload(flags: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    from moonpool.bench.live_cluster import LiveCluster
    from moonpool.bench.live_workload import LiveWorkload

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


def run_bench(run: Callable[[], dict[str, Any]], json_file: str | None) -> dict[str, Any]:
    """Runs it, and turns what may go wrong into one line."""
    from moonpool.attention.client import AttentionError
    from moonpool.bench.live_profile import ProfileError
    from moonpool.bench.local_server import ServerError
    from moonpool.cli.origin import origin
    from moonpool.config import ConfigError
    from moonpool.replay.connection import ConnectionFailedError
    from moonpool.replay.player import HopelessError
    from moonpool.replay.server import ServerUnfitError
    from moonpool.trace.row import TraceError

    check_folders(json_file)
    # Told to end, it takes its servers along.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        found = run()
    except (
        AttentionError,
        ProfileError,
        ServerError,
        ConfigError,
        TraceError,
        ConnectionFailedError,
        HopelessError,
        ServerUnfitError,
        httpx.HTTPError,
    ) as error:
        fail(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)
    write_json(json_file, found | {"origin": origin()})
    return found


def profile_live(url: str, model: str | None, json_file: str | None) -> None:
    """`moonpool profile --url`. `model`: attention workers for it are measured, too."""
    from moonpool.bench.agreement import measure_live, with_parts
    from moonpool.bench.attention_parts import measure_parts, parts_words
    from moonpool.bench.live_workload import LiveWorkload

    check_folders(json_file)
    workload = LiveWorkload(longest_tokens=PROFILED_TOKENS)

    def measure() -> dict[str, Any]:
        profile = measure_live(url, workload, click.echo)
        if model is not None:
            parts = measure_parts(model)
            click.echo(parts_words(parts))
            profile = with_parts(profile, parts)
        found: dict[str, Any] = msgspec.to_builtins(profile.cost)
        return found

    write_json(json_file, run_bench(measure, None))


@click.command()
@live_options
@click.option("--prefill", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--decode", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--mixed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--attention",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Workers; they are there when the cluster is measured, too.",
)
@click.option(
    "--attention-own-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Of KVCache that instances keep beside these workers.",
)
@click.option(
    "--load", "loads", type=NUMBERS, default="0.5,0.8", show_default=True, help="Of capacity."
)
@click.option("--admission", type=click.Choice(choices(Admission)), default="early")
@click.option(
    "--repeats",
    type=COUNT,
    default=1,
    show_default=True,
    help="Live runs of the same requests; tells what is chance.",
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
    """Does the simulator tell what the local cluster does? The same requests, both ways."""
    from moonpool.bench.agreement import bench_agreement

    cluster, workload = cluster_and_workload(flags, prefill=prefill, decode=decode, mixed=mixed)
    cluster = cluster.with_(
        admission=admission, attention=attention, attention_own_tokens=attention_own_tokens
    )
    found = run_bench(
        lambda: bench_agreement(cluster, workload, loads, flags["seconds"], click.echo, repeats),
        json_file,
    )
    if not found["passes"]:
        raise SystemExit(1)


@click.command()
@live_options
@click.option("--prefill", type=COUNT, default=1, show_default=True)
@click.option("--decode", type=COUNT, default=1, show_default=True)
@click.option(
    "--admissions",
    default=",".join(choices(Admission)),
    show_default=True,
    help="Which, separated by commas.",
)
@click.option(
    "--loads", type=NUMBERS, default="1,2,3,4,5", show_default=True, help="Times its capacity."
)
@click.option(
    "--burst",
    type=click.FloatRange(min=1, max=4.9),
    default=2.5,
    show_default=True,
    help="How much denser requests come in the first 2 of every 10 seconds.",
)
@click.option("--prompts", type=COUNT, help="Tokens of every prompt, instead of those drawn.")
@click.option("--answers", type=COUNT, help="Tokens of every answer: long ones make decoding bind.")
@click.option("--slo-ttft", type=_POSITIVE, help="Seconds; 10 times the unloaded P90 unless given.")
@click.option("--slo-tbt", type=_POSITIVE, help="Seconds; 5 times the unloaded P90 unless given.")
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
    """The four admissions on the live local cluster at several times its capacity, in bursts; the
    simulated run beside each."""
    from moonpool.bench.overload import bench_overload

    names = dict.fromkeys(admissions.split(","))
    try:
        chosen = msgspec.convert(tuple(names), tuple[Admission, ...])
    except msgspec.ValidationError:
        fail(f"--admissions {admissions}: use some of {', '.join(choices(Admission))}")
    cluster, workload = cluster_and_workload(flags, prefill=prefill, decode=decode)
    workload = workload.with_(burst=burst, prompts=prompts or 0, answers=answers or 0)
    slo = slo_ttft, slo_tbt
    run_bench(
        lambda: bench_overload(
            cluster, workload, chosen, sorted(loads), flags["seconds"], click.echo, *slo
        ),
        json_file,
    )


@click.command("peers-live")
@live_options
@click.option("--peer-url", default="", help="A vLLM that serves the same model already.")
@click.option("--peer-python", default="", help="Python of a vLLM installation to start it with.")
@click.option("--peer-cores", default="", help="Its cores, such as 0-1; all unless given.")
@click.option("--peer-eager", is_flag=True, help="Do not let vLLM compile.")
@click.option(
    "--peer-batched-tokens",
    "batched",
    multiple=True,
    type=COUNT,
    help="vLLM's --max-num-batched-tokens; several: each is tried. Ours unless given.",
)
@click.option(
    "--peer-shape",
    "shapes",
    multiple=True,
    type=click.Choice(["one", "two", "pair", "pool"]),
    default=("one",),
    show_default=True,
    help="One vLLM; two, a request to either; 1P+1D over its Mooncake connector; two that share a"
    " Mooncake Store. Several may be given.",
)
@click.option(
    "--client",
    type=click.Choice(["moonpool", "vllm"]),
    default="moonpool",
    show_default=True,
    help="Who sends the requests: ours, or `vllm bench serve` of --peer-python.",
)
@click.option(
    "--loads",
    type=NUMBERS,
    default="0.25,0.5,1,1.5,2,3",
    show_default=True,
    help="Times what two colocated instances should bear.",
)
@click.option("--slo-ttft", type=_POSITIVE, help="Seconds; 10 times the unloaded P90 unless given.")
@click.option("--slo-tbt", type=_POSITIVE, help="Seconds; 5 times the unloaded P90 unless given.")
@click.option(
    "--admission",
    type=click.Choice(choices(Admission)),
    help="Ours; predictive, but none for vLLM's client, to which a refusal is a failure.",
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
    """moonpool (1P+1D, and 2 mixed) and vLLM under the same requests through HTTP.

    --model must be a checkpoint's folder with tokeniser files, which both can serve.
    """
    from moonpool.bench.peers_live import bench_peers_live
    from moonpool.bench.vllm_shapes import Peer
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
        Peer(peer_url, peer_python, peer_cores, peer_eager, shape, size)
        for shape in dict.fromkeys(shapes)
        for size in sorted(set(sizes))
    ]
    run_bench(
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
    help="Tokens of every prompt; one sweep for each.",
)
@click.option("--answers", type=COUNT, default=32, show_default=True, help="Tokens of each answer.")
@click.option(
    "--loads",
    type=NUMBERS,
    default="0.6,1.5",
    show_default=True,
    help="Times the higher simulated capacity.",
)
@click.option("--admission", type=click.Choice(choices(Admission)), default="predictive")
@click.option("--simulated-only", is_flag=True, help="No live runs: what a plan would say.")
def colocated(
    prompts: tuple[int, ...],
    answers: int,
    loads: tuple[float, ...],
    admission: Admission,
    simulated_only: bool,
    json_file: str | None,
    **flags: Any,
) -> None:
    """1 prefill + 1 decode instance against 2 mixed ones on the same cores, by prompt length and
    load: who serves more within the SLOs, simulated beforehand and live. About six minutes."""
    from moonpool.bench.colocated import bench_colocated

    cluster, workload = cluster_and_workload(flags, admission=admission)
    workload = workload.with_(answers=answers)
    run_bench(
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
