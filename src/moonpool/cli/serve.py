"""`moonpool serve` and `moonpool head`: from flags to a config to a running cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import click
import msgspec
from setproctitle import setproctitle

from moonpool.api.access.protection import UNPROTECTED, check_protection
from moonpool.api.connection.listening import BACKLOG, PortError, listen, reserve
from moonpool.children.start import moonpool_line, start_child
from moonpool.cli.default_model import NO_MODEL, choose_model
from moonpool.cli.head_process import (
    few_threads,
    import_for,
    import_head,
    import_workers,
    run_line,
)
from moonpool.cli.logs import choose_logging, set_up_logging
from moonpool.cli.options import (
    POLICY_KEYS,
    ConfigFlags,
    SectionedCommand,
    config_option,
    read_config,
)
from moonpool.cli.output import fail, one_line
from moonpool.config.rules import vllm_place
from moonpool.config.schema import Values
from moonpool.config.slo import ASSUMED_TBT_S, ASSUMED_TTFT_S
from moonpool.config.tables import Config, ConfigError, VllmConfig
from moonpool.cores import crowding, threads_per_process, usable_cores
from moonpool.head.cluster_error import ClusterError
from moonpool.head.fork_server import ForkServer, open_fork_server
from moonpool.head.launcher import worker_environment
from moonpool.head.succession import SuccessionError, keep_private, read_state
from moonpool.head.supervisor import Supervisor
from moonpool.plugins.engines import need_engine, own_engine

HEAD_PORT = 8001
"""Port at which workers join `moonpool head`, unless flag or file names another."""

MAX_LOCAL_INSTANCES = 64

_SHARED_KEYS = (
    "model.dtype",
    "model.quantization",
    "model.kv_cache_dtype",
    "model.served_name",
    "model.max_model_tokens",
    "model.chat_template",
    "model.lora_modules",
    "pool.block_tokens",
    "pool.dram_tokens_per_instance",
    "pool.ssd_tokens_per_instance",
    "pool.ssd_bytes_per_instance",
    "pool.ssd_folder",
    "pool.keep_memory",
    "mooncake.master_server_address",
    "network.nixl",
    "slo.ttft_s",
    "slo.tbt_s",
    "slo.classes",
    *POLICY_KEYS,
    "conductor.autoscale_webhook",
    "conductor.seed",
    "attention.partition",
    "attention.own_tokens",
    "engine.chunk_tokens",
    "engine.max_sequences",
    "engine.threads",
    "engine.pipeline_parallel_size",
    "engine.decode_pipeline_parallel_size",
    "engine.tensor_parallel_size",
    "engine.decode_tensor_parallel_size",
    "engine.speculative_config",
    "engine.pinning",
    "engine.device",
    "api.host",
    "api.port",
    "api.fronts",
    "api.api_keys",
    "api.api_key_file",
    "api.ssl_certfile",
    "api.ssl_keyfile",
    "api.ssl_ca_certs",
    "api.allowed_origins",
    "api.tool_call_parser",
    "api.allowed_hosts",
    "api.reasoning_parser",
    "api.request_timeout_s",
    "api.keepalive_s",
    "api.strict_max_tokens",
    "api.drain_seconds",
    "api.max_body_bytes",
    "telemetry.log_level",
    "telemetry.log_format",
    "telemetry.log_requests",
    "telemetry.otlp_traces_endpoint",
    "vllm.parsers",
)
_SLO_HELPS = {
    f"slo.{key}": f"Service level for the {what}, in seconds. Unless given, nothing is refused for"
    f" it, and {assumed_s:g} s are a yardstick."
    for key, what, assumed_s in (
        ("ttft_s", "time to first token", ASSUMED_TTFT_S),
        ("tbt_s", "time between tokens", ASSUMED_TBT_S),
    )
}
SERVE_FLAGS = ConfigFlags(
    "cluster.prefill",
    "cluster.decode",
    "cluster.mixed",
    "cluster.attention",
    "cluster.launcher",
    "ray.address",
    "vllm.mixed",
    "vllm.prefill",
    "vllm.decode",
    "vllm.endpoints",
    *_SHARED_KEYS,
    "network.head_port",
    helps=_SLO_HELPS,
)
HEAD_FLAGS = ConfigFlags(
    *_SHARED_KEYS,
    "engine.kind",
    "network.head_host",
    "network.head_port",
    "network.keep_workers",
    "tls.certfile",
    "tls.keyfile",
    "tls.ca_certs",
    helps={
        "network.head_port": f"Port for workers to join at; {HEAD_PORT} unless configured.",
        **_SLO_HELPS,
    },
)


SERVE_SCREEN = ("--prefill", "--decode", "--mixed", "--vllm", "--vllm-endpoints")
HEAD_SCREEN = ("--head-host", "--head-port", "--standby-of", "--engine")
SCREEN = (
    "--host",
    "--port",
    "--api-key-file",
    "--served-model-name",
    "--max-model-len",
    "--device",
    "--threads",
    "--kv-tokens",
    "--ssd-tokens",
    "--slo-ttft",
    "--slo-tbt",
)
"""What `--help` shows of both; `--help all` shows the rest."""

LORA_FLAG = "--lora-modules"
_LORA_MODULE = re.compile(r"[\w./-]+=.+", re.DOTALL)


class _ServingCommand(SectionedCommand):
    """A command whose flag for LoRA adapters takes several values, as vLLM's does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        listing = False
        for arg in args:
            is_module = listing and not arg.startswith("-") and _LORA_MODULE.fullmatch(arg)
            if is_module and spread[-1] != LORA_FLAG:
                spread.append(LORA_FLAG)
            listing = arg == LORA_FLAG or bool(is_module)
            spread.append(arg)
        return super().parse_args(ctx, spread)


@click.command(cls=_ServingCommand, screen=("--config", *SERVE_SCREEN, *SCREEN))
@click.argument("model", required=False)
@config_option
@SERVE_FLAGS.options(Config(), hidden=("network.head_port",))
def serve(model: str | None, config_file: str | None, **flags: Any) -> None:
    """Start head and workers on this machine and serve MODEL until Ctrl-C.

    MODEL is a GGUF file, a folder or a Hugging Face id. Prefill reads prompts, decode writes
    answers; KVCache is what prefill computed, kept for the next prompt that begins alike. Servers
    named by --vllm may serve several models, unless MODEL names the one that all of them must.
    """
    places = [*flags["vllm"], *flags["vllm_prefill"], *flags["vllm_decode"]]
    config = _read(config_file, serve_overrides(flags), model)
    if model is None and config.model.name == NO_MODEL and config.engine.kind != "vllm":
        need_engine()  # checked before the first question to the user
        config = _read(config_file, serve_overrides(flags), choose_model("serve"))
    cluster = config.cluster
    if config.engine.kind == "vllm" and not (config.vllm.names_any or config.ray.vllm_command):
        fail('engine.kind is "vllm", but [vllm] names no server: use --vllm URL')
    _check_events(config.vllm)
    if places:
        _check_vllm(places[0])
    _check_sources(config.vllm.endpoints)
    if cluster.launcher == "ray":
        _serve_on_ray(config)
        return
    if cluster.num_workers > MAX_LOCAL_INSTANCES:
        fail(f"one machine can start at most {MAX_LOCAL_INSTANCES} instances")
    _run(config, launch=True, secret=secrets.token_bytes(32))


@click.command(cls=_ServingCommand, screen=("--config", *HEAD_SCREEN, *SCREEN))
@click.argument("model", required=False)
@config_option
@click.option(
    "--standby-of",
    metavar="HOST:PORT",
    help="Wait beside the head that workers join there, and take over when it is gone.",
)
@HEAD_FLAGS.options(Config())
def head(model: str | None, config_file: str | None, standby_of: str | None, **flags: Any) -> None:
    """Start the head alone. Workers join with `moonpool worker`.

    Head and workers share a secret: set MOONPOOL_CLUSTER_SECRET to 64 hexadecimal digits.
    """
    from moonpool.cli.worker import cluster_secret, head_place

    place = None if standby_of is None else head_place(standby_of, "--standby-of")
    config = _read(config_file, HEAD_FLAGS.overrides(flags), model)
    if not config.network.head_port:
        network = msgspec.structs.replace(config.network, head_port=HEAD_PORT)
        config = msgspec.structs.replace(config, network=network)
    _run(config, launch=False, secret=cluster_secret(), standby_of=place)


def serve_overrides(flags: dict[str, Any]) -> Values:
    """Returns the values of the flags; `--mixed` alone starts no other instances."""
    given = SERVE_FLAGS.overrides(flags)
    cluster = given.get("cluster", {})
    if cluster.get("mixed") and not {"prefill", "decode"} & set(cluster):
        cluster |= {"prefill": 0, "decode": 0}
    return given


def _read(config_file: str | None, overrides: Values, model: str | None) -> Config:
    if model is not None:
        overrides.setdefault("model", {})["name"] = model
    return read_config(config_file, overrides)


def _check_events(vllm: VllmConfig) -> None:
    """Fails here, and not in each worker, if events are to be read and pyzmq is missing."""
    places = (place for named in vllm.places.values() for place in named)
    if any(vllm_place(place).events for place in places) and find_spec("zmq") is None:
        from moonpool.vllm.events import no_pyzmq

        fail(no_pyzmq())


def _check_sources(sources: Sequence[str]) -> None:
    """Fails here if a source of endpoints is invalid or cannot be read at all."""
    from moonpool.discovery.endpoint import SourceError
    from moonpool.discovery.watch import check_source

    for source in sources:
        try:
            asyncio.run(check_source(source))
        except SourceError as error:
            fail(f"--vllm-endpoints: {error}")


def _check_vllm(place: str) -> None:
    """Fails now if there is no server; otherwise a worker would wait for the server. A server that
    is too busy to answer is left to its worker."""
    from moonpool.cli.worker import API_KEY_VARIABLE
    from moonpool.vllm.client import VllmClient, VllmError, VllmSilentError
    from moonpool.vllm.dialect import DialectError
    from moonpool.vllm.dialects.find import find_dialect

    async def read_facts() -> None:
        client = VllmClient(vllm_place(place).url, os.environ.get(API_KEY_VARIABLE, ""))
        try:
            await (await find_dialect(client)).facts()
        finally:
            client.close()

    try:
        asyncio.run(read_facts())
    except ConfigError as error:
        fail(f"--vllm: {error}")
    except VllmSilentError as error:
        url = vllm_place(place).url
        click.echo(f"moonpool: the server at {url}: {error}; it is asked again", err=True)
    except (VllmError, DialectError) as error:
        fail(f"the server at {vllm_place(place).url}: {error}")


def _open_fork_server(
    config: Config, secret: bytes, fds: Sequence[int] = (), loads: bool = False
) -> ForkServer | None:
    """Opens a fork server, which imports what head and workers need. Closes `fds` in the fork
    server. If it `loads`, the fork server packs weights that all workers share. A head that needs
    no torch is forked before the fork server imports torch, so that both read the model at once."""
    shared: list[object] = []
    environment = worker_environment(secret, threads_per_process(config))
    engine = "vllm" if config.engine.kind == "vllm" else "own"

    def prepare() -> None:
        for fd in fds:
            os.close(fd)
        few_threads()
        if engine == "vllm" or not loads or not own_engine().describes_quickly(config):
            import_for(engine)

    async def renewal(control: socket.socket) -> asyncio.subprocess.Process:
        fd = control.fileno()
        line = moonpool_line("fork-server", "--engine", engine, "--fd", str(fd))
        return await start_child(line, os.environ | environment, (fd,))

    def load() -> None:
        import_workers(engine)
        set_up_logging("fork server")
        weights = own_engine().share_weights(config)
        logging.getLogger().handlers.clear()  # workers log under their own names
        if weights is not None:
            shared.append(weights)

    def run(line: list[str]) -> None:
        run_line(line, shared[0] if shared else None)

    more = load if loads and engine == "own" else lambda: None
    settle = import_head if loads else lambda: None
    return open_fork_server(environment, run, prepare, renewal, more, settle)


def _serve_on_ray(config: Config) -> None:
    """Serves until SIGINT or SIGTERM, by processes that Ray places."""
    from moonpool.ray.launcher import RayLauncher

    _check_start(config)
    set_up_logging("launcher")
    stop = threading.Event()
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: os._exit(1) if stop.is_set() else stop.set())
    with one_line(ClusterError):
        RayLauncher(config).serve(stop)


def _check_start(config: Config) -> None:
    """Ends the command for a configuration that no process could start with."""
    if config.model.quantization == "fp8":
        fail(
            'model.quantization "fp8" is simulated only: serve a checkpoint that is stored in FP8'
            " without it, or use int8 or int4"
        )
    if config.engine.kind != "vllm":
        need_engine()  # checked here, so that not each process has to
    with one_line(*UNPROTECTED):
        check_protection(config)
    choose_logging(config.telemetry)


def _run(
    config: Config, launch: bool, secret: bytes, standby_of: tuple[str, int] | None = None
) -> None:
    _check_start(config)
    # First: it must not hold our sockets.
    fork_server = _open_fork_server(config, secret, loads=launch)
    set_up_logging("supervisor")
    if launch and (crowded := crowding(config, usable_cores())):
        logging.getLogger("moonpool.cores").warning(crowded)
    network = config.network
    take = listen if standby_of is None else reserve
    try:
        with (
            take(config.api.host, config.api.port) as http,
            take(network.head_host, network.head_port, "--head-port") as control,
        ):
            if standby_of is not None:
                asyncio.run(_stand_by(config, secret, http, control, fork_server, standby_of))
                return
            supervisor = Supervisor(config, secret, launch, http, control, fork_server)
            asyncio.run(_supervise(supervisor))
    except (ClusterError, PortError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


@click.command(hidden=True)
@click.option("--fd", type=int, required=True, help="Memory file with the state.")
@click.option("--trial", is_flag=True, help="Only read the state.")
def next_supervisor(fd: int, trial: bool) -> None:
    """Go on as the supervisor of an upgraded cluster."""
    with one_line(SuccessionError, *UNPROTECTED):
        state = read_state(fd)
        if trial:
            check_protection(state.config)
    if trial:
        return
    keep_private(state)
    setproctitle(state.title)
    choose_logging(state.config.telemetry)
    fork_server = _open_fork_server(state.config, state.secret, state.fds)
    set_up_logging("supervisor")
    with socket.socket(fileno=state.http) as http, socket.socket(fileno=state.control) as control:
        own = (state.config, state.secret, state.launch, http, control, fork_server, state)
        with one_line(ClusterError):
            asyncio.run(_supervise(Supervisor(*own)))


async def _stand_by(
    config: Config,
    secret: bytes,
    http: socket.socket,
    control: socket.socket,
    fork_server: ForkServer | None,
    head: tuple[str, int],
) -> None:
    """Waits until the head is gone, and then serves with a head of its own. Raises ClusterError."""
    from moonpool.head.takeover.standby import Standby  # imported here, because the import is slow

    stop = asyncio.Event()
    _signals(stop)
    standby = Standby(config, secret, control)
    waiting = asyncio.create_task(standby.wait(*head))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    taken = waiting.result() if waiting.done() else None
    waiting.cancel()
    if taken is None:
        if fork_server is not None:
            await fork_server.close()
        return
    for sock in (http, control):
        sock.listen(BACKLOG)
    replacing = asyncio.create_task(standby.replace(*head))
    supervisor = Supervisor(taken.config, secret, False, http, control, fork_server, taken=taken)
    try:
        await supervisor.run(stop)
    finally:
        replacing.cancel()


async def _supervise(supervisor: Supervisor) -> None:
    stop = asyncio.Event()
    _signals(stop)
    await supervisor.run(stop)


def _signals(stop: asyncio.Event) -> None:
    """Lets SIGINT and SIGTERM end the cluster in an orderly way, and a second signal end it at
    once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # the kernel then ends head and workers
        stop.set()

    for sign in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sign, on_signal)
