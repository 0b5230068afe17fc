"""Takes the numbers of instances that a head's Conductor wants, from the head's own webhook."""

from __future__ import annotations

import asyncio
import logging
import secrets

import msgspec
import uvicorn

from moonpool.api.connection.listening import listen
from moonpool.conductor.actions import InstancesWanted
from moonpool.types import MALFORMED

log = logging.getLogger("moonpool.ray")

MAX_BODY_BYTES = 4096
HOST = "127.0.0.1"


class _Posted(msgspec.Struct, frozen=True):
    wanted_instances: InstancesWanted


class WantedListener:
    """An HTTP server on the loopback, at an address that only the head is told."""

    def __init__(self) -> None:
        self.newest: InstancesWanted | None = None
        self._path = f"/{secrets.token_urlsafe()}"
        self._url = ""
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts to listen. Returns the address for `conductor.autoscale_webhook`."""
        if self._serving is None:
            sock = listen(HOST, 0)
            self._url = f"http://{HOST}:{sock.getsockname()[1]}{self._path}"
            config = uvicorn.Config(
                self._serve,
                interface="asgi3",  # stated, because uvicorn does not detect it from a bound method
                log_config=None,
                log_level="warning",
                lifespan="off",
                access_log=False,
            )
            server = uvicorn.Server(config)
            self._serving = asyncio.create_task(server._serve([sock]))
        return self._url

    async def _serve(self, scope: dict[str, object], receive: object, send: object) -> None:
        assert callable(receive) and callable(send)
        body, more = b"", True
        while more and len(body) <= MAX_BODY_BYTES:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        status = 204 if scope["path"] == self._path and self._take(body) else 400
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def _take(self, body: bytes) -> bool:
        try:
            self.newest = msgspec.json.decode(body, type=_Posted).wanted_instances
        except MALFORMED as error:
            log.warning("the head's numbers of instances cannot be read: %s", error)
            return False
        return True
