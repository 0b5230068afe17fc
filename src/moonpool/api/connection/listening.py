"""The listening sockets of a cluster, opened early, so that a used port is reported at once."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048
"""Connections that wait while there is no head."""


class PortError(OSError):
    """Nothing can listen on the address; the text says why and what to do."""


def listen(host: str, port: int, option: str = "--port") -> socket.socket:
    """Opens a listening socket. `option` sets another port. Raises PortError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            text = f"{where} is in use by another process; choose another {option}"
        else:
            text = f"cannot listen on {where}: {error.strerror or error}"
        raise PortError(text) from None
