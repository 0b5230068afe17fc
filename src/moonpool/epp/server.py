"""The gRPC server: external processing, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from moonpool.epp.exchange import BodyRoom, Exchange
from moonpool.epp.picker import Picker

SERVICE = ext_proc.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
READY = ("", SERVICE, "readiness", "inference-extension")
"""Names by which the health service tells whether calls are placed; the last two are llm-d's."""
LIVE = "liveness"
LOOK_S = 0.25
MAX_CALLS = 16_384
"""Streams at a time."""
HEADERS_BYTES = 1 << 20
"""Room in a message for more than a body: Envoy may hold a body and send it whole."""
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
)


class GrpcStartError(Exception):
    """The server cannot start, because of its port or its certificate; one line says why."""


@dataclass(frozen=True, slots=True)
class GrpcPort:
    """The address to listen at. With `certfile`, connections are encrypted. With `ca_certs`, only
    clients with a certificate of that authority are served."""

    host: str
    port: int
    certfile: str = ""
    keyfile: str = ""
    ca_certs: str = ""


class _Processor(ExternalProcessorServicer):  # type: ignore[misc]
    def __init__(self, picker: Picker, fails_open: bool) -> None:
        self._picker = picker
        self._fails_open = fails_open
        self._room = BodyRoom(picker.max_body_bytes)

    async def Process(  # noqa: N802 (its name on the wire)
        self,
        request_iterator: AsyncIterator[ext_proc.ProcessingRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        opens = self._picker.listing.fails_open
        fails_open = self._fails_open if opens is None else opens
        exchange = Exchange(self._picker, self._room, fails_open)
        async for answer in exchange.answers(request_iterator):
            yield answer


class GrpcServer:
    """Call `start`, then `run` until cancelled. `port` is the port on which it listens."""

    def __init__(self, picker: Picker, place: GrpcPort, fails_open: bool) -> None:
        self._picker = picker
        self._place = place
        self._health = health_aio.HealthServicer()
        most = ("grpc.max_receive_message_length", picker.max_body_bytes + HEADERS_BYTES)
        self._server = grpc.aio.server(options=(most, *OPTIONS), maximum_concurrent_rpcs=MAX_CALLS)
        self.port = 0
        add_ExternalProcessorServicer_to_server(_Processor(picker, fails_open), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, HEALTH, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Raises GrpcStartError."""
        place = self._place
        address = f"{place.host}:{place.port}"
        credentials = _credentials(place) if place.certfile else None
        try:
            if credentials is not None:
                self.port = self._server.add_secure_port(address, credentials)
            else:
                self.port = self._server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise GrpcStartError(f"cannot listen on {address}: {error}") from None
        await self._server.start()

    async def run(self) -> None:
        """Reports the picker's health to the gateway, until cancelled."""
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(LIVE, serving)
        before = None
        while True:
            is_ready = not self._picker.head.not_ready()
            if is_ready != before:
                for name in READY:
                    await self._health.set(name, serving if is_ready else not_serving)
            before = is_ready
            await asyncio.sleep(LOOK_S)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _credentials(place: GrpcPort) -> grpc.ServerCredentials:
    """Raises GrpcStartError."""
    try:
        chain = Path(place.certfile).read_bytes()
        key = Path(place.keyfile or place.certfile).read_bytes()
        roots = Path(place.ca_certs).read_bytes() if place.ca_certs else None
    except OSError as error:
        text = f"cannot read the certificate: {error.filename}: {error.strerror}"
        raise GrpcStartError(text) from None
    return grpc.ssl_server_credentials(((key, chain),), roots, roots is not None)
