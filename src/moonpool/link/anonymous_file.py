"""A file without a name, in memory where the system has such files."""

from __future__ import annotations

import os
import tempfile


def anonymous_file(name: str) -> int:
    """Returns its descriptor, which the caller owns, and which programs do not inherit. Linux shows
    `name` in /proc. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="moonpool-")
    os.unlink(path)
    return fd
