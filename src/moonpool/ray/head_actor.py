"""The actors of the heads: one leads, the other one stands by on another node.

There is no record of the leader: whichever head serves is the leader. A head that starts again
becomes the standby of the head that serves, so both lead only if neither can see the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from moonpool.api.connection.listening import PortError, reserve
from moonpool.children.process import ChildProcess
from moonpool.children.start import moonpool_line
from moonpool.conductor.actions import InstancesWanted
from moonpool.ray.head_finder import ASK_S, HeadFinder, HeadPlace, Standing
from moonpool.ray.process_actor import ProcessActor
from moonpool.ray.wanted_listener import WantedListener

LOOK_S = 0.5
AGAIN_S = 10.0
"""How long a restarted head waits for a leading head that does not respond. This time is longer
than a takeover takes."""
FIRST_S = 120.0
"""How long a head that starts for the first time waits for the heads before it, which may still be
loading."""


@dataclass(frozen=True, slots=True)
class HeadActorSettings:
    """`toml`: the whole configuration. `scheme`, `api_host` and `api_port`: the address for
    clients."""

    toml: str
    scheme: str
    api_host: str
    api_port: int


class HeadActor(ProcessActor):
    """Keeps `moonpool head`, or `moonpool head --standby-of`, running."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        settings: HeadActorSettings,
        heads: Sequence[str],
    ) -> None:
        """`heads`: the names of all head actors, the first of which leads at first."""
        super().__init__(name, environment)
        self._settings = settings
        self._others = HeadFinder([each for each in heads if each != name])
        self._before = HeadFinder(heads[: heads.index(name)])
        self._api_port, self._port = settings.api_port, 0
        self._wanted = WantedListener()
        self._file = Path(mkdtemp(prefix="moonpool-"), "moonpool.toml")
        self._is_standby = False
        # whether a head of this name ran before this one, which may have led
        self._was_here = self._is_again
        self._keep(name)

    async def standing(self) -> Standing:
        if await self._leads():
            return "leads"
        return "stands by" if self._is_standby and await self.pid() else "starts"

    async def place(self) -> HeadPlace | None:
        """Returns where this head serves, or None if it does not lead, or does not answer yet."""
        if not await self._leads() or not await self._answers():
            return None
        return HeadPlace(await self.url(), self._host, self._port)

    async def url(self) -> str:
        """Returns the address at which this head serves, or will once it leads; "" while the
        address is not known."""
        if not await self.pid():
            return ""
        shown = self._settings.api_host
        host = self._host if shown in ("0.0.0.0", "::") else shown  # noqa: S104
        host = f"[{host}]" if ":" in host else host
        return f"{self._settings.scheme}://{host}:{self._api_port}"

    async def wanted(self) -> InstancesWanted | None:
        """The newest numbers of instances that the Conductor wants, or None if it has not said."""
        return self._wanted.newest

    async def _leads(self) -> bool:
        """Whether this node's head accepts clients. A standby does not, until it takes over."""
        return bool(await self.pid()) and await self._try(b"")

    async def _answers(self) -> bool:
        """Whether the head itself answers; its supervisor accepts clients earlier."""
        return await self._try(b"GET /health HTTP/1.0\r\n\r\n")

    async def _try(self, request: bytes) -> bool:
        """Connects as a client does; waits for an answer, of any kind, if there is a request."""
        host = self._settings.api_host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        try:
            async with asyncio.timeout(ASK_S / 2):
                reader, writer = await asyncio.open_connection(host, self._api_port)
                with contextlib.closing(writer):
                    if request:
                        writer.write(request)
                        await reader.read(1)
        except (OSError, TimeoutError):
            return False
        return True

    async def _spawn(self, name: str) -> ChildProcess:
        leader = await self._leader()
        self._is_standby, self._was_here = leader is not None, True
        hook = await self._wanted.start()
        # Takes the same ports again, unless another process has taken them meanwhile.
        self._api_port = _free_port(self._settings.api_host, self._api_port)
        self._port = _free_port(self._host, self._port)
        self._file.touch(mode=0o600)
        self._file.write_text(f"{self._settings.toml}\n", encoding="utf-8")
        line = ["head", "--config", str(self._file), "--port", str(self._api_port)]
        line += ["--head-host", self._host, "--head-port", str(self._port)]
        line += ["--autoscale-webhook", hook]
        if leader is not None:
            line += ["--standby-of", f"{leader.host}:{leader.port}"]
        return await self._start(moonpool_line(*line))

    async def _leader(self) -> HeadPlace | None:
        """Looks for the head that leads. Returns None if this head has to lead."""
        is_again, is_first = self._was_here, not self._before.names
        others = self._others if is_again else self._before
        patience_s = AGAIN_S if is_again else FIRST_S
        heard_s = time.monotonic()
        while others.names:
            place = await others.leader()
            if place is not None:
                return place
            standings = await others.standings()
            if is_again and is_first and set(standings) == {"starts"}:
                return None
            if standings:  # a standby takes over soon, or another head starts before this one
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > patience_s:
                return None
            await asyncio.sleep(LOOK_S)
        return None


def _free_port(host: str, port: int) -> int:
    """Returns `port` if it is free, else another one."""
    with contextlib.suppress(PortError), contextlib.closing(reserve(host, port)) as bound:
        return int(bound.getsockname()[1])
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("", 0))
        return int(bound.getsockname()[1])
