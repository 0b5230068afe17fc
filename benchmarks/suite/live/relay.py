"""The least a head could cost: a process that answers each message on one socket by one on another.

Two system calls and a wake-up per token are the floor of any head that streams; what they cost
depends on the machine. `python -m benchmarks.suite.live.relay` is the relay, and
`relay_cpu_s` measures it.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable

import uvloop

from benchmarks.checkout import ROOT

MESSAGES = 20_000


class _Out(asyncio.Protocol):
    def __init__(self, outputs: list[asyncio.BaseTransport]) -> None:
        self._outputs = outputs

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._outputs.append(transport)


class _In(asyncio.Protocol):
    def __init__(self, outputs: list[asyncio.BaseTransport]) -> None:
        self._outputs = outputs

    def data_received(self, data: bytes) -> None:
        for transport in self._outputs:
            transport.write(data)  # type: ignore[attr-defined]


async def _relay() -> None:
    outputs: list[asyncio.BaseTransport] = []
    loop = asyncio.get_running_loop()
    into = await loop.create_server(lambda: _In(outputs), "127.0.0.1", 0)
    out = await loop.create_server(lambda: _Out(outputs), "127.0.0.1", 0)
    sys.stdout.write(f"{into.sockets[0].getsockname()[1]} {out.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.sleep(300)


def relay_cpu_s(cpu_s: Callable[[int], float]) -> float:
    """CPU seconds per message of the bare relay, one message at a time; `cpu_s` reads a pid's."""
    command = [sys.executable, "-m", "benchmarks.suite.live.relay"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            into, out = map(int, process.stdout.readline().split())
            with (
                socket.create_connection(("127.0.0.1", out)) as reader,
                socket.create_connection(("127.0.0.1", into)) as writer,
            ):
                writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _turn(writer, reader, 500)
                began_s = cpu_s(process.pid)
                _turn(writer, reader, MESSAGES)
                return (cpu_s(process.pid) - began_s) / MESSAGES
        finally:
            process.kill()


def _turn(writer: socket.socket, reader: socket.socket, count: int) -> None:
    for _ in range(count):
        writer.sendall(b"x" * 100)
        if not reader.recv(4096):
            raise ConnectionError("the relay went away")


if __name__ == "__main__":
    uvloop.run(_relay())
