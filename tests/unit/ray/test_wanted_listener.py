"""Tests the numbers of instances that a head posts."""

from __future__ import annotations

import asyncio

import httpx

from moonpool.conductor.actions import InstancesWanted
from moonpool.ray.wanted_listener import WantedListener


def test_what_the_head_posts_is_taken() -> None:
    async def post() -> None:
        listener = WantedListener()
        url = await listener.start()
        assert await listener.start() == url and listener.newest is None
        async with httpx.AsyncClient() as client:
            wanted = {"wanted_instances": {"prefill": 3, "decode": 2}, "model": "m"}
            assert (await client.post(url, json=wanted)).status_code == 204
            assert listener.newest == InstancesWanted(prefill=3, decode=2)
            other = f"{url.rpartition('/')[0]}/other"
            assert (await client.post(other, json=wanted)).status_code == 400
            assert (await client.post(url, content=b"{}")).status_code == 400
            assert (await client.post(url, content=b"[" * 9000)).status_code == 400
        assert listener.newest == InstancesWanted(prefill=3, decode=2)

    asyncio.run(post())
