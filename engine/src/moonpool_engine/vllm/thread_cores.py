"""Cores for the threads that copy blocks beside those that compute."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
BINDINGS = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES")
"""The environment variables that vLLM sets for a worker whose threads it binds, by the library of
the threads."""


def leave_bound_core() -> None:
    """Lets the calling thread run on all cores near its own that the process's parent may use, if
    the threads of this process are bound.

    On a CPU, vLLM binds each of its threads to one core, and the threads that it starts inherit
    that. A copy on that core would stop one of the threads that compute, and all others wait for
    that thread.
    """
    if not any(name in os.environ for name in BINDINGS):
        return  # its cores are what its user has chosen
    with contextlib.suppress(OSError, AttributeError):  # where cores cannot be chosen
        own = os.sched_getaffinity(0)
        node = _node(min(own))
        allowed = os.sched_getaffinity(os.getppid())
        os.sched_setaffinity(0, own | {core for core in allowed if _node(core) == node})


def _node(core: int) -> str:
    """The NUMA node of a core; empty where the machine names none."""
    return next((path.name for path in (CPUS / f"cpu{core}").glob("node[0-9]*")), "")
