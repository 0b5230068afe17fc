"""The listening sockets of a cluster, opened early, so that a used port is reported at once."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048
"""Most connections that wait while there is no head."""


class PortError(OSError):
    """The server cannot listen on the address; the text says why and what to do."""


def listen(host: str, port: int, option: str = "--port") -> socket.socket:
    """Opens a listening socket. `option`: the option that sets another port. Raises PortError."""
    bound = reserve(host, port, option)
    bound.listen(BACKLOG)
    return bound


def reserve(host: str, port: int, option: str = "--port") -> socket.socket:
    """Binds an address. No connection is accepted until the socket's `listen`. Raises PortError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((host, port))
        return found
    except OSError as error:
        found.close()
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            text = f"{where} is in use by another process; choose another {option}"
        else:
            text = f"cannot listen on {where}: {error.strerror or error}"
        raise PortError(text) from None
