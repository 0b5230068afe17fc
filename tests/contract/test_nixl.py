"""What is NIXL's own: a courier that ends, or must be ended, costs TCP's slowness and no byte."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from messenger_harness import Node, keys, make_layout, need_nixl

from moonpool.kvcache.transfers import FetchEnded, ReadRequested
from moonpool.messenger import courier, links
from moonpool.messenger.arena import Arena
from moonpool.messenger.courier import Courier, CourierError, has_nixl

LAYOUT = make_layout(head_dim=8192)  # 256 KiB slices
BLOCKS = 16


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, Node]]:
    need_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # so that a pull needs the source's courier
    monkeypatch.setattr(courier, "PAUSE_S", 0.5)
    monkeypatch.setattr(links, "DETOUR_S", 0.3)
    nodes = [Node(name, "nixl", LAYOUT, num_blocks=BLOCKS) for name in ("source", "reader")]
    nodes[0].fill(1)
    yield nodes[0], nodes[1]
    for node in nodes:
        node.close()


def fetch(reader: Node, source: Node, timeout_s: float = 5.0) -> FetchEnded:
    """Each way that fails is followed by another read."""
    reader.messenger.fetch("f", source.address, keys(BLOCKS), range(BLOCKS), timeout_s)
    while reader.events.empty():
        if source.events.empty():
            time.sleep(0.01)
            continue
        event = source.events.get()
        if isinstance(event, ReadRequested):
            source.messenger.grant(event.read_id, range(len(event.keys)))
    return reader.expect_event(FetchEnded)


def pid_of_courier(node: Node) -> int:
    assert node.courier is not None
    keeper = node.courier.pid
    return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])


def received(node: Node) -> dict[str, int]:
    return dict(node.messenger.counts().received_bytes)


@pytest.mark.parametrize("whose", [0, 1])
def test_a_courier_that_is_killed_is_followed_by_another_and_by_tcp_meanwhile(
    pair: tuple[Node, Node], whose: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = pair
    assert fetch(reader, source).num_blocks == BLOCKS
    assert set(received(reader)) == {"nixl"}
    monkeypatch.setattr(courier, "PAUSE_S", 60.0)
    os.kill(pid_of_courier(pair[whose]), signal.SIGKILL)
    for _ in range(2):
        reader.arena.buffer[:] = bytes(reader.arena.num_bytes)
        assert fetch(reader, source).num_blocks == BLOCKS
        assert reader.block(BLOCKS - 1) == source.block(BLOCKS - 1)
    assert received(reader)["tcp"] >= reader.arena.num_bytes
    monkeypatch.setattr(courier, "PAUSE_S", 0.1)
    time.sleep(0.4)
    fetch(reader, source)  # the last by the connection that was kept
    before = received(reader)["nixl"]
    assert fetch(reader, source).num_blocks == BLOCKS
    assert received(reader)["nixl"] - before == reader.arena.num_bytes


def test_what_was_given_up_is_never_written_later(pair: tuple[Node, Node]) -> None:
    """UCX takes no transfer back: left alone, it would go on when the source does."""
    source, reader = pair
    assert fetch(reader, source).num_blocks == BLOCKS  # they know each other
    stopped = pid_of_courier(source)
    os.kill(stopped, signal.SIGSTOP)
    try:
        ended = fetch(reader, source, 1.0)
        assert ended.error
        assert "deadline" in ended.error
        reader.arena.buffer[:] = b"n" * reader.arena.num_bytes  # the next owner's
    finally:
        os.kill(stopped, signal.SIGCONT)
    time.sleep(1.0)
    assert bytes(reader.arena.buffer) == b"n" * reader.arena.num_bytes
    assert fetch(reader, source).num_blocks == BLOCKS
    assert reader.block(3) == source.block(3)


def test_couriers_end_with_their_instance() -> None:
    need_nixl()
    node = Node("node", "nixl")
    assert node.courier is not None
    pids = node.courier.pid, pid_of_courier(node)
    node.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_idle_courier_takes_no_processor_time(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    fetch(reader, source)
    time.sleep(0.1)

    def ticks() -> int:
        stats = [Path(f"/proc/{pid_of_courier(n)}/stat").read_text() for n in pair]
        return sum(int(part) for stat in stats for part in stat.rpartition(") ")[2].split()[11:13])

    before = ticks()
    time.sleep(1.0)
    assert ticks() - before <= 2  # of 200


def test_without_the_package_one_line_says_so_and_the_arena_is_sealed() -> None:
    if has_nixl():
        pytest.skip("it is installed")
    arena = Arena(make_layout(), 2, sealed=False)
    with pytest.raises(CourierError, match=r"pip install 'moonpool\[nixl\]'"):
        Courier(arena, "127.0.0.1")
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW
    arena.close()
