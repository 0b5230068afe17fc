"""Tests that foreign clients at the internal port can hold few connections, and cause few log
lines."""

from __future__ import annotations

import asyncio
import logging

import pytest
import uvloop

from moonpool.api.connection.listening import listen
from moonpool.head import head as head_module
from moonpool.link.auth import ClientHandshake, Identity
from moonpool.log_limit import MAX_LINES
from moonpool.types import InstanceId
from tests.unit.runtime.test_rejoin import SECRET, make_head


def test_half_open_connections_are_few_and_do_not_keep_workers_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head_module, "MAX_HALF_OPEN", 8)

    async def run() -> None:
        head = make_head()
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        await head.start(listener)
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        while len(head.open_links) != 8:  # until the server has ended all connections but eight
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        me = Identity(instance_id=InstanceId("w"), service="control", fingerprint=b"")
        handshake = ClientHandshake(SECRET, me)
        body = handshake.start()
        while not handshake.done:
            writer.write(len(body).to_bytes(4, "little") + body)
            size = int.from_bytes(await reader.readexactly(4), "little")
            body = handshake.feed(await reader.readexactly(size))
        assert sum(link.instance_id == "w" for link in head.open_links) == 1
        for _, stranger in strangers:
            stranger.close()
        await head.stop()

    with caplog.at_level(logging.WARNING):
        uvloop.run(asyncio.wait_for(run(), 60))
    assert 0 < len(caplog.records) <= MAX_LINES + 1
