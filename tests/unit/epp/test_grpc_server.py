"""The picker's gRPC server: what keeps it from starting, and how large a message it takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc")

import grpc
from grpc_health.v1 import health_pb2

from moonpool.epp.server import HEALTH, GrpcPort, GrpcServer, GrpcStartError


def server(place: GrpcPort) -> GrpcServer:
    picker: Any = SimpleNamespace(max_body_bytes=32 << 20)
    return GrpcServer(picker, place, fails_open=False)


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    async def start() -> None:
        await server(GrpcPort("127.0.0.1", 0, certfile=str(tmp_path / "none.pem"))).start()

    with pytest.raises(
        GrpcStartError, match=r"^cannot read the certificate: .*none\.pem"
    ) as raised:
        asyncio.run(start())
    assert "listen" not in str(raised.value)


@pytest.mark.parametrize("held_bytes", [5 << 20, 32 << 20])
def test_a_body_that_the_gateway_holds_whole_is_one_message(held_bytes: int) -> None:
    async def send() -> Any:
        serving = server(GrpcPort("127.0.0.1", 0))
        await serving.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}") as channel:
                check = channel.unary_unary(f"/{HEALTH}/Check")
                await check(
                    health_pb2.HealthCheckRequest(service="x" * held_bytes).SerializeToString()
                )
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await serving.stop(0)

    assert asyncio.run(send()) == grpc.StatusCode.NOT_FOUND, "the message has been read"
