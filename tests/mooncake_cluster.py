"""Runs a real mooncake_master on the loopback, and a mooncake_client that lends it memory."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonpool.config.tables import MooncakeConfig

START_S = 20.0
SEGMENT_BYTES = 256 << 20


def _package() -> Path:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None or not _loads():
        pytest.skip("the package mooncake-transfer-engine-non-cuda is not installed")
    return Path(spec.origin).parent


def _loads() -> bool:
    """Whether the package can be loaded. Its libraries may be missing, or may end the process that
    loads them."""
    command = [sys.executable, "-c", "import mooncake.store"]
    return subprocess.run(command, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class MooncakeCluster:
    """Skips the test if the package is not installed."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = _package()
        self._segment_bytes = segment_bytes
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> MooncakeConfig:
        return MooncakeConfig(master_server_address=self.address)

    def start(self) -> None:
        self.master = self._run(
            "mooncake_master",
            f"--rpc_port={self.port}",
            f"--metrics_port={free_port()}",
            "--rpc_address=127.0.0.1",
        )
        await_port(self.port)
        client_port = free_port()
        self.holder = self._run(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={client_port}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={self._segment_bytes}",
        )
        await_port(client_port)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [self._folder / name, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        return process


def await_port(port: int) -> None:
    by_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < by_s, f"nothing listens at port {port}"
            time.sleep(0.05)
