"""`moonpool bench NAME`: benchmarks of the parts, each against a limit or a peer in the same
run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from moonpool.cli.attention import attention
from moonpool.cli.bench_tensor import tensor
from moonpool.cli.capacity import capacity
from moonpool.cli.fronts import fronts
from moonpool.cli.live import agreement, colocated, overload, peers_live
from moonpool.cli.origin import origin
from moonpool.cli.output import COUNT, fail, write_json
from moonpool.config import Admission, ConductorConfig, Placement, choices

JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write figures.")


@click.group()
def bench() -> None:
    """Benchmarks of the parts."""


bench.add_command(attention)
bench.add_command(capacity)
bench.add_command(agreement)
bench.add_command(overload)
bench.add_command(colocated)
bench.add_command(peers_live)
bench.add_command(tensor)
bench.add_command(fronts)


@bench.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option(
    "--peer-python", help="Python of an installation of vLLM's CPU build to compare with."
)
@click.option(
    "--openvino-python", help="Python that has openvino-genai and optimum-intel, likewise."
)
@click.option("--llama-python", help="Python that has llama-cpp-python and gguf, likewise.")
@click.option("--peer-eager", is_flag=True, help="Do not let vLLM compile (starts sooner, slower).")
@click.option(
    "--prompt", "prefills", multiple=True, type=COUNT, default=(512, 2048, 8192), show_default=True
)
@click.option(
    "--batch", "batches", multiple=True, type=COUNT, default=(1, 8, 32), show_default=True
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=COUNT,
    default=(512, 4096),
    show_default=True,
    help="Of each decode. All prompts are computed: 32 of 4,096 take minutes.",
)
@click.option("--chunk-tokens", type=COUNT, default=512, show_default=True, help="At all engines.")
@click.option(
    "--repeats", type=COUNT, default=3, show_default=True, help="Of a prefill; the best counts."
)
@JSON
def engine(
    model: str,
    peer_python: str | None,
    openvino_python: str | None,
    llama_python: str | None,
    peer_eager: bool,
    prefills: tuple[int, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    chunk_tokens: int,
    repeats: int,
    json_file: str | None,
) -> None:
    """Prefill and decode, against GEMM rate and memory bandwidth, vLLM, OpenVINO and llama.cpp. One
    thread."""
    from moonpool.bench.engine import PeerError, bench_engine
    from moonpool.bench.engine_rows import Rows
    from moonpool.engine.spec import ModelError

    rows = Rows(prefills, batches, contexts, chunk_tokens)
    pythons = {"vllm": peer_python, "openvino": openvino_python, "llama.cpp": llama_python}
    peers = {name: python for name, python in pythons.items() if python is not None}
    try:
        found = bench_engine(model, rows, peers, peer_eager, repeats, click.echo)
    except (PeerError, ModelError) as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option("--model", default="moonpool/induction", show_default=True)
@click.option("--prompts", type=COUNT, default=32, show_default=True)
@click.option("--answer-tokens", type=COUNT, default=64, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@JSON
def quantization(
    model: str, prompts: int, answer_tokens: int, seed: int, json_file: str | None
) -> None:
    """Weights of 8 bits beside bfloat16: KL, perplexity, greedy answers, and tokens/s. One
    thread."""
    from moonpool.bench.quantization import bench_quantization
    from moonpool.engine.spec import ModelError

    try:
        found = bench_quantization(model, prompts, answer_tokens, seed, click.echo)
    except ModelError as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Of each single step.")
@click.option("--seed", type=int, default=0, show_default=True)
@JSON
def sarathi(model: str, repeats: int, seed: int, json_file: str | None) -> None:
    """Chunked prefill on this engine: decode speed-ups, P:D, tails of TBT, KVCache occupation;
    measured and predicted. One thread, about three minutes."""
    from moonpool.bench.sarathi import bench_sarathi
    from moonpool.engine.spec import ModelError

    try:
        found = bench_sarathi(model, repeats, seed, click.echo)
    except ModelError as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option("--stages", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option("--prompt-tokens", type=COUNT, default=16_384, show_default=True)
@click.option("--max-num-batched-tokens", type=COUNT, default=512, show_default=True)
@click.option("--short-tokens", type=COUNT, default=256, show_default=True)
@click.option("--repeats", type=COUNT, default=5, show_default=True, help="Of the short prompt.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(["long", "short", "mixed", "decode"]),
    help="Only these; all unless given.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@JSON
def pipeline(
    model: str,
    stages: int,
    prompt_tokens: int,
    max_num_batched_tokens: int,
    short_tokens: int,
    repeats: int,
    seed: int,
    parts: tuple[str, ...],
    device: str,
    json_file: str | None,
) -> None:
    """An instance of several stages beside one of one: a long prompt, a short one, prompts with
    decodes, decodes; measured, and simulated for up to 8. One thread a stage, three minutes."""
    from moonpool.bench.pipeline import PARTS, bench_pipeline
    from moonpool.engine.cuda.choice import check_device
    from moonpool.engine.stages.fellows import StageLostError
    from moonpool.messenger.arena import ArenaError

    chunk_tokens = max_num_batched_tokens
    try:
        check_device(device)
        found = bench_pipeline(
            model,
            stages,
            prompt_tokens,
            chunk_tokens,
            short_tokens,
            repeats,
            seed,
            parts or PARTS,
            click.echo,
            device,
        )
    except (ArenaError, StageLostError, ValueError) as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option("--threads", type=COUNT, default=1, show_default=True, help="Of each engine.")
@click.option("--seconds", type=click.FloatRange(1.0), default=20.0, show_default=True)
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Of each, taking turns.")
@click.option("--seed", type=int, default=0, show_default=True)
@JSON
def pinning(
    model: str, threads: int, seconds: float, rounds: int, seed: int, json_file: str | None
) -> None:
    """Gaps between tokens of 1 prefill + 1 decode, engines on cores of their own or anywhere."""
    import httpx

    from moonpool.bench.local_server import ServerError
    from moonpool.bench.pinning import PinningBenchError, bench_pinning

    try:
        found = bench_pinning(model, threads, seconds, rounds, seed, click.echo)
    except (PinningBenchError, ServerError, httpx.HTTPError) as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option("--prefix-tokens", type=COUNT, default=4096, show_default=True)
@click.option("--repeats", type=COUNT, default=3, show_default=True)
@JSON
def cached(model: str, prefix_tokens: int, repeats: int, json_file: str | None) -> None:
    """Time to first token of a long prompt: computed, from cache, fetched from another process."""
    import httpx

    from moonpool.bench.cached import CachedBenchError, bench_cached
    from moonpool.bench.local_server import ServerError

    try:
        found = bench_cached(model, prefix_tokens, repeats)
    except (CachedBenchError, ServerError, httpx.HTTPError) as error:
        fail(str(error))
    finish(found | {"model": model}, json_file)


@bench.command()
@click.option("--concurrency", multiple=True, type=COUNT, default=(1, 8), show_default=True)
@JSON
def head(concurrency: tuple[int, ...], json_file: str | None) -> None:
    """CPU time of the head per request and per token, on a real cluster."""
    import httpx

    from moonpool.bench.head import bench_head
    from moonpool.bench.local_server import ServerError

    try:
        found = bench_head(concurrency)
    except (ServerError, httpx.HTTPError) as error:
        fail(f"the server failed: {type(error).__name__}: {error}")
    finish(found, json_file)


@bench.command()
@click.option(
    "--size-kib",
    "sizes_kib",
    multiple=True,
    type=COUNT,
    default=(64, 256, 1024, 4096, 16384),
    show_default=True,
    help="Of a block: a power of two from 64 to 16384.",
)
@click.option("--rounds", type=COUNT, default=15, show_default=True)
@click.option(
    "--peer-python",
    help="Python of an installation of the Mooncake Store and of redis to compare with.",
)
@JSON
def transfer(
    sizes_kib: tuple[int, ...], rounds: int, peer_python: str | None, json_file: str | None
) -> None:
    """Blocks between two processes, against memcpy, bare sockets, the Mooncake Store and Redis."""
    from moonpool.bench.transfer import TransferBenchError, bench_transfer

    if any(size & (size - 1) or not 64 <= size <= 16384 for size in sizes_kib):
        fail("--size-kib must be a power of two from 64 to 16384")
    sizes = tuple(size << 10 for size in sizes_kib)
    try:
        found = bench_transfer(sizes, rounds, peer_python, click.echo)
    except TransferBenchError as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option(
    "--instances", multiple=True, type=COUNT, default=(16, 100, 1000, 3000), show_default=True
)
@click.option("--blocks", type=COUNT, default=1000, show_default=True, help="Per instance.")
@click.option("--in-flight", type=COUNT, default=10, show_default=True, help="Per instance.")
@click.option("--decisions", type=COUNT, default=500, show_default=True)
@click.option("--placement", type=click.Choice(choices(Placement)), default="kvcache-centric")
@click.option("--admission", type=click.Choice(choices(Admission)), default="predictive")
@JSON
def conductor(
    instances: tuple[int, ...],
    blocks: int,
    in_flight: int,
    decisions: int,
    placement: Placement,
    admission: Admission,
    json_file: str | None,
) -> None:
    """Microseconds per decision, ending, token and block event, against the number of instances."""
    from moonpool.bench.conductor import bench_conductor

    if min(instances) < 2:
        fail("--instances must be at least 2: one for prefill and one for decode")
    config = ConductorConfig(placement=placement, admission=admission)
    found = bench_conductor(instances, blocks, in_flight, decisions, config, click.echo)
    finish(found | {"blocks_per_instance": blocks, "decisions": decisions}, json_file)


@bench.command(name="role-balance")
@click.option(
    "--instances", type=click.IntRange(3, 64), default=6, show_default=True, help="In all."
)
@click.option(
    "--window",
    type=click.FloatRange(1.0, 86_400.0),
    default=120.0,
    show_default=True,
    help="Of conductor.role_balance_window_s; the day has but two hours.",
)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), show_default=True)
@JSON
def role_balance(
    instances: int, window: float, seeds: tuple[int, ...], json_file: str | None
) -> None:
    """Fixed splits of the instances against one that follows a day's mix, simulated. Minutes."""
    from moonpool.bench.role_balance import RoleBalanceBenchError, bench_role_balance

    try:
        found = bench_role_balance(instances, window, seeds, click.echo)
    except RoleBalanceBenchError as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=(COUNT, COUNT),
    default=((16, 12_031), (100, 25_000), (1000, 100_000)),
    show_default=True,
    help="Instances and requests. The default takes some minutes.",
)
@JSON
def simulator(sizes: tuple[tuple[int, int], ...], json_file: str | None) -> None:
    """Time and memory of a simulation against its size."""
    from moonpool.bench.simulator import SimulatorBenchError, bench_simulator

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
    finish({"runs": runs}, json_file)


@bench.command()
@click.option("--blocks", type=COUNT, default=1_000_000, show_default=True, help="In all.")
@click.option("--instances", type=COUNT, default=1000, show_default=True)
@JSON
def index(blocks: int, instances: int, json_file: str | None) -> None:
    """Memory of the Conductor's index, and time to match a prompt of 256 blocks, against limits."""
    from moonpool.bench.index import IndexBenchError, bench_index

    try:
        found = bench_index(blocks, instances, click.echo)
    except IndexBenchError as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="On the disk to measure (default: where a server would keep its blocks).",
)
@click.option("--gib", type=click.FloatRange(min=0.01), default=1.0, show_default=True)
@click.option("--block-tokens", multiple=True, type=COUNT, default=(16, 64), show_default=True)
@click.option("--repeats", type=COUNT, default=3, show_default=True)
@JSON
def store(
    folder: Path | None,
    gib: float,
    block_tokens: tuple[int, ...],
    repeats: int,
    json_file: str | None,
) -> None:
    """Bandwidth of the SSD store, against a file written and read in order on the same disk."""
    from moonpool.bench.store import StoreBenchError, bench_store
    from moonpool.messenger.arena import ArenaError
    from moonpool.messenger.store.folder import StoreError, default_folder

    try:
        found = bench_store(folder or default_folder(), gib, block_tokens, repeats, click.echo)
    except (ArenaError, StoreBenchError, StoreError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"the disk cannot be measured: {error}")
    finish(found, json_file)


@bench.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option("--batch", type=COUNT, default=4, show_default=True, help="Answers decoded at once.")
@click.option("--phase", type=click.FloatRange(min=0.2), default=1.5, show_default=True, help="s.")
@click.option("--rounds", type=COUNT, default=14, show_default=True)
@click.option(
    "--tokens-per-s",
    type=COUNT,
    default=16_000,
    show_default=True,
    help="Of KVCache that arrives, or is asked for.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="On the disk to use (default: that of temporary files).",
)
@JSON
def demotion(
    model: str,
    batch: int,
    phase: float,
    rounds: int,
    tokens_per_s: int,
    folder: Path | None,
    json_file: str | None,
) -> None:
    """Time between tokens while the same instance's SSD is busy, against quiet. Three minutes."""
    from moonpool.bench.demotion import DemotionBenchError, bench_demotion

    try:
        found = bench_demotion(model, batch, phase, rounds, tokens_per_s, folder, click.echo)
    except DemotionBenchError as error:
        fail(str(error))
    finish(found, json_file)


@bench.command()
@click.option("--trace", "trace_file", help="Mooncake, Azure or BurstGPT trace, to simulate.")
@click.option("--live", is_flag=True, help="Conversations on a real local cluster instead.")
@click.option("--engine-tokens", type=COUNT, help="[default: 500000; live 2048]")
@click.option("--kv-tokens", type=COUNT, help="Of DRAM.  [default: 1000000; live 6144]")
@click.option("--ssd-tokens", type=COUNT, help="[default: 20000000; live 65536]")
@click.option("--requests", type=COUNT, help="Only the first so many of the trace.")
@click.option("--model", default="random:m150", show_default=True, help="Live.")
@click.option("--sessions", type=COUNT, default=16, show_default=True, help="Live.")
@click.option("--turns", type=COUNT, default=5, show_default=True, help="Live: of each session.")
@click.option(
    "--seconds", type=COUNT, default=150, show_default=True, help="Live: of answering, at most."
)
@JSON
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
    """What each tier of the KVCache pool adds: engine memory, DRAM, remote DRAM, SSD."""
    if live == bool(trace_file):
        fail("give --trace FILE to simulate, or --live for a real cluster")
    if live:
        sizes = (engine_tokens or 2048, kv_tokens or 6144, ssd_tokens or 65_536)
        finish(_tiers_live(model, sessions, turns, sizes, seconds), json_file)
        return
    from moonpool.bench.tiers import bench_tiers
    from moonpool.config import ConfigError
    from moonpool.trace.row import TraceError

    assert trace_file is not None
    sizes = (engine_tokens or 500_000, kv_tokens or 1_000_000, ssd_tokens or 20_000_000)
    try:
        found = bench_tiers(trace_file, *sizes, requests, click.echo)
    except (ConfigError, TraceError) as error:
        fail(str(error))
    finish(found, json_file)


def _tiers_live(
    model: str, sessions: int, turns: int, sizes: tuple[int, int, int], seconds: int
) -> dict[str, Any]:
    import httpx

    from moonpool.bench.local_server import ServerError
    from moonpool.bench.tiers_live import LiveTiersError, bench_tiers_live

    try:
        return bench_tiers_live(model, sessions, turns, sizes, seconds, None, click.echo)
    except (LiveTiersError, ServerError, httpx.HTTPError) as error:
        fail(str(error))


@bench.command()
@click.option("--model", help="Default: a random one with 32 KiB of KVCache a token.")
@click.option(
    "--prefix-tokens", multiple=True, type=COUNT, default=(1024, 4096, 8192), show_default=True
)
@click.option("--new-tokens", type=COUNT, default=64, show_default=True, help="After the prefix.")
@click.option(
    "--prompt-tokens",
    multiple=True,
    type=COUNT,
    default=(512, 1024, 2048),
    show_default=True,
    help="Of prompts that are computed and stored.",
)
@click.option("--rounds", type=COUNT, default=9, show_default=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="On the disk to load from (default: that of temporary files).",
)
@click.option("--mooncake", default="", help="HOST:PORT of a mooncake_master to load from, too.")
@JSON
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
    """Layer-wise load and store, beside one after the other: from SSD, by shared memory and TCP."""
    from moonpool.bench.layers import DEFAULT_MODEL, bench_layers
    from moonpool.bench.layers_near import LayersBenchError
    from moonpool.engine.spec import ModelError
    from moonpool.messenger.arena import ArenaError
    from moonpool.messenger.store.folder import StoreError

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
    finish(found, json_file)


def finish(found: dict[str, Any], json_file: str | None) -> None:
    """Figures without their origin are worth nothing: command, commit and machine go along."""
    found["origin"] = origin()
    click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    write_json(json_file, found)
