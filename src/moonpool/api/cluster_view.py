"""The interface by which the HTTP layer shows and steers the cluster; the head may be another
process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Protocol

from moonpool.api.serving_backend import ModelBackend, ServingBackend


class ClusterView:
    """Answers questions about the whole cluster, even from a process that is not its head. The
    answers are the same as those of `ServingBackend`."""

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        """`ask`: takes a question, which is the name of a method of this class, and its
        arguments."""
        self._ask = ask

    async def num_calls(self, own: int) -> int:
        """Returns the number of calls under way in all processes that answer calls; `own` of them
        are in this process."""
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

    async def beliefs(self, name: str | None = None) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self._ask("beliefs", name)
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


def own_view(head: ServingBackend) -> ClusterView:
    """Returns the view of a head in this process."""

    async def ask(question: str, *arguments: Any) -> Any:
        if question == "num_calls":
            return arguments[0]
        answer = getattr(head, question)(*arguments)
        return await answer if isawaitable(answer) else answer

    return ClusterView(ask)


class CallBackend(Protocol):
    """What calls need of a head: `ServingBackend` without the view of the cluster."""

    def now(self) -> float: ...

    def models(self) -> Sequence[ModelBackend]: ...

    def is_stopping(self) -> bool: ...

    def note_refused(self, reason: str) -> None: ...

    def not_ready(self) -> str: ...
