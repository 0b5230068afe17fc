"""Tests the process that becomes a program of an actor, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.live.test_faults import wait_until_gone

CHILD = [sys.executable, "-m", "moonpool.ray.child"]


def test_a_program_that_the_node_lacks_is_named_in_one_line() -> None:
    line = [*CHILD, str(os.getpid()), "no-such-vllm", "serve"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert "cannot start no-such-vllm on this node: No such file or directory; PATH is" in said


def test_what_a_killed_program_leaves_in_its_group_is_killed() -> None:
    """As `vllm serve` has an engine process, which does not notice that its server was killed."""
    script = ["sh", "-c", "sleep 1000 & echo $!; exec sleep 1000"]
    line = [*CHILD, "--group", str(os.getpid()), *script]
    program = subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)
    assert program.stdout is not None
    engine = int(program.stdout.readline())
    os.kill(engine, 0)
    os.kill(program.pid, signal.SIGKILL)
    program.wait()
    assert wait_until_gone([engine]) == []
    program.stdout.close()
