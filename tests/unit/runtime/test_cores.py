"""Tests the cores of instances: disjoint, by NUMA node, physical cores first, or none."""

from __future__ import annotations

import os
import threading
from itertools import combinations
from pathlib import Path

import pytest

from moonpool import cores
from moonpool.config.parse import parse_config
from moonpool.cores import (
    Core,
    CoreShare,
    crowding,
    format_cores,
    name_cpu,
    parse_cores,
    pin_thread,
    read_cores,
    share_cores,
)
from moonpool.head import cluster


def machine(nodes: int, cores_each: int, siblings: int = 1) -> list[Core]:
    """Numbers cores like Linux: all first siblings, then all second siblings."""
    total = nodes * cores_each
    return [Core(n % total // cores_each, n // total, n) for n in range(total * siblings)]


def test_engines_have_cores_of_their_own_and_the_rest_has_what_is_left() -> None:
    shares = share_cores(machine(1, 8), [2, 2, 2], usable=8)
    assert [share.engine for share in shares] == [(0, 1), (2, 3), (4, 5)]
    assert {share.others for share in shares} == {(6, 7)}


def test_where_nothing_is_left_the_rest_may_run_anywhere() -> None:
    assert share_cores(machine(1, 2), [1, 1], 2) == [
        CoreShare((0,), (0, 1)),
        CoreShare((1,), (0, 1)),
    ]


@pytest.mark.parametrize("usable", [7, 1])
def test_too_few_cores_or_too_small_a_quota_pin_nothing(usable: int) -> None:
    assert share_cores(machine(1, 8), [2, 2, 2, 2], usable) == []
    assert share_cores([], [1], 8) == []
    assert share_cores(machine(1, 8), [4, 4, 2], 16) == []


def test_an_instance_stays_within_a_node_and_its_messenger_near_it() -> None:
    shares = share_cores(machine(2, 8), [5, 5], usable=16)
    assert [share.engine for share in shares] == [tuple(range(5)), tuple(range(8, 13))]
    assert [share.others for share in shares] == [(5, 6, 7), (13, 14, 15)]


def test_one_that_fits_no_node_takes_cores_of_several() -> None:
    (share,) = share_cores(machine(2, 4), [6], usable=8)
    assert len(set(share.engine)) == 6
    assert set(share.others).isdisjoint(share.engine)


def test_physical_cores_come_before_their_siblings() -> None:
    shares = share_cores(machine(1, 4, siblings=2), [2, 2], usable=8)
    assert [share.engine for share in shares] == [(0, 1), (2, 3)]
    assert shares[0].others == (4, 5, 6, 7)


@pytest.mark.parametrize("processes", range(1, 9))
@pytest.mark.parametrize("threads", range(1, 9))
def test_no_core_is_given_twice(processes: int, threads: int) -> None:
    for layout in (machine(1, 8), machine(2, 6, 2), machine(4, 2)):
        shares = share_cores(layout, [threads] * processes, 64)
        assert len(shares) == (processes if processes * threads <= len(layout) else 0)
        for one, other in combinations(shares, 2):
            assert set(one.engine).isdisjoint(other.engine)
        assert all(len(set(share.engine)) == threads and share.others for share in shares)


def test_core_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cores("0-2,5\n") == (0, 1, 2, 5)
    assert parse_cores("\n") == ()
    assert parse_cores(format_cores((3, 1))) == (3, 1)
    with pytest.raises(ValueError):
        parse_cores("a-b")


def test_a_quota_counts_as_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: set(range(8)))
    file = tmp_path / "cpu.max"
    monkeypatch.setattr(cores, "QUOTA", file)
    for text, expected in (
        ("max 100000", 8),
        ("250000 100000", 2),
        ("1000 100000", 1),
        ("1600000 100000", 8),
        ("?", 8),
    ):
        file.write_text(text)
        assert cores.usable_cores() == expected
    file.unlink()
    assert cores.usable_cores() == 8


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not Linux")
def test_a_pinned_thread_and_its_children_stay_where_they_are_put() -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    def child() -> None:
        seen.append(os.sched_getaffinity(0))

    def pinned() -> None:
        pin_thread([min(before)])
        thread = threading.Thread(target=child)
        thread.start()
        thread.join()
        pin_thread([100_000])  # no such core exists, so the affinity stays unchanged
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert seen == [{min(before)}, {min(before)}]
    assert os.sched_getaffinity(0) == before
    assert {core.number for core in cores.read_cores()} == before


@pytest.mark.parametrize(
    ("pinning", "threads", "num_pinned"),
    [("on", 1, 2), ("on", 2, 2), ("on", 3, 0), ("off", 1, 0)],
)
def test_engines_are_pinned_where_there_is_a_core_for_each_of_their_threads(
    pinning: str, threads: int, num_pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "read_cores", lambda: machine(1, 4))
    monkeypatch.setattr(cluster, "usable_cores", lambda: 4)
    config = parse_config("", {"engine": {"pinning": pinning, "threads": threads}})
    assert len(cluster.core_shares(config)) == num_pinned


def test_two_nodes_as_the_kernel_describes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads files as on a machine of two sockets, and gives each instance cores of one node."""
    nodes, cpus = tmp_path / "node", tmp_path / "cpu"
    for node, numbers in enumerate(("0-3,8-11", "4-7,12-15")):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "cpulist").write_text(f"{numbers}\n")
    for number in range(16):
        folder = cpus / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 8},{number % 8 + 8}\n")
    monkeypatch.setattr(cores, "NODES", nodes)
    monkeypatch.setattr(cores, "CPUS", cpus)
    monkeypatch.setattr(cores, "_allowed", lambda: set(range(16)))
    found = read_cores()
    assert {core.number for core in found if core.node == 1} == {4, 5, 6, 7, 12, 13, 14, 15}
    assert {core.number for core in found if core.sibling == 0} == set(range(8))
    shares = share_cores(found, [3, 3], 16)
    assert [share.engine for share in shares] == [(0, 1, 2), (4, 5, 6)]
    assert set(shares[0].others) == {3, 8, 9, 10, 11}
    assert set(shares[1].others) == {7, 12, 13, 14, 15}


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "model name\t: EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16\n",
            "EPYC (AVX-512, bfloat16)",
        ),
        ("model name\t: EPYC\nflags\t\t: fpu avx2\n\nmodel name\t: other\n", "EPYC (AVX2)"),
        ("model name\t: old\nflags\t\t: fpu sse2\n", "old"),
        ("model name\t: N1\nFeatures\t: fp asimd bf16 i8mm\n", "N1 (NEON, bfloat16, i8mm)"),
    ],
)
def test_a_cpu_is_named_with_the_instructions_that_matter(cpuinfo: str, name: str) -> None:
    assert name_cpu(cpuinfo) == name


@pytest.mark.parametrize(
    ("text", "cores", "crowded"),
    [
        ("[cluster]\nprefill = 50\ndecode = 1\n[engine]\nthreads = 100", 2, "51 engine processes"),
        ("[cluster]\nprefill = 50\ndecode = 1", 2, "51 engine processes of 1 threads each"),
        ("[engine]\nthreads = 100", 2, "2 engine processes of 100 threads each share 2 cores"),
        ("[cluster]\nattention = 60\nmixed = 1\nprefill = 0\ndecode = 0", 8, "61 engine processes"),
        ("[cluster]\nprefill = 2\ndecode = 2", 1, ""),  # the demo's configuration on one core
        ("[cluster]\nprefill = 50\ndecode = 1", 64, ""),
        ("[cluster]\nprefill = 2\ndecode = 2\n[engine]\nthreads = 4", 4, ""),
        ('[cluster]\nprefill = 50\n[engine]\nkind = "vllm"', 2, ""),
        ('[cluster]\nprefill = 50\n[engine]\ndevice = "cuda"', 2, ""),
    ],
)
def test_far_more_threads_than_cores_are_one_line(text: str, cores: int, crowded: str) -> None:
    found = crowding(parse_config(text), cores)
    assert found.startswith(crowded) and bool(found) is bool(crowded) and "\n" not in found
