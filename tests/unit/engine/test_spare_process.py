"""Spare processes run the command line of a stage, and end with the process that forked them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

PREPARE = """
import os, socket, subprocess, sys, threading, types
sys.modules["torch"] = types.ModuleType("torch")  # as if it were imported
from moonpool_engine.engine.parallel.spare_process import begin_spare, fork_spares
from moonpool.children.parent import end_with

def run_line(line):
    sock = socket.socket(fileno=int(line[-1]))
    if line[0] == "echo":
        sock.sendall(f"{line[1]} in session {os.getsid(0) == os.getpid()}".encode())
        sys.exit(int(line[1]))
    sock.recv(1)
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_each_spare_runs_one_line_with_its_descriptor_and_returns_its_status() -> None:
    said = run("""
        fork_spares(2, end_with, run_line)
        for number in (3, 4):
            ours, theirs = socket.socketpair()
            spare = begin_spare(["echo", str(number)], theirs.fileno())
            theirs.close()
            print(ours.recv(100).decode(), spare.wait(120), spare.pid != os.getpid())
            assert ours.recv(1) == b""  # no other process has its end of it
        print(begin_spare(["echo", "5"], 0))
    """)
    assert said.splitlines() == [
        "3 in session True 3 True",
        "4 in session True 4 True",
        "None",
    ]


def test_a_spare_that_has_ended_is_passed_over_and_one_that_runs_can_be_killed() -> None:
    said = run("""
        fork_spares(2, end_with, run_line)
        from moonpool_engine.engine.parallel import spare_process
        last = spare_process._spares[-1]
        last.kill()
        os.waitid(os.P_PID, last.pid, os.WEXITED | os.WNOWAIT)
        ours, theirs = socket.socketpair()
        spare = begin_spare(["wait"], theirs.fileno())
        assert spare is not last and last.returncode == -9
        try:
            spare.wait(0.1)
        except subprocess.TimeoutExpired:
            print("runs")
        spare.kill()
        print(spare.wait())
    """)
    assert said.splitlines() == ["runs", "-9"]


def test_none_is_forked_beside_a_thread() -> None:
    said = run("""
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        fork_spares(2, end_with, run_line)
        print(begin_spare(["wait"], 0))
    """)
    assert said == "None\n"


def test_spares_end_with_the_process_that_forked_them() -> None:
    said = run("""
        fork_spares(2, end_with, run_line)
        from moonpool_engine.engine.parallel import spare_process
        print(*(spare.pid for spare in spare_process._spares), flush=True)
        os._exit(0)
    """)
    pids = [int(word) for word in said.split()]
    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2
    assert [pid for pid in pids if _runs(pid)] == []
    assert os.getpid() not in pids


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
