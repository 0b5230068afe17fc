"""An endpoint at which a call failed is avoided only while its health can be checked."""

from __future__ import annotations

import asyncio
from typing import Any

from moonpool.discovery.endpoint import Endpoint
from moonpool.epp.endpoint_worker import EndpointWorker, PickerShared


def test_an_endpoint_that_is_not_served_is_no_suspect() -> None:
    """A call may fail long after its endpoint has left."""

    async def run() -> None:
        owner: Any = None
        shared = PickerShared(owner, "", lambda: 0.0)
        worker = EndpointWorker(Endpoint(name="e", host="127.0.0.1", port=1), shared)
        worker.look()
        assert shared.suspects == set()
        serving = asyncio.create_task(worker.run("", 0))  # waits for the server
        await asyncio.sleep(0)
        worker.look()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        worker.look()
        assert shared.suspects == set()

    asyncio.run(run())
