"""Serves the application on a socket. Owns the socket and uvicorn's settings, not the signals."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Generator

import uvicorn
from starlette.applications import Starlette


class PortError(OSError):
    """The address cannot be listened on; the text says why and what to do."""


class HttpServer(uvicorn.Server):
    """`await serve(sockets=[...])` until `should_exit` is set. Signals stay with the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, made before anything slow starts: a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        where = f"{host}:{port}"
        if error.errno == errno.EADDRINUSE:
            text = f"{where} is in use by another process; choose another --port"
        else:
            text = f"cannot listen on {where}: {error.strerror or error}"
        raise PortError(text) from None


def http_server(app: Starlette, drain_s: int = 5) -> HttpServer:
    """`drain_s`: how long answers in progress may go on after `should_exit`."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,  # uvicorn would otherwise set up logging for the whole process
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_s,
    )
    return HttpServer(config)
