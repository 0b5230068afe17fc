"""What shows and steers the cluster, asked from a front."""

from __future__ import annotations

from typing import Any

from moonpool.head.fronts.remote_head import RemoteHead


class RemoteView:
    """A `ClusterView` that the head answers."""

    def __init__(self, head: RemoteHead) -> None:
        self._ask = head.question

    async def num_calls(self, own: int) -> int:
        found: int = await self._ask("num_calls", own)
        return found

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._ask("explain", request_id)
        return found

    async def cluster(self, tenant: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("cluster", tenant)
        return found

    async def live_view(self, tenant: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("live_view", tenant)
        return found

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._ask("hot_prefixes", num_prefixes)
        return found

    async def drop_cached_blocks(self) -> None:
        await self._ask("drop_cached_blocks")

    async def drain(self, instance_id: str, within_s: float, returns: bool = False) -> str:
        found: str = await self._ask("drain", instance_id, within_s, returns)
        return found

    async def upgrade(self) -> None:
        await self._ask("upgrade")

    async def beliefs(self, name: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("beliefs", name)
        return found

    async def event_log(self, name: str | None = None) -> bytes | None:
        found: bytes | None = await self._ask("event_log", name)
        return found

    async def server_info(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("server_info")
        return found

    async def metrics_text(self) -> bytes:
        found: bytes = await self._ask("metrics_text")
        return found
