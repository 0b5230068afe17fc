"""Becomes another program, which the kernel ends with the process that started it.

python -m moonpool.ray.child PARENT_PID PROGRAM ARGUMENT...

With `--group` before PARENT_PID, the other processes of the program's group end with the program,
however it ends. The engine processes of a vLLM do not notice that their server was killed, and
would keep its memory and its GPU.
"""

from __future__ import annotations

import os
import signal
import sys

from moonpool.children.parent import end_with, wait_for_end


def guard_group() -> None:
    """Forks a process that waits for the end of this one, the leader of a group, and then kills the
    group. As a member of the group, it keeps the group's number from another use."""
    leader = os.getpid()
    if os.fork():
        return
    wait_for_end(leader)
    os.killpg(leader, signal.SIGKILL)


def main(words: list[str]) -> None:
    if words[0] == "--group":
        words = words[1:]
        guard_group()
    end_with(int(words[0]))
    try:
        os.execvp(words[1], words[1:])  # noqa: S606 - the command line of an own process
    except OSError as error:
        where = f"PATH is {os.environ.get('PATH', '')!r}"
        sys.exit(f"moonpool: cannot start {words[1]} on this node: {error.strerror}; {where}")


if __name__ == "__main__":
    main(sys.argv[1:])
