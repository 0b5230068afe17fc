"""Tests that a head whose instances cache no prefixes expects no hits on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from played_head import Burst, Step, played

from moonpool.config.tables import Config, PoolConfig
from moonpool.protocol.messages import AttemptSpec
from moonpool.types import FinishReason

BODY = {"model": "m", "prompt": "a" * 200, "max_tokens": 1, "temperature": 0}


def slow(attempt: AttemptSpec) -> Sequence[Step]:
    return 0.0, 0.5, Burst("x", FinishReason.LENGTH)


@pytest.mark.parametrize("caches", [True, False])
def test_a_prompt_under_way_gives_hits_only_where_prefixes_are_cached(caches: bool) -> None:
    async def found_tokens() -> list[int | None]:
        config = Config(pool=PoolConfig(prefix_caching=caches))
        async with played(slow, config=config) as cluster:
            calls = [cluster.http.post("/v1/completions", json=BODY) for _ in range(2)]
            tasks = [asyncio.create_task(call) for call in calls]
            requests = cluster.conductor.requests
            async with asyncio.timeout(10.0):
                while len(requests) < 2:
                    await asyncio.sleep(0.01)
            found = [tracked.found_tokens for tracked in requests.values()]
            assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200, 200]
            return found

    first, second = asyncio.run(found_tokens())
    assert first == 0
    assert bool(second) is caches
