"""Where the pool of a host is found, unless its user says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

SOCKET_VARIABLE = "MOONPOOL_POOL"


def default_socket() -> Path:
    """The unix socket: that of the environment, or one in the user's runtime folder."""
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "moonpool" if runtime else Path(f"/tmp/moonpool-{os.getuid()}")  # noqa: S108
    return folder / "pool.sock"


def default_memory_folder() -> Path:
    """The folder in memory for the blocks."""
    return Path(f"/dev/shm/moonpool-{os.getuid()}")  # noqa: S108
