"""Tests a worker's answers to the probes of an orchestrator."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from moonpool.link.health import HealthServer
from moonpool_lab.demo.local_server import free_port
from tests.forked.commands import run_command


async def raw(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


def test_ready_follows_the_worker_and_live_does_not() -> None:
    async def run() -> None:
        reason = "it starts"
        server = HealthServer(lambda: reason)
        url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
        async with httpx.AsyncClient() as client:
            ready = await client.get(f"{url}/ready")
            assert (ready.status_code, ready.json()) == (503, {"ready": False, "reason": reason})
            assert (await client.get(f"{url}/live")).status_code == 200
            reason = ""
            ready = await client.get(f"{url}/ready?verbose=1")
            assert (ready.status_code, ready.json()) == (200, {"ready": True, "reason": None})
            assert (await client.head(f"{url}/ready")).status_code == 200
            assert (await client.get(f"{url}/metrics")).status_code == 404
            assert (await client.post(f"{url}/ready")).status_code == 405
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "data", [b"", b"\r\n\r\n", b"GET\r\n\r\n", b"G" * 5000, b"\x00\xff\r\n\r\n"]
)
def test_what_is_no_http_harms_nothing(data: bytes) -> None:
    async def run() -> None:
        server = HealthServer(lambda: "")
        port = await server.start("127.0.0.1", 0)
        await raw(port, data)
        assert (await raw(port, b"GET /live HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        server.close()

    asyncio.run(run())


def test_an_address_that_is_taken_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv("MOONPOOL_CLUSTER_SECRET", "0" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        line = ["worker", "--role", "decode", "--head", f"127.0.0.1:{free_port()}"]
        done = run_command(*line, "--health", where)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"moonpool: cannot answer probes at {where}")
    assert "Traceback" not in done.stderr
