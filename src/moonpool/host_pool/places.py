"""The default location of a host's pool."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

SOCKET_VARIABLE = "MOONPOOL_POOL"


def default_socket() -> Path:
    """Returns the path of the unix socket: from the environment, or in the user's runtime
    folder."""
    named = os.environ.get(SOCKET_VARIABLE)
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "moonpool" if runtime else Path(f"/tmp/moonpool-{os.getuid()}")  # noqa: S108
    return folder / "pool.sock"


def default_memory_folder() -> Path:
    """The folder in memory for the blocks."""
    return Path(f"/dev/shm/moonpool-{os.getuid()}")  # noqa: S108


def make_own_folder(folder: Path) -> None:
    """Makes the folder of a socket, unless it is there. Raises OSError if it cannot be made,
    belongs to another user, or others can write in it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(errno.EPERM, f"others can write in {folder}; name another --socket")


def is_served(path: Path) -> bool:
    """Whether somebody serves at the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
