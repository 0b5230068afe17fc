"""Tests that threads that copy leave the core to which vLLM has bound the thread that started
them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from moonpool_engine.vllm import thread_cores
from moonpool_engine.vllm.thread_cores import BINDINGS, leave_bound_core

ALLOWED = os.sched_getaffinity(os.getppid())
pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two cores")


def cores_of_a_thread(bound_to: int) -> set[int]:
    """Returns the cores of a thread that was bound to one core, and has left it."""
    found: list[set[int]] = []

    def run() -> None:
        os.sched_setaffinity(0, {bound_to})
        leave_bound_core()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_leaves_its_core_but_not_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_cores, "CPUS", tmp_path)
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    first, *others = sorted(ALLOWED)
    before = os.sched_getaffinity(0)
    assert cores_of_a_thread(first) == ALLOWED  # all allowed cores, because no core names its node
    for core in others:
        (tmp_path / f"cpu{core}" / "node1").mkdir(parents=True)
    (tmp_path / f"cpu{first}" / "node0").mkdir(parents=True)
    assert cores_of_a_thread(first) == {first}
    assert cores_of_a_thread(others[0]) == set(others)
    assert os.sched_getaffinity(0) == before


def test_where_vllm_has_bound_nothing_or_nothing_is_known_a_thread_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = min(ALLOWED)
    for name in BINDINGS:
        monkeypatch.delenv(name, raising=False)
    assert cores_of_a_thread(first) == {first}
    monkeypatch.setenv(BINDINGS[0], "granularity=fine")
    monkeypatch.setattr(os, "getppid", lambda: 1 << 30)  # a process that does not exist
    assert cores_of_a_thread(first) == {first}
