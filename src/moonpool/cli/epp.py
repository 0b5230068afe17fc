"""`moonpool epp`: the endpoint picker of an inference gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    pem_options,
    read_config,
)
from moonpool.cli.output import fail, one_line
from moonpool.config.tables import Config
from moonpool.gc_tuning import settle_threads

if TYPE_CHECKING:
    from moonpool.discovery.sources import EndpointSource

GRPC_PORT, METRICS_PORT = 9002, 9090
"""The ports of llm-d's picker."""
_UNUSED = (
    "pool.",
    "engine.",
    "conductor.role_balance",
    "conductor.prefetch",
    "conductor.programs",
    "conductor.replicate",
    "conductor.spare_copies_first",
)
"""Keys of instances with an engine of moonpool's own."""
FLAGS = ConfigFlags(
    "model.served_name",
    "model.chat_template",
    "slo.ttft_s",
    "slo.tbt_s",
    "slo.classes",
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


@click.command(
    cls=SectionedCommand,
    screen=(
        "--config",
        "--endpoints",
        "--dns",
        "--pool-name",
        "--pool-namespace",
        "--grpc-host",
        "--grpc-port",
        "--metrics-port",
        "--fail-open",
        "--served-model-name",
        "--slo-ttft",
        "--slo-tbt",
        "--api-key-file",
        "--log-requests",
    ),
)
@click.argument("model", required=False)
@config_option
@click.option(
    "--endpoints",
    "--vllm-endpoints",
    "listed",
    multiple=True,
    metavar="SOURCE",
    help="Where the endpoints are listed, as at `moonpool serve`: a file in llm-d's form,"
    " dns://NAME:PORT, srv://NAME, kube://NAMESPACE/LABEL=VALUE?port=8000 for pods by label,"
    " ray://NAMESPACE/ACTOR?port=8000 for actors of Ray, or ray-serve://APPLICATION for replicas;"
    " repeat it for more.",
)
@click.option(
    "--dns",
    "dns_names",
    multiple=True,
    metavar="[ROLE=]NAME:PORT",
    help="Name whose addresses are the endpoints, or a service with SRV records, such as"
    " _vllm._tcp.NAME; repeat it for more.",
)
@click.option("--pool-name", help="InferencePool of a Kubernetes cluster that has the endpoints.")
@click.option(
    "--pool-namespace", help="Namespace of that pool; NAMESPACE or the pod's own if not given."
)
@click.option(
    "--kube-url",
    metavar="URL",
    help="Kubernetes API without login, such as that of `kubectl proxy`; in a pod, the cluster's"
    " own with the service account.",
)
@click.option("--grpc-host", default="127.0.0.1", show_default=True, help="Address for gateways.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=GRPC_PORT,
    show_default=True,
    help="Port for gateways; 0 takes a free one.",
)
@pem_options(
    "--grpc",
    "grpc_",
    "Encrypt gRPC with this certificate chain (PEM).",
    "Serve only gateways with a certificate of this authority (PEM).",
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address of HTTP.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=METRICS_PORT,
    show_default=True,
    help="Port of /metrics, /cluster and /explain; 0 takes a free one.",
)
@click.option(
    "--fallbacks",
    type=click.IntRange(0, 8),
    default=0,
    show_default=True,
    help="Further endpoints that the gateway is told with each, for its own retries; only for"
    " gateways that take a list, such as Envoy's override_host policy.",
)
@click.option("--fail-open", is_flag=True, help="Without an endpoint, let the gateway choose.")
@FLAGS.options(Config())
def epp(
    model: str | None,
    config_file: str | None,
    listed: tuple[str, ...],
    dns_names: tuple[str, ...],
    pool_name: str | None,
    pool_namespace: str | None,
    kube_url: str | None,
    grpc_host: str,
    grpc_port: int,
    grpc_certfile: str,
    grpc_keyfile: str,
    grpc_ca_certs: str,
    metrics_host: str,
    metrics_port: int,
    fallbacks: int,
    fail_open: bool,
    **flags: Any,
) -> None:
    """Choose the endpoint of each request of an inference gateway, such as Envoy."""
    # gRPC would prepare for forks and log a line, but after a fork this process only starts other
    # programs.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from moonpool.discovery.endpoint import SourceError
    from moonpool.epp.server import GrpcPort, GrpcStartError
    from moonpool.epp.service import serve_picker
    from moonpool.head.cluster_error import ClusterError

    overrides = FLAGS.overrides(flags)
    overrides.setdefault("model", {})["name"] = model or ""
    overrides.setdefault("engine", {})["kind"] = "vllm"
    config = read_config(config_file, overrides)
    if not (listed or dns_names or pool_name):
        listed = config.vllm.endpoints
    if not (listed or dns_names or pool_name):
        fail("name a source of endpoints: --endpoints SOURCE, --dns NAME:PORT or --pool-name NAME")
    if (grpc_keyfile or grpc_ca_certs) and not grpc_certfile:
        fail("give --grpc-certfile, too")
    with one_line(*UNPROTECTED):
        check_protection(config)
    choose_logging(config.telemetry)
    set_up_logging("epp")
    settle_threads()
    place = GrpcPort(grpc_host, grpc_port, grpc_certfile, grpc_keyfile, grpc_ca_certs)
    pool = (pool_name or "", pool_namespace or "", kube_url or "")

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, stop.set)
        key = os.environ.get("VLLM_API_KEY", "")
        with listen(metrics_host, metrics_port, "--metrics-port") as http:
            source = open_sources(listed, dns_names, *pool)
            await serve_picker(config, source, place, http, stop, fail_open, key, fallbacks)

    try:
        uvloop.run(run())
    except (ClusterError, PortError, GrpcStartError, SourceError, *UNPROTECTED) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def open_sources(
    listed: tuple[str, ...],
    dns_names: tuple[str, ...],
    pool_name: str,
    pool_namespace: str,
    kube_url: str,
) -> EndpointSource:
    """Returns all sources joined in one. Raises SourceError."""
    from moonpool.discovery.dns_names import DnsName
    from moonpool.discovery.source_text import PodSource, parse_source, read_dns_name
    from moonpool.discovery.sources import Sources, open_source

    found: list[EndpointSource] = []
    for source in map(parse_source, listed):
        if isinstance(source, PodSource) and not source.api:
            source = replace(source, api=kube_url)
        found.append(open_source(source))
    found += [DnsName(read_dns_name(text)) for text in dns_names]
    if pool_name:
        from moonpool.discovery.kubernetes_api import ApiServer, own_namespace
        from moonpool.epp.inference_pool import InferencePool

        server = ApiServer(kube_url, None, None) if kube_url else ApiServer.of_pod()
        found.append(InferencePool(server, pool_namespace or own_namespace(), pool_name))
    if len(found) == 1 and not isinstance(found[0], DnsName):
        return found[0]  # logs at once why a source fails; a DNS name may not exist yet
    return Sources(found, [*listed, *dns_names, *filter(None, [pool_name])])
