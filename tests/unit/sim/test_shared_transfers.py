"""Tests fetches and layer streams over shared links: durations, and exactly one terminal event
each."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId
from moonpool.protocol.transfer_events import (
    FetchEnded,
    LoadEnded,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
    StoreEnded,
)
from moonpool.scheduler.actions import ExpectStream, FetchBlocks, LoadBlocks, StepEntry, StoreBlocks
from moonpool.sim.clock import Clock, Priority
from moonpool.sim.network import Network
from moonpool.sim.transfers import NodeLinks, SimMessenger
from moonpool.types import BlockId, BlockKey, InstanceId

LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=125,  # makes blocks of 1000 bytes
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
)
NIC = 1e6  # bytes per second, so that a block takes a millisecond
PCIE = 2e6
SSD_READ = 0.5e6
SSD_WRITE = 0.25e6
BLOCKS = [BlockId(i) for i in range(10)]
KEYS = tuple(BlockKey(bytes([i])) for i in range(10))


class Bench:
    """Makes three instances, each of which grants up to `granted` blocks per request."""

    def __init__(self, layer_wise: bool = True, granted: int = 10) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.heard: dict[str, list[tuple[float, Any]]] = {"a": [], "b": [], "c": []}
        self.granted = granted
        self.grants = True
        peers: dict[InstanceId, SimMessenger] = {}
        self.messengers: dict[str, SimMessenger] = {}
        for name in self.heard:
            links = NodeLinks(
                self.network.add_link(f"{name} in", NIC),
                self.network.add_link(f"{name} out", NIC),
                self.network.add_link(f"{name} pcie", PCIE),
                self.network.add_link(f"{name} ssd-read", SSD_READ),
                self.network.add_link(f"{name} ssd-write", SSD_WRITE),
            )
            self.messengers[name] = SimMessenger(
                InstanceId(name),
                self.network,
                links,
                LAYOUT,
                0.0,
                layer_wise,
                lambda event, name=name: self._hear(name, event),
                peers,
            )

    def _hear(self, name: str, event: Any) -> None:
        self.heard[name].append((self.clock.now, event))
        if isinstance(event, ReadRequested) and self.grants:
            held = BLOCKS[: min(self.granted, len(event.keys))]
            self.messengers[name].grant(event.read_id, held)

    def of(self, name: str, kind: type) -> list[tuple[float, Any]]:
        return [(at_s, event) for at_s, event in self.heard[name] if isinstance(event, kind)]

    def fetch(self, reader: str, source: str, timeout_s: float = 100.0) -> None:
        address = PeerAddress(InstanceId(source), source, "", "", 0)
        self.messengers[reader].fetch(
            FetchBlocks(f"{reader} from {source}", address, KEYS, BLOCKS, timeout_s)
        )

    def open(self, first_index: int = 0) -> None:
        self.messengers["b"].expect(ExpectStream("w", BLOCKS[first_index:], first_index, 100.0))
        self.messengers["a"].open_stream("w", InstanceId("b"))


def step(indices: range) -> StepEntry:
    sends = tuple((i, BLOCKS[i]) for i in indices)
    return StepEntry(AttemptId("w"), [0], 0, BLOCKS, None, (), sends)


def test_a_busy_holder_slows_a_fetch() -> None:
    alone = Bench()
    alone.fetch("b", "a")
    alone.clock.run()
    ((at_s, ended),) = alone.of("b", FetchEnded)
    assert at_s == pytest.approx(0.010)
    assert (ended.num_blocks, ended.num_bytes, ended.error) == (10, 10_000, "")
    assert len(alone.of("a", ReadEnded)) == 1
    shared = Bench()
    shared.fetch("b", "a")
    shared.fetch("c", "a")
    shared.clock.run()
    for reader in ("b", "c"):
        ((at_s, ended),) = shared.of(reader, FetchEnded)
        assert at_s == pytest.approx(0.020) == ended.seconds


def load(bench: Bench, name: str, blocks: range) -> None:
    ids = tuple(BLOCKS[i] for i in blocks)
    bench.messengers["a"].load(LoadBlocks(name, KEYS[: len(ids)], ids, ids))


def test_a_busy_ssd_slows_a_load() -> None:
    alone = Bench()
    load(alone, "l", range(5))
    alone.clock.run()
    ((at_s, ended),) = alone.of("a", LoadEnded)
    assert at_s == pytest.approx(0.010, rel=0.02) and ended.num_bytes == 5000
    shared = Bench()
    load(shared, "l", range(5))
    load(shared, "m", range(5, 10))
    shared.messengers["a"].store(StoreBlocks("s", KEYS[:5], tuple(BLOCKS[:5]), tuple(range(5))))
    shared.clock.run()
    for at_s, ended in shared.of("a", LoadEnded):
        assert at_s == pytest.approx(0.020, rel=0.02)
        assert ended.seconds == pytest.approx(at_s) and ended.num_blocks == 5
    ((at_s, stored),) = shared.of("a", StoreEnded)
    assert at_s == pytest.approx(0.020, rel=0.02), "writes have a link of their own"
    assert (stored.num_blocks, stored.num_bytes) == (5, 5000)
    figures = shared.messengers["a"].figures
    assert (figures.loaded_bytes, figures.stored_bytes) == (10_000, 5000)


def test_a_fetch_that_times_out_before_the_grant_reports_no_progress() -> None:
    """The fetch must fail if the source reads the blocks from its SSD for longer than the reader
    may wait."""
    bench = Bench()
    bench.grants = False
    bench.fetch("b", "a", timeout_s=0.5)
    bench.clock.run()
    ((at_s, ended),) = bench.of("b", FetchEnded)
    assert at_s == pytest.approx(0.5) and ended.error and not ended.num_blocks
    ((_, read),) = bench.of("a", ReadEnded)
    bench.messengers["a"].grant(read.read_id, BLOCKS)
    bench.clock.run()
    assert len(bench.of("a", ReadEnded)) == 1 and not bench.network.links["a out"].bytes_carried


def test_what_the_source_no_longer_holds_is_not_fetched() -> None:
    bench = Bench(granted=3)
    bench.fetch("b", "a")
    bench.clock.run()
    ((at_s, ended),) = bench.of("b", FetchEnded)
    assert (at_s, ended.num_blocks) == (pytest.approx(0.003), 3)
    nothing = Bench(granted=0)
    nothing.fetch("b", "a")
    nothing.clock.run()
    assert nothing.of("b", FetchEnded)[0][1].num_blocks == 0
    assert len(nothing.of("a", ReadEnded)) == 1


def test_a_fetch_that_takes_too_long_is_given_up() -> None:
    bench = Bench()
    bench.fetch("b", "a", timeout_s=0.004)
    bench.clock.run()
    ((at_s, ended),) = bench.of("b", FetchEnded)
    assert (at_s, ended.num_blocks) == (pytest.approx(0.004), 0) and ended.error
    assert len(bench.of("a", ReadEnded)) == 1
    assert bench.network.links["a out"].num_flows == 0


def test_a_layer_wise_stream_ends_with_the_computing_a_serial_one_after_it() -> None:
    """The stream has 10 blocks, which take 10 ms to send, 5 ms to load, and 30 ms to compute."""
    ends_s = {}
    for layer_wise in (True, False):
        bench = Bench(layer_wise)
        bench.open()
        bench.messengers["a"].send_while_computed(step(range(10)), 0.0, 0.030)
        bench.clock.at(0.030, Priority.STEP_END, bench.messengers["a"].finish_stream, "w")
        bench.clock.run()
        ((ends_s[layer_wise], received),) = bench.of("b", ReceiveEnded)
        assert received.num_bytes == 10_000 and not received.error
        assert len(bench.of("a", SendEnded)) == 1
    assert ends_s[True] == pytest.approx(0.030 + 0.005)
    assert ends_s[False] == pytest.approx(0.030 + 0.010 + 0.005)


def test_blocks_that_the_receiver_holds_do_not_travel() -> None:
    bench = Bench()
    bench.open(first_index=7)
    bench.messengers["a"].send("w", [(i, BLOCKS[i]) for i in range(10)])
    bench.messengers["a"].finish_stream("w")
    bench.clock.run()
    assert bench.of("b", ReceiveEnded)[0][1].num_bytes == 3_000
    assert bench.network.links["a out"].bytes_carried == 3_000


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_stream_given_up_ends_once_on_both_sides(who: str) -> None:
    bench = Bench()
    bench.open()
    bench.messengers["a"].send("w", [(i, BLOCKS[i]) for i in range(10)])
    ends = (
        (bench.messengers["a"].abort_stream, "w")
        if who == "sender"
        else (bench.messengers["b"].cancel_stream, "w")
    )
    bench.clock.at(0.005, Priority.MESSAGE, *ends)
    bench.clock.at(0.006, Priority.MESSAGE, *ends)
    bench.clock.run()
    ((_, sent),) = bench.of("a", SendEnded)
    ((_, received),) = bench.of("b", ReceiveEnded)
    assert sent.error and received.error and received.incomplete == tuple(range(10))
    assert bench.network.links["a out"].num_flows == 0


def test_a_stream_that_is_not_expected_or_never_starts() -> None:
    bench = Bench()
    bench.messengers["a"].open_stream("w", InstanceId("b"))
    bench.messengers["c"].expect(ExpectStream("v", BLOCKS, 0, 100.0))
    bench.clock.run()
    assert bench.of("a", SendEnded)[0][1].error
    bench.messengers["c"].cancel_stream("v")
    bench.clock.run()
    assert bench.of("c", ReceiveEnded)[0][1].error


def test_what_the_receiver_gives_up_while_it_is_loaded_takes_no_more_of_its_pcie() -> None:
    """All blocks were sent after 10 ms, and their load would last until 15 ms."""
    bench = Bench()
    bench.open()
    bench.messengers["a"].send("w", list(enumerate(BLOCKS)))
    bench.messengers["a"].finish_stream("w")
    bench.clock.at(0.012, Priority.MESSAGE, bench.messengers["b"].cancel_stream, "w")
    bench.clock.run()
    ((at_s, ended),) = bench.of("b", ReceiveEnded)
    assert at_s == pytest.approx(0.012) and ended.error
    ((_, sent),) = bench.of("a", SendEnded)
    assert not sent.error
    assert bench.network.links["b pcie"].bytes_carried == pytest.approx(4000)
