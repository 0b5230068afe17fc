"""Tests the Mooncake Store in place of the SSD, shared by instances. Whatever happens to master,
holder or client, the store neither hangs an instance nor returns wrong blocks. The tests need the
optional package `mooncake`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from tier_harness import Bench, keys_of

from moonpool.config.tables import MooncakeConfig
from moonpool_engine.storage import mooncake_client
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.storage.mooncake import LOOK_UP_S, MooncakeStore, object_name
from tests.mooncake_cluster import MooncakeCluster, free_port
from tests.processes import children

WAIT_S = 300.0


@pytest.fixture
def cluster() -> Iterator[MooncakeCluster]:
    cluster = MooncakeCluster()
    yield cluster
    cluster.stop()


@pytest.fixture
def make(cluster: MooncakeCluster) -> Iterator[Callable[[], Bench]]:
    made: list[Bench] = []

    def make() -> Bench:
        made.append(
            Bench(lambda arena, post: MooncakeStore(arena, cluster.config, "127.0.0.1", post))
        )
        return made[-1]

    yield make
    for bench in made:
        bench.store.close()


def until_it_works(bench: Bench, what: str) -> None:
    by_s = time.monotonic() + WAIT_S
    while bench.put(keys_of(what, 3)).num_blocks < 3:
        assert time.monotonic() < by_s, "it did not come back"
        time.sleep(0.2)
    assert bench.get(keys_of(what, 3)).num_blocks == 3


def test_one_instance_finds_the_blocks_of_another(make: Callable[[], Bench]) -> None:
    one, other = make(), make()
    keys = keys_of("shared", 6)
    one.put(keys)
    assert other.look_up(keys).num_blocks == 6
    assert other.get(keys).num_blocks == 6
    one.store.close()
    assert make().get(keys).num_blocks == 6  # finds the blocks of the cluster that started later


def test_a_lost_master_is_an_immediate_miss_until_it_is_back(
    make: Callable[[], Bench], cluster: MooncakeCluster
) -> None:
    bench = make()
    keys = keys_of("lost", 3)
    bench.put(keys)
    cluster.stop()
    for _ in range(5):
        ended = bench.look_up(keys)
        assert ended.num_blocks == 0 and "gone" in ended.error
        assert bench.get(keys).num_blocks == 0
        assert bench.put(keys).num_blocks == 0
    assert bench.store.counts().failed_operations == 15
    cluster.start()
    until_it_works(bench, "back")


def test_a_master_that_hangs_costs_one_deadline(
    make: Callable[[], Bench], cluster: MooncakeCluster
) -> None:
    bench = make()
    keys = keys_of("hangs", 3)
    bench.put(keys)
    cluster.master.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    for _ in range(10):
        assert bench.look_up(keys).num_blocks == 0
    assert time.monotonic() - began_s < 10 * LOOK_UP_S, "each look-up waited"
    assert bench.get(keys).num_blocks == 0


def test_a_client_that_dies_is_started_again(make: Callable[[], Bench]) -> None:
    others, bench = children(), make()
    [pid] = children() - others
    os.kill(pid, signal.SIGKILL)
    until_it_works(bench, "client")
    [successor] = children() - others
    assert successor != pid


def test_the_client_ends_with_its_instance(make: Callable[[], Bench]) -> None:
    others, bench = children(), make()
    assert len(children() - others) == 1
    bench.store.close()
    assert children() <= others


def test_a_foreign_object_is_a_miss_and_is_replaced(
    make: Callable[[], Bench], cluster: MooncakeCluster
) -> None:
    bench = make()
    (key,) = keys_of("foreign", 1)
    name = object_name(bench.arena.layout, key)
    size = 4096 + bench.size  # as long as the objects that this store writes
    script = (
        "import os; from mooncake.store import MooncakeDistributedStore as S; s = S();"
        f" c = s.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 1 << 24, 'tcp', '', '{cluster.address}');"
        f" c = c or s.put('{name}', b'x' * {size}); os._exit(c != 0)"
    )
    assert not subprocess.run([sys.executable, "-c", script], capture_output=True).returncode
    assert bench.look_up([key]).num_blocks == 1
    ended = bench.get([key])
    assert (ended.num_blocks, ended.corrupt_slices) == (0, 1)
    assert bench.look_up([key]).num_blocks == 0
    bench.put([key])
    assert bench.get([key]).num_blocks == 1


def test_a_full_store_ends_writes_with_an_error(cluster: MooncakeCluster) -> None:
    cluster.holder.kill()  # With the client, all memory that it lent is gone, too.
    config = cluster.config
    bench = Bench(lambda arena, post: MooncakeStore(arena, config, "127.0.0.1", post))
    try:
        ended = bench.put(keys_of("full", 2))
        assert ended.num_blocks == 0 and ended.error
        assert bench.get(keys_of("full", 2)).num_blocks == 0
    finally:
        bench.store.close()


def test_a_missing_store_is_reported_in_one_line(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_client, "START_S", 3.0)
    nobody = MooncakeConfig(master_server_address=f"127.0.0.1:{free_port()}")
    with pytest.raises(StoreError, match="mooncake_master"):
        Bench(lambda arena, post: MooncakeStore(arena, nobody, "127.0.0.1", post))
