"""An instance keeps KVCache beside its attention workers. Its answers, read from both memories, are
the same as without either memory, even when one memory is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.test_attention import (
    LONG,
    SHORT,
    ask,
    ask_together,
    attention_pids,
    counters_of_soon,
    restarted,
    wait_for_successor,
    while_answering,
)
from tests.live.waiting import wait_until_idle

pytestmark = pytest.mark.long

SPREAD = LONG | {"prompt": [9, 8] * 1100, "max_tokens": 200}
"""Is longer than a segment, so that by token range the KVCache lies in both memories."""
BASE = [MODEL, "--prefill", "1", "--decode", "1", *SMALL]
OWN = ["--attention", "1", "--attention-own-tokens", "8192"]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LocalServer(BASE) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        return [ask(client, body) for body in (LONG, SHORT, SPREAD)]


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with LocalServer([*BASE, *OWN]) as server:
        yield server


def test_the_first_request_needs_no_attention_worker(
    server: LocalServer, expected: list[str]
) -> None:
    client = httpx.Client(base_url=server.url, timeout=60)
    worker = attention_pids(server)["attention-0"]
    os.kill(worker, signal.SIGSTOP)
    try:
        assert ask(client, SHORT) == expected[1]
    finally:
        os.kill(worker, signal.SIGCONT)
    assert ask_together(client, [LONG, SHORT, SHORT]) == [expected[0], *expected[1:2] * 2]
    # the second answers read cached blocks
    assert ask_together(client, [LONG, SHORT]) == expected[:2]


@pytest.mark.long
def test_either_memory_may_be_lost(server: LocalServer, expected: list[str]) -> None:
    client = httpx.Client(base_url=server.url, timeout=60)
    before = attention_pids(server)

    def kill_worker() -> None:
        os.kill(before["attention-0"], signal.SIGKILL)

    assert while_answering(client, LONG, kill_worker) == [expected[0]] * 2
    assert counters_of_soon(client, "decode-0", "lost_arenas") == 1
    assert restarted(server, before, "attention-0")
    wait_until_idle(client)  # The owner has the KVCache back.

    # Of two other requests, one lies in the instance's own memory and is lost with it; the other
    # lies at the worker.
    others = [LONG | {"prompt": [6, 5] * 300}, LONG | {"prompt": [4, 3] * 300}]
    answers = ask_together(client, others)
    cluster = client.get("/cluster").json()["instances"]
    owner = next(i["pid"] for i in cluster if i["role"] == "decode")
    os.kill(owner, signal.SIGKILL)
    wait_for_successor(client, owner)
    assert ask_together(client, [*others, LONG, SHORT]) == [*answers, *expected[:2]]


def test_a_long_request_lies_in_both_also_over_tcp(expected: list[str], tmp_path: Path) -> None:
    config = tmp_path / "tcp.toml"
    config.write_text("[network]\nuse_shared_memory = false\n")
    partition = ["--attention-partition", "tokens", "--config", str(config)]
    with LocalServer([*BASE, *OWN, *partition]) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        assert ask_together(client, [SPREAD, SHORT]) == [expected[2], expected[1]]
        assert ask(client, SPREAD) == expected[2]

        def kill_worker() -> None:
            os.kill(attention_pids(server)["attention-0"], signal.SIGKILL)

        assert while_answering(client, SPREAD, kill_worker, copies=1) == [expected[2]]
        assert counters_of_soon(client, "decode-0", "lost_arenas") == 1
