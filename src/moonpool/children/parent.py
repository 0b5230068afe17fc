"""Ends a process together with its parent, however the parent ends, or waits for that end."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.25


def end_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent `parent_pid` ends, or at once if the
    parent has already ended. On other systems than Linux, a thread checks whether the parent has
    ended."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        look = threading.Thread(target=_end_without, args=(parent_pid,), daemon=True)
        look.start()
        return
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return
    if os.getppid() != parent_pid:
        os._exit(1)


def wait_for_end(parent_pid: int) -> None:
    """Returns when the parent `parent_pid` of this process has ended, however it ended."""
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_S)


def _end_without(parent_pid: int) -> None:
    wait_for_end(parent_pid)
    os._exit(1)
