"""Runs the process that forks commands, which `tests.forked.commands` starts."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
from typing import Any

import setproctitle

from moonpool.cli.head_process import import_for
from moonpool.cli.main import main
from moonpool.head.fork_server import end_quickly

MAX_ORDER_BYTES = 1 << 17


class CommandServer:
    """Forks a process for each order that `control` brings, and returns its exit status."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._links: dict[int, tuple[int, socket.socket]] = {}
        """Maps the descriptor that tells a test's end to the test's process and connection."""

    def serve(self) -> dict[str, Any] | None:
        """Returns the order in each forked process, and None at the end."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._tell_end(key.fd)
                    continue
                data, fds, _, _ = socket.recv_fds(self._control, MAX_ORDER_BYTES, 5)
                if not data:
                    return None
                pid = os.fork()
                if pid == 0:
                    self._close()
                    order: dict[str, Any] = json.loads(data)
                    order["arguments"] += self._take_over(fds)
                    return order
                self._follow(pid, socket.socket(fileno=fds[0]))
                for fd in fds[1:]:
                    os.close(fd)

    def _follow(self, pid: int, link: socket.socket) -> None:
        pidfd = os.pidfd_open(pid)
        self._links[pidfd] = (pid, link)
        self._selector.register(pidfd, selectors.EVENT_READ)
        link.send(f"{pid}\n".encode())

    def _tell_end(self, pidfd: int) -> None:
        pid, link = self._links.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # fails if the test has ended
            link.send(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        link.close()

    def _close(self) -> None:
        self._selector.close()
        self._control.close()
        for pidfd, (_, link) in self._links.items():
            os.close(pidfd)
            link.close()

    @staticmethod
    def _take_over(fds: list[int]) -> list[str]:
        """Takes stdin, stdout and stderr. Returns the number of a fourth descriptor."""
        os.close(fds[0])
        for number, fd in enumerate(fds[1:4]):
            os.dup2(fd, number)
            os.close(fd)
        return [str(fd) for fd in fds[4:]]


def run(order: dict[str, Any]) -> None:
    """Runs the command of the order as a new interpreter would."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[0] = order["folder"]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(order["open_files"], hard), hard))
    sys.argv = ["moonpool", *order["arguments"]]
    setproctitle.setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
    try:
        if order["script"] is not None:
            exec(order["script"], {"__name__": "__main__"})
        main(args=order["arguments"], prog_name="moonpool")
    except SystemExit as end:
        end_quickly(end.code)


if __name__ == "__main__":
    # makes setproctitle read the command line now, because that fails once variables have moved
    setproctitle.getproctitle()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import_for("own")
    gc.collect()
    gc.freeze()  # because a garbage collection would copy all pages
    found = CommandServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    if found is not None:
        run(found)
