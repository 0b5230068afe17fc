"""`moonpool epp`: the endpoint picker of an inference gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import click
import uvloop

from moonpool.api.access.protection import UNPROTECTED, check_protection
from moonpool.api.connection.listening import PortError, listen
from moonpool.cli.logs import choose_logging, set_up_logging
from moonpool.cli.options import (
    POLICY_KEYS,
    ConfigFlags,
    SectionedCommand,
    config_option,
    read_config,
)
from moonpool.cli.output import fail
from moonpool.config.tables import Config
from moonpool.gc_tuning import settle_threads

GRPC_PORT, METRICS_PORT = 9002, 9090
"""Those of llm-d's picker."""
_UNUSED = ("pool.", "engine.", "conductor.role_balance")
FLAGS = ConfigFlags(
    "model.served_name",
    "model.chat_template",
    "slo.ttft_s",
    "slo.tbt_s",
    *(key for key in POLICY_KEYS if not key.startswith(_UNUSED)),
    "api.api_key_file",
    "api.request_timeout_s",
    "api.drain_seconds",
    "api.max_body_bytes",
    "telemetry.log_level",
    "telemetry.log_format",
    "telemetry.log_requests",
    "telemetry.otlp_traces_endpoint",
)


@click.command(cls=SectionedCommand)
@click.argument("model", required=False)
@config_option
@click.option(
    "--endpoints",
    "endpoints_file",
    type=click.Path(dir_okay=False),
    help="File with the endpoints, in llm-d's form; it may change at any time.",
)
@click.option("--grpc-host", default="127.0.0.1", show_default=True, help="Address for gateways.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=GRPC_PORT,
    show_default=True,
    help="Port for gateways; 0 takes a free one.",
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address of HTTP.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=METRICS_PORT,
    show_default=True,
    help="Port of /metrics, /cluster and /explain; 0 takes a free one.",
)
@click.option("--fail-open", is_flag=True, help="Without an endpoint, let the gateway choose.")
@FLAGS.options(Config())
def epp(
    model: str | None,
    config_file: str | None,
    endpoints_file: str | None,
    grpc_host: str,
    grpc_port: int,
    metrics_host: str,
    metrics_port: int,
    fail_open: bool,
    **flags: Any,
) -> None:
    """Choose the endpoint of each request of an inference gateway, such as Envoy."""
    # gRPC would prepare for forks of its own process, and say so; ours begin other programs.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from moonpool.epp.server import GrpcPort, PortInUseError
    from moonpool.epp.service import serve_picker
    from moonpool.epp.sources.endpoints_file import EndpointsFile
    from moonpool.epp.sources.source import SourceError
    from moonpool.head.cluster_error import ClusterError

    overrides = FLAGS.overrides(flags)
    overrides.setdefault("model", {})["name"] = model or ""
    overrides.setdefault("engine", {})["kind"] = "vllm"
    config = read_config(config_file, overrides)
    if endpoints_file is None:
        fail("name the endpoints: --endpoints FILE")
    try:
        check_protection(config)
    except UNPROTECTED as error:
        fail(str(error))
    choose_logging(config.telemetry)
    set_up_logging("epp")
    settle_threads()
    place = GrpcPort(grpc_host, grpc_port)

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, stop.set)
        key = os.environ.get("VLLM_API_KEY", "")
        with listen(metrics_host, metrics_port, "--metrics-port") as http:
            source = EndpointsFile(endpoints_file)
            await serve_picker(config, source, place, http, stop, fail_open, key)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except (ClusterError, PortError, PortInUseError, SourceError, *UNPROTECTED) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
