"""Tests NIXL agents: an agent that ends, or must be stopped, costs time over TCP but no data."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from messenger_harness import Node, keys, make_layout, need_nixl

from moonpool.installation import install_command
from moonpool.protocol.transfer_events import FetchEnded, ReadRequested
from moonpool_engine.transfer import connection_pool
from moonpool_engine.transfer import nixl_agent as nixl_agent_module
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.nixl_agent import NixlAgent, NixlAgentError, has_nixl

LAYOUT = make_layout(head_dim=8192)  # slices of 256 KiB
BLOCKS = 16


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, Node]]:
    need_nixl()
    # allows no shared memory, so that a read needs the source's agent
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(nixl_agent_module, "PAUSE_S", 0.5)
    monkeypatch.setattr(connection_pool, "FALLBACK_S", 0.3)
    nodes = [Node(name, "nixl", LAYOUT, num_blocks=BLOCKS) for name in ("source", "reader")]
    nodes[0].fill(1)
    yield nodes[0], nodes[1]
    for node in nodes:
        node.close()


def fetch(reader: Node, source: Node, timeout_s: float = 5.0) -> FetchEnded:
    """Runs a fetch to its end. After each transport that fails, the source gets another read
    request, which this function grants."""
    reader.messenger.fetch("f", source.address, keys(BLOCKS), range(BLOCKS), timeout_s)
    while reader.events.empty():
        if source.events.empty():
            time.sleep(0.01)
            continue
        event = source.events.get()
        if isinstance(event, ReadRequested):
            source.messenger.grant(event.read_id, range(len(event.keys)))
    return reader.expect_event(FetchEnded)


def pid_of_agent(node: Node) -> int:
    assert node.nixl_agent is not None
    supervisor = node.nixl_agent.pid
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0])


def received(node: Node) -> dict[str, int]:
    return dict(node.messenger.counts().received_bytes)


@pytest.mark.parametrize("whose", [0, 1])
def test_a_killed_agent_is_replaced_and_tcp_is_used_meanwhile(
    pair: tuple[Node, Node], whose: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = pair
    assert fetch(reader, source).num_blocks == BLOCKS
    assert set(received(reader)) == {"nixl"}
    monkeypatch.setattr(nixl_agent_module, "PAUSE_S", 60.0)
    os.kill(pid_of_agent(pair[whose]), signal.SIGKILL)
    for _ in range(2):
        reader.arena.buffer[:] = bytes(reader.arena.num_bytes)
        assert fetch(reader, source).num_blocks == BLOCKS
        assert reader.block(BLOCKS - 1) == source.block(BLOCKS - 1)
    assert received(reader)["tcp"] >= reader.arena.num_bytes
    monkeypatch.setattr(nixl_agent_module, "PAUSE_S", 0.1)
    until_s = time.monotonic() + 60
    before = received(reader)["nixl"]
    while received(reader)["nixl"] == before:  # until a fetch uses the connection that was kept
        assert time.monotonic() < until_s
        fetch(reader, source)
    before = received(reader)["nixl"]
    assert fetch(reader, source).num_blocks == BLOCKS
    assert received(reader)["nixl"] - before == reader.arena.num_bytes


def test_a_transfer_that_was_given_up_never_writes_later(pair: tuple[Node, Node]) -> None:
    """UCX cannot cancel a transfer, so the transfer would continue when the source continues."""
    source, reader = pair
    # after this fetch, the agents know each other
    assert fetch(reader, source).num_blocks == BLOCKS
    stopped = pid_of_agent(source)
    os.kill(stopped, signal.SIGSTOP)
    try:
        ended = fetch(reader, source, 1.0)
        assert ended.error
        assert "deadline" in ended.error
        # stands for the bytes of the next owner
        reader.arena.buffer[:] = b"n" * reader.arena.num_bytes
    finally:
        os.kill(stopped, signal.SIGCONT)
    time.sleep(1.0)
    assert bytes(reader.arena.buffer) == b"n" * reader.arena.num_bytes
    assert fetch(reader, source).num_blocks == BLOCKS
    assert reader.block(3) == source.block(3)


def test_agents_end_with_their_instance() -> None:
    need_nixl()
    node = Node("node", "nixl")
    assert node.nixl_agent is not None
    pids = node.nixl_agent.pid, pid_of_agent(node)
    node.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_idle_agent_takes_no_processor_time(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    fetch(reader, source)
    time.sleep(0.1)

    def ticks() -> int:
        stats = [Path(f"/proc/{pid_of_agent(n)}/stat").read_text() for n in pair]
        return sum(int(part) for stat in stats for part in stat.rpartition(") ")[2].split()[11:13])

    before = ticks()
    time.sleep(1.0)
    assert ticks() - before <= 2  # of 200


def test_without_the_package_one_line_says_so_and_the_arena_is_sealed() -> None:
    if has_nixl():
        pytest.skip("it is installed")
    arena = Arena(make_layout(), 2, sealed=False)
    with pytest.raises(NixlAgentError, match=re.escape(install_command("nixl"))):
        NixlAgent(arena, "127.0.0.1")
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW
    arena.close()
