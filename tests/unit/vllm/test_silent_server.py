"""Tests servers that listen but do not answer, like a server on a busy machine: `serve` starts, and
its worker asks again. `serve` must end immediately if no server listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool.vllm.client import VllmClient, VllmSilentError
from moonpool.vllm.dialects.find import find_dialect
from tests.cli_runner import invoke, succeed


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("moonpool.vllm.client.HEALTH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the configurations with which `serve` would start."""
    found: list[Any] = []
    monkeypatch.setattr("moonpool.cli.serve._run", lambda config, **_: found.append(config))
    return found


def test_a_silent_server_is_told_from_an_unhealthy_one(silent: str) -> None:
    client = VllmClient(silent)
    with pytest.raises(VllmSilentError, match="no answer within"):
        asyncio.run(find_dialect(client))


def test_serve_goes_on_before_a_silent_server(silent: str, started: list[Any]) -> None:
    done = succeed("serve", "--vllm", silent)
    assert len(started) == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"moonpool: the server at {silent}: no answer within")
    assert line.endswith("it is asked again")


def test_serve_ends_where_no_server_listens(started: list[Any]) -> None:
    done = invoke("serve", "--vllm", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert done.stderr == "moonpool: the server at http://127.0.0.1:9: no server listens there\n"
    assert started == []
