"""Tests that a head with an internal error ends with one line, instead of running on without
deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from moonpool.api.connection.listening import listen
from moonpool.conductor.actions import Tick
from moonpool.conductor.conductor import Conductor
from moonpool.config.parse import parse_config
from moonpool.head.cluster import serve_cluster
from moonpool.head.cluster_error import ClusterError
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.link.packets import PacketSocket, packet_pair
from moonpool.protocol.supervision import AllStreamsSent, FromHead, HeadBegin, HeadUp, ToHead


@pytest.mark.long
def test_a_conductor_that_raises_ends_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Conductor.handle

    def breaks(self: Conductor, event: Any, now: float) -> Any:
        if isinstance(event, Tick):
            raise RuntimeError("a defect")
        return handle(self, event, now)

    monkeypatch.setattr(Conductor, "handle", breaks)
    said: list[FromHead] = []

    def hear(packet: FromHead, fds: Sequence[int]) -> None:
        said.append(packet)

    async def run() -> None:
        ours, theirs = packet_pair()
        supervisor: PacketSocket[FromHead, ToHead] = PacketSocket(
            ours, msgspec.msgpack.Decoder(FromHead), hear, lambda: None
        )
        begin = HeadBegin(
            config=parse_config(""), secret=b"s" * 32, launch=False, num_restarts=0, expected={}
        )
        with listen("127.0.0.1", 0) as http, listen("127.0.0.1", 0) as control:
            supervisor.send(begin, (http.fileno(), control.fileno()))
            supervisor.send(AllStreamsSent(next_number=0))
            link = SupervisorLink(theirs)
            try:
                await asyncio.wait_for(serve_cluster(link), 60)
            finally:
                supervisor.close()
                link.close()

    with pytest.raises(ClusterError, match="RuntimeError: a defect"):
        asyncio.run(run())
    assert HeadUp() in said
