"""Kills or stops a peer process during a transfer: the end of the transfer is reported once,
immediately or by the deadline.

The tests wait for an event for less time than the deadlines, so an event that comes was not caused
by a deadline.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
from messenger_harness import Node, keys

from moonpool.protocol.transfer_events import (
    FetchEnded,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)

BIG = {"num_blocks": 32}
TIMEOUT_S = 300.0


def peer_main(pipe: Pipe, transport: str) -> None:
    """Obeys the test: sends half a stream, expects a stream, fetches, or ignores requests for
    blocks."""
    node = Node("peer", transport, **BIG)
    pipe.send(node.address)
    while True:
        command, target = pipe.recv()
        if command == "send half":
            node.messenger.open_stream("s", target, TIMEOUT_S)
            node.messenger.send("s", [(0, 0, 0), (1, 1, 0)])
        elif command == "expect":
            node.messenger.expect("s", [0, 1], 0, TIMEOUT_S)
        elif command == "fetch":
            node.messenger.fetch("f", target, keys(2), [0, 1], TIMEOUT_S)
        pipe.send("done")


class PeerProcess:
    def __init__(self, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=peer_main, args=(there, transport), daemon=True)
        self.process.start()
        there.close()
        self.address: PeerAddress = self._pipe.recv()

    def do(self, command: str, target: PeerAddress | None = None) -> None:
        self._pipe.send((command, target))
        assert self._pipe.recv() == "done"

    def strike(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            self._await_stop(self.process.pid)

    @staticmethod
    def _await_stop(pid: int) -> None:
        """The threads of a killed process run on until one of them is scheduled and takes the
        signal."""
        by_s = time.monotonic() + 60
        states: set[str] = set()
        while states != {"T"}:
            assert time.monotonic() < by_s, states
            tasks = Path(f"/proc/{pid}/task").iterdir()
            states = {(task / "stat").read_text().rpartition(") ")[2][0] for task in tasks}


@pytest.fixture
def peer(transport: str) -> Iterator[PeerProcess]:
    made = PeerProcess(transport)
    yield made
    made.strike(signal.SIGKILL)
    made.process.join(60)
    assert not made.process.is_alive()


@pytest.fixture
def node(make_node: Callable[..., Any]) -> Node:
    return make_node("node")


def await_count(node: Node, name: str, value: int) -> None:
    by_s = time.monotonic() + 60
    while getattr(node.messenger.counts(), name) < value:
        assert time.monotonic() < by_s
        time.sleep(0.005)


def test_a_killed_peer_is_noticed_at_once_in_every_role(node: Node, peer: PeerProcess) -> None:
    node.messenger.expect("s", [4, 5], 0, TIMEOUT_S)
    peer.do("send half", node.address)
    await_count(node, "received_slices", 2)
    node.messenger.open_stream("s", peer.address, TIMEOUT_S)
    peer.do("expect")
    node.messenger.send("s", [(0, 0, 0)])
    await_count(node, "sent_slices", 1)
    node.messenger.fetch("f", peer.address, keys(2), [6, 7], TIMEOUT_S)
    peer.do("fetch", node.address)
    asked = node.expect_event(ReadRequested)
    time.sleep(0.1)
    peer.strike(signal.SIGKILL)
    ends = [node.events.get(timeout=60) for _ in range(3)]
    node.messenger.grant(asked.read_id, [0, 1])
    ends.append(node.events.get(timeout=60))
    assert {type(e) for e in ends} == {ReceiveEnded, SendEnded, FetchEnded, ReadEnded}
    assert all(e.error for e in ends)
    [received] = [e for e in ends if isinstance(e, ReceiveEnded)]
    assert received.incomplete == (0, 1)
    assert node.messenger.counts().corrupt_slices == received.corrupt_slices == 0
    node.expect_silence(0.1)


def test_a_stopped_peer_is_given_up_at_the_deadline(node: Node, peer: PeerProcess) -> None:
    peer.do("expect")
    node.messenger.open_stream("s", peer.address, 1.5)
    node.messenger.send("s", [(0, 0, 0)])
    node.messenger.expect("r", [4], 0, 1.5)
    await_count(node, "sent_slices", 1)
    peer.strike(signal.SIGSTOP)
    node.messenger.send("s", [(1, 1, layer) for layer in range(3)])
    node.messenger.finish_stream("s")
    node.messenger.fetch("f", peer.address, keys(1), [5], 1.5)
    ends = [node.events.get(timeout=60) for _ in range(3)]
    assert {type(e) for e in ends} == {ReceiveEnded, SendEnded, FetchEnded}
    assert all("deadline" in e.error for e in ends), ends
    node.expect_silence()
