"""A head that breaks inside ends with one line, instead of lingering without deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonpool.conductor.actions import Tick
from moonpool.conductor.conductor import Conductor
from moonpool.config import parse_config
from moonpool.demo.local_server import free_port
from moonpool.runtime.cluster import ClusterError, run_cluster


def test_a_conductor_that_raises_ends_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Conductor.handle

    def breaks(self: Conductor, event: Any, now: float) -> Any:
        if isinstance(event, Tick):
            raise RuntimeError("a defect")
        return handle(self, event, now)

    monkeypatch.setattr(Conductor, "handle", breaks)
    config = parse_config("", {"api": {"port": free_port()}})

    async def run() -> None:
        await asyncio.wait_for(run_cluster(config, b"s" * 32, False, lambda stop: None), 60)

    with pytest.raises(ClusterError, match="RuntimeError: a defect"):
        asyncio.run(run())
