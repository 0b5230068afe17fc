"""`moonpool serve` and `moonpool head`: flags to a config, then a running cluster until it is
told to end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from importlib import import_module
from typing import Any

import click
import msgspec
import uvloop
from setproctitle import setproctitle

from moonpool.cli.output import fail, set_up_logging
from moonpool.cli.settings import read_config, show_defaults
from moonpool.config import (
    Admission,
    AttentionPartition,
    Config,
    ConfigError,
    Device,
    Dtype,
    EngineKind,
    Pinning,
    Placement,
    Quantization,
    RoleBalance,
    choices,
    vllm_place,
)
from moonpool.runtime.cores import threads_per_process
from moonpool.runtime.launcher import THREAD_VARIABLES, worker_environment
from moonpool.runtime.nursery import Nursery, open_nursery

log = logging.getLogger("moonpool")

HEAD_PORT = 8001  # unless flag or file name another

# flag -> (table, key)
FLAG_KEYS = {
    "model": ("model", "name"),
    "dtype": ("model", "dtype"),
    "quantization": ("model", "quantization"),
    "served_model_name": ("model", "served_name"),
    "max_model_len": ("model", "max_model_tokens"),
    "prefill": ("cluster", "prefill"),
    "decode": ("cluster", "decode"),
    "mixed": ("cluster", "mixed"),
    "attention": ("cluster", "attention"),
    "attention_partition": ("attention", "partition"),
    "attention_own_tokens": ("attention", "own_tokens"),
    "block_size": ("pool", "block_tokens"),
    "kv_tokens": ("pool", "dram_tokens_per_instance"),
    "ssd_tokens": ("pool", "ssd_tokens_per_instance"),
    "ssd_folder": ("pool", "ssd_folder"),
    "mooncake_master": ("mooncake", "master_server_address"),
    "enable_prefix_caching": ("pool", "prefix_caching"),
    "head_host": ("network", "head_host"),
    "nixl": ("network", "nixl"),
    "head_port": ("network", "head_port"),
    "slo_ttft": ("slo", "ttft_s"),
    "slo_tbt": ("slo", "tbt_s"),
    "placement": ("conductor", "placement"),
    "admission": ("conductor", "admission"),
    "role_balance": ("conductor", "role_balance"),
    "kvcache_balancing_threshold": ("conductor", "kvcache_balancing_threshold"),
    "max_num_batched_tokens": ("engine", "chunk_tokens"),
    "max_num_seqs": ("engine", "max_sequences"),
    "threads": ("engine", "threads"),
    "pipeline_parallel_size": ("engine", "pipeline_parallel_size"),
    "decode_pipeline_parallel_size": ("engine", "decode_pipeline_parallel_size"),
    "tensor_parallel_size": ("engine", "tensor_parallel_size"),
    "decode_tensor_parallel_size": ("engine", "decode_tensor_parallel_size"),
    "engine": ("engine", "kind"),
    "vllm": ("vllm", "mixed"),
    "vllm_prefill": ("vllm", "prefill"),
    "vllm_decode": ("vllm", "decode"),
    "pinning": ("engine", "pinning"),
    "device": ("engine", "device"),
    "host": ("api", "host"),
    "port": ("api", "port"),
    "api_key": ("api", "api_keys"),
    "request_timeout": ("api", "request_timeout_s"),
    "max_body_bytes": ("api", "max_body_bytes"),
}

MAX_LOCAL_INSTANCES = 64


SHARING_OPTIONS = (
    click.option(
        "--attention-partition",
        type=click.Choice(choices(AttentionPartition)),
        help="What each attention worker of an instance keeps: whole requests (default), its heads"
        " of all, or token ranges of long ones.",
    ),
    click.option(
        "--attention-own-tokens",
        type=int,
        help="KVCache tokens that an instance keeps itself, beside its attention workers.",
    ),
)


def _engine_options() -> list[Any]:
    """On how many processes, threads and cores an instance computes."""
    return [
        click.option(
            "--threads", type=int, help="CPU threads per process (default: the cores, divided)."
        ),
        click.option(
            "--pipeline-parallel-size",
            type=int,
            help="Processes, each with a share of the layers, of a prefill or mixed instance.",
        ),
        click.option(
            "--decode-pipeline-parallel-size", type=int, help="The same of a decode instance."
        ),
        click.option(
            "--tensor-parallel-size",
            type=int,
            help="Processes, each with a share of every layer, of a prefill or mixed instance.",
        ),
        click.option(
            "--decode-tensor-parallel-size", type=int, help="The same of a decode instance."
        ),
        *SHARING_OPTIONS,
        click.option("--pinning", type=click.Choice(choices(Pinning)), help="Of engines to cores."),
        click.option("--device", type=click.Choice(choices(Device)), help="What computes."),
    ]


def config_options(command: Any) -> Any:
    """The flags that `serve` and `head` share; vLLM's names where vLLM has them."""
    for option in reversed([*_what_is_kept(), *_how_it_is_served()]):
        command = option(command)
    return show_defaults(command, FLAG_KEYS, Config())


def _what_is_kept() -> list[Any]:
    """Model and pool."""
    return [
        click.argument("model", required=False),
        click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False),
            help="TOML file; flags override it.",
        ),
        click.option("--dtype", type=click.Choice(choices(Dtype))),
        click.option(
            "--quantization", type=click.Choice(choices(Quantization)), help="Of the weights."
        ),
        click.option("--served-model-name", help="Name that clients use."),
        click.option(
            "--max-model-len",
            type=int,
            help="Tokens of prompt and answer together (default: all that the model can).",
        ),
        click.option("--block-size", type=int, help="Tokens of one KVCache block."),
        click.option(
            "--kv-tokens",
            type=int,
            help="Tokens of KVCache per instance (default: as memory allows).",
        ),
        click.option(
            "--ssd-tokens", type=int, help="Tokens of KVCache on disk, likewise (default: none)."
        ),
        click.option("--ssd-folder", help="Where; each instance has a folder of its own in it."),
        click.option(
            "--mooncake-master",
            metavar="HOST:PORT",
            help="Keep KVCache in this Mooncake Store, not on disk.",
        ),
        click.option("--nixl/--no-nixl", default=None, help="Blocks between machines by RDMA."),
        click.option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            default=None,
            help="Reuse the KVCache of equal prefixes.",
        ),
    ]


def _how_it_is_served() -> list[Any]:
    """Promises, policies, engine and API."""
    return [
        click.option("--slo-ttft", type=float, help="Seconds to the first token."),
        click.option("--slo-tbt", type=float, help="Seconds between tokens."),
        click.option(
            "--placement", type=click.Choice(choices(Placement)), help="Where a prompt is computed."
        ),
        click.option(
            "--admission",
            type=click.Choice(choices(Admission)),
            help="Which requests are refused because their service levels would be missed.",
        ),
        click.option(
            "--role-balance",
            type=click.Choice(choices(RoleBalance)),
            help="When the ratio of prefill to decode instances does not fit the load.",
        ),
        click.option(
            "--kvcache-balancing-threshold",
            type=float,
            help="How much longer a remote prefix must be to be fetched.",
        ),
        click.option("--max-num-batched-tokens", type=int, help="Tokens of one step (the chunk)."),
        click.option("--max-num-seqs", type=int, help="Requests of one step."),
        *_engine_options(),
        click.option("--host", help="Address of the HTTP API."),
        click.option("--port", type=int, help="Port of the HTTP API."),
        click.option("--api-key", multiple=True, help="Accepted bearer key; one tenant each."),
        click.option("--request-timeout", type=float, help="Seconds any request may take."),
        click.option("--max-body-bytes", type=int, help="Largest request body."),
    ]


@click.command()
@config_options
@click.option("--prefill", type=int, help="Prefill instances.")
@click.option("--decode", type=int, help="Decode instances.")
@click.option("--mixed", type=int, help="Instances that do both.")
@click.option("--attention", type=int, help="Workers that keep the KVCache for decoding.")
@click.option(
    "--vllm",
    multiple=True,
    metavar="URL[,EVENTS[,REPLAY]]",
    help="A vLLM that runs already, to be an instance that does both; and where it publishes KV"
    " events and repeats them.",
)
@click.option("--vllm-prefill", multiple=True, metavar="URL...", help="The same, for prefill.")
@click.option("--vllm-decode", multiple=True, metavar="URL...", help="The same, for decoding.")
@click.option("--head-port", type=int, hidden=True)
def serve(config_file: str | None, **flags: Any) -> None:
    """Start head and workers on this machine and serve MODEL until Ctrl-C.

    MODEL is a Hugging Face folder or id, or a built-in: moonpool/induction (the default, needs no
    download) or random:m150. With --vllm it is what the first of these serves.
    """
    places = [*flags["vllm"], *flags["vllm_prefill"], *flags["vllm_decode"]]
    if places and flags["model"] is None:
        flags["model"] = _model_of(places[0])
    if flags["mixed"] and flags["prefill"] is None and flags["decode"] is None:
        flags["prefill"] = flags["decode"] = 0
    config = read_config(config_file, flags, FLAG_KEYS)
    cluster = config.cluster
    if config.engine.kind == "vllm" and not any(msgspec.structs.astuple(config.vllm)):
        fail('engine.kind is "vllm", but none is named: use --vllm URL')
    if cluster.num_workers > MAX_LOCAL_INSTANCES:
        fail(f"one machine can start at most {MAX_LOCAL_INSTANCES} instances")
    _run(config, launch=True, secret=secrets.token_bytes(32))


@click.command()
@config_options
@click.option(
    "--engine",
    type=click.Choice(choices(EngineKind)),
    help="Of the workers; vllm: each stands before a vLLM (worker --vllm).",
)
@click.option("--head-host", help="Address for workers to join at (default 127.0.0.1).")
@click.option("--head-port", type=int, help=f"Port for workers to join at (default {HEAD_PORT}).")
def head(config_file: str | None, **flags: Any) -> None:
    """Start the head alone. Workers join with `moonpool worker`.

    All parts share a secret: set MOONPOOL_CLUSTER_SECRET to 64 hexadecimal digits.
    """
    from moonpool.cli.worker import cluster_secret

    config = read_config(config_file, flags, FLAG_KEYS)
    if not config.network.head_port:
        network = msgspec.structs.replace(config.network, head_port=HEAD_PORT)
        config = msgspec.structs.replace(config, network=network)
    _run(config, launch=False, secret=cluster_secret())


def _model_of(place: str) -> str:
    """What a vLLM serves, by its own word."""
    from moonpool.cli.worker import API_KEY_VARIABLE
    from moonpool.vllm.client import VllmClient, VllmError

    async def ask() -> str:
        client = VllmClient(vllm_place(place).url, os.environ.get(API_KEY_VARIABLE, ""))
        try:
            return (await client.facts()).root
        finally:
            await client.close()

    try:
        return asyncio.run(ask())
    except ConfigError as error:
        fail(f"--vllm: {error}")
    except VllmError as error:
        fail(f"vLLM at {vllm_place(place).url}: {error}")


def _open_nursery(config: Config, secret: bytes) -> Nursery | None:
    """With what a worker imports. Threads are settled first: torch reads their number once."""
    environment = worker_environment(secret, threads_per_process(config))
    os.environ.update((name, environment[name]) for name in THREAD_VARIABLES)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's, unused; starts them at import
    for module in ("worker", "attention_worker", "cluster"):
        import_module(f"moonpool.runtime.{module}")
    from moonpool.cli.main import cli

    def run_worker(line: list[str]) -> None:
        setproctitle(" ".join([sys.executable, "-m", "moonpool", *line]))
        cli(args=line, prog_name="moonpool")

    return open_nursery(environment, run_worker)


def _run(config: Config, launch: bool, secret: bytes) -> None:
    nursery = _open_nursery(config, secret) if launch else None
    set_up_logging("head")
    from moonpool.runtime.cluster import ClusterError, run_cluster

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_cluster(config, secret, launch, _signals, nursery))
    except ClusterError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _signals(stop: asyncio.Event) -> None:
    """SIGINT and SIGTERM end the cluster in order; a second one ends it at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # workers end with us: the kernel sees to it
        stop.set()

    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, on_signal)
