"""Tests that a process that a signal stopped is found, but not a process that continued or that a
debugger stopped."""

from __future__ import annotations

import signal
import subprocess
import time

from moonpool.children.stopped import MOST_LOOKS, StoppedProcesses, process_state


def test_only_a_process_stopped_at_all_looks_is_found() -> None:
    states = {1: "T", 2: "S", 3: "t", 4: "T"}
    stopped = StoppedProcesses(states.__getitem__)
    for _ in range(MOST_LOOKS - 1):
        assert stopped.look(states) == []
    states[4] = "R"  # the process continues
    assert stopped.look(states) == [1]
    states[4] = "T"
    assert stopped.look(states) == [1]
    del states[1]
    for _ in range(MOST_LOOKS - 1):
        found = stopped.look(states)
    assert found == [4]


def test_the_state_of_a_real_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while process_state(process.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_state(process.pid) == "T"
        process.kill()
    assert process_state(process.pid) == ""
