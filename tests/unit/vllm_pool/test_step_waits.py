"""Tests that the time for which vLLM's steps wait for the pool is bounded and counted."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import moonpool_engine.vllm.step_waits as module
from moonpool_engine.vllm.scheduler_side import ANSWERS_S
from moonpool_engine.vllm.step_waits import StepWaits
from moonpool_engine.vllm.worker_side import IDLE_S

T = TypeVar("T")
MOST_S = 0.05
"""The time that a step may wait for a dead pool, in the scheduler and in a worker together."""

BLOCKING = {"wait", "wait_for", "result", "sendall", "recv", "connect", "acquire", "join", "read"}
# The calls that may block, by module and function, with the reason why no step waits for the pool
# there.
KNOWN: dict[str, dict[str, str]] = {
    "block_copier": {
        "DeviceCopier.wait": "of the device: streams wait, not the thread",
    },
    "connector": {},
    "held_blocks": {},
    "pool_link": {
        "PoolLink._send_backlog": "in its own thread",
        "PoolLink._run": "in its own thread",
        "PoolLink._serve": "in the thread of _run",
    },
    "scheduler_side": {
        "SchedulerSide._answer": "by StepWaits",
    },
    "space_client": {
        "SpaceClient.reserve": "in the thread of stores, for RESERVE_S",
    },
    "worker_side": {
        "WorkerSide.end_step": "for a copy",
        "WorkerSide.preempt": "for the copy of one piece",
        "WorkerSide.take_finished": "by StepWaits",
        "WorkerSide._store_all": "in its own thread",
    },
}


def blocking_calls(path: Path) -> set[str]:
    """Returns the functions of a module, as Class.name, that contain a call that may block."""
    found = set()
    classes = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    for kind in classes:
        for function in (node for node in kind.body if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                called = call.func
                if not isinstance(called, ast.Attribute) or isinstance(called.value, ast.Constant):
                    continue  # left out, because this is the join of a text
                if called.attr in BLOCKING:
                    found.add(f"{kind.name}.{function.name}")
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_each_call_that_may_block_is_known(name: str) -> None:
    path = Path(module.__file__).with_name(f"{name}.py")
    assert blocking_calls(path) - KNOWN[name].keys() == set()


def test_the_waits_of_all_processes_fit_into_a_step() -> None:
    assert ANSWERS_S + IDLE_S < MOST_S


class Clock:
    """A clock that advances only while a condition waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowCondition(threading.Condition):
    """Makes waits take `factor` times as long as they should, as on a busy machine."""

    def __init__(self, clock: Clock, factor: float = 1.0) -> None:
        super().__init__()
        self._clock, self._factor = clock, factor
        self.granted: list[float] = []

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        assert timeout is not None
        self.granted.append(timeout)
        self._clock.now_s += timeout * self._factor
        return predicate()


@pytest.mark.parametrize("factor", [1.0, 50.0])
def test_all_waits_of_a_step_share_its_time(factor: float) -> None:
    clock = Clock()
    waits, condition = StepWaits(0.02, clock), SlowCondition(clock, factor)
    for _ in range(2):
        waits.begin_step()
        condition.granted.clear()
        with condition:
            for _ in range(100):
                assert not waits.wait(condition, lambda: False, 0.003)
        assert sum(condition.granted) == pytest.approx(0.02)
        assert waits.longest_s == pytest.approx(0.02)


def test_what_is_done_is_not_waited_for() -> None:
    clock = Clock()
    waits, condition = StepWaits(0.02, clock), SlowCondition(clock)
    with condition:
        assert waits.wait(condition, lambda: True, 1.0)
    assert (condition.granted, waits.longest_s) == ([], 0.0)


def test_copies_are_counted_apart() -> None:
    clock = Clock()
    waits = StepWaits(0.02, clock)
    for step_s in (0.5, 0.2):
        waits.begin_step()
        for _ in range(2):
            with waits.copying():
                clock.now_s += step_s
    assert (waits.longest_s, waits.longest_copy_s) == (0.0, 1.0)
