"""What shows and steers the cluster, as the HTTP layer asks for it: the head may be another
process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from moonpool.api.serving_backend import ModelBackend, ServingBackend


class ClusterView(Protocol):
    """Answers questions about the whole cluster, even from a process that is not its head. The
    answers are those of `ServingBackend`."""

    async def num_calls(self, own: int) -> int:
        """Returns the calls under way in all processes that answer calls; `own` are in this."""
        ...

    async def explain(self, request_id: str) -> dict[str, Any] | None: ...

    async def cluster(self, tenant: str | None = None) -> dict[str, Any]: ...

    async def live_view(self, tenant: str | None = None) -> dict[str, Any]: ...

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]: ...

    async def drop_cached_blocks(self) -> None: ...

    async def drain(self, instance_id: str, within_s: float, returns: bool = False) -> str: ...

    async def upgrade(self) -> None: ...

    async def beliefs(self, name: str | None = None) -> dict[str, Any]: ...

    async def event_log(self, name: str | None = None) -> bytes | None: ...

    async def server_info(self) -> dict[str, Any]: ...

    async def metrics_text(self) -> bytes: ...


class OwnClusterView:
    """The view of a head in this process."""

    def __init__(self, head: ServingBackend) -> None:
        self._head = head

    async def num_calls(self, own: int) -> int:
        return own

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        return self._head.explain(request_id)

    async def cluster(self, tenant: str | None = None) -> dict[str, Any]:
        return self._head.cluster(tenant)

    async def live_view(self, tenant: str | None = None) -> dict[str, Any]:
        return self._head.live_view(tenant)

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]:
        return await self._head.hot_prefixes(num_prefixes)

    async def drop_cached_blocks(self) -> None:
        self._head.drop_cached_blocks()

    async def drain(self, instance_id: str, within_s: float, returns: bool = False) -> str:
        return self._head.drain(instance_id, within_s, returns)

    async def upgrade(self) -> None:
        self._head.upgrade()

    async def beliefs(self, name: str | None = None) -> dict[str, Any]:
        return self._head.beliefs(name)

    async def event_log(self, name: str | None = None) -> bytes | None:
        return self._head.event_log(name)

    async def server_info(self) -> dict[str, Any]:
        return self._head.server_info()

    async def metrics_text(self) -> bytes:
        return self._head.metrics_text()


class CallBackend(Protocol):
    """What calls need of a head: `ServingBackend` without the view of the cluster."""

    def now(self) -> float: ...

    def models(self) -> Sequence[ModelBackend]: ...

    def is_stopping(self) -> bool: ...

    def note_refused(self, reason: str) -> None: ...

    def not_ready(self) -> str: ...
