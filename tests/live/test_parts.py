"""Starts head and workers one by one, as on several machines: workers join, are refused, and find
the head again."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator

import httpx
import pytest

from moonpool_lab.demo.local_server import free_port
from tests.forked.commands import ForkedCommand
from tests.live.conftest import MODEL, SMALL
from tests.live.waiting import WAIT_S

PROMPT = {"prompt": [3] * 200, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Part(ForkedCommand):
    """Runs a head or a worker, and keeps its stderr."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], script: str | None
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        fd = self._stderr.fileno()
        super().__init__(arguments, fd, fd, environment, script)

    def communicate(self, timeout: float = 60.0) -> tuple[None, str]:
        """Waits for the process to end. Returns its output."""
        self.wait(timeout)
        self._stderr.seek(0)
        return None, self._stderr.read().decode()


class Parts:
    """Runs processes with one secret, and ends them together."""

    def __init__(self) -> None:
        self.environment = os.environ | {"MOONPOOL_CLUSTER_SECRET": secrets.token_hex(32)}
        self.head_port, self.port = free_port(), free_port()
        self.processes: list[Part] = []

    def start(self, *arguments: str, **environment: str) -> Part:
        return self._start(list(arguments), environment)

    def start_script(self, script: str, *arguments: str) -> Part:
        """Runs this Python with a command's arguments."""
        return self._start(list(arguments), {}, script)

    def _start(
        self, arguments: list[str], environment: dict[str, str], script: str | None = None
    ) -> Part:
        self.processes.append(Part(arguments, self.environment | environment, script))
        return self.processes[-1]

    def start_head(self, *options: str) -> Part:
        ports = ["--head-port", str(self.head_port), "--port", str(self.port)]
        return self.start("head", MODEL, *SMALL, *ports, *options)

    def start_worker(self, role: str, name: str, **environment: str) -> Part:
        head = f"127.0.0.1:{self.head_port}"
        return self.start("worker", "--role", role, "--head", head, "--name", name, **environment)

    def wait_until_healthy(self, wait_s: float = 60.0) -> httpx.Client:
        client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            try:
                if client.get("/health").status_code == 200:
                    return client
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError("the parts did not come together")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.end()


@pytest.mark.long
def test_parts_join_and_find_back_to_a_new_head(parts: Parts) -> None:
    head = parts.start_head()
    parts.start_worker("prefill", "p")
    decode = parts.start_worker("decode", "d")
    client = parts.wait_until_healthy()
    first = client.post("/v1/completions", json=PROMPT).json()
    assert first["usage"]["completion_tokens"] == 8

    twin = parts.start_worker("decode", "d")
    _, words = twin.communicate(timeout=60)
    assert twin.returncode == 1
    assert "choose another --name" in words
    stranger = parts.start_worker("decode", "s", MOONPOOL_CLUSTER_SECRET="ab" * 32)
    _, words = stranger.communicate(timeout=60)
    assert stranger.returncode == 1
    assert "secret differs" in words

    head.kill()
    head.wait()
    parts.start_head()
    client = parts.wait_until_healthy()
    again = client.post("/v1/completions", json=PROMPT).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    # The new head had no index: it learned from the workers which blocks they hold.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 176

    decode.send_signal(signal.SIGTERM)
    assert decode.wait(60) == 0
    deadline = time.monotonic() + WAIT_S
    while client.get("/health").status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    refused = client.post("/v1/completions", json=PROMPT)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "no_decode_instance"
