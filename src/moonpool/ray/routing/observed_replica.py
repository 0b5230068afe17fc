"""Wraps a replica of Serve and observes its answers: how many tokens arrive, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, RunningReplica

from moonpool.ray.replicas.calls import count_tokens

OnTokens = Callable[[str, int], None]
"""Called with a call's id and the number of tokens that came. Any thread may call it."""


class ObservedReplica(RunningReplica):  # type: ignore[misc]
    """A replica of Serve whose answers this router observes."""

    def __init__(self, replica_info: Any, on_tokens: OnTokens) -> None:
        super().__init__(replica_info)
        self._on_tokens = on_tokens

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        result = super().try_send_request(pr, with_rejection)
        if not pr.metadata.is_streaming:
            return result
        return ObservedResult(result, pr.metadata.internal_request_id, self._on_tokens)


class ObservedResult(ReplicaResult):  # type: ignore[misc]
    """The result of one streaming call."""

    def __init__(self, result: ReplicaResult, call_id: str, on_tokens: OnTokens) -> None:
        self._result = result
        self._call_id = call_id
        self._on_tokens = on_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)

    def __aiter__(self) -> ObservedResult:
        return self

    def __iter__(self) -> ObservedResult:
        return self

    async def __anext__(self) -> Any:
        return self._note(await self._result.__anext__())

    def __next__(self) -> Any:
        return self._note(self._result.__next__())

    def _note(self, item: Any) -> Any:
        self._on_tokens(self._call_id, count_tokens(item))
        return item

    async def get_rejection_response(self) -> Any:
        return await self._result.get_rejection_response()

    def get(self, timeout_s: float | None) -> Any:
        return self._result.get(timeout_s)

    async def get_async(self) -> Any:
        return await self._result.get_async()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._result.add_done_callback(callback)

    def cancel(self) -> None:
        self._result.cancel()

    def to_object_ref(self) -> Any:
        return self._result.to_object_ref()

    async def to_object_ref_async(self) -> Any:
        return await self._result.to_object_ref_async()

    def to_object_ref_gen(self) -> Any:
        return self._result.to_object_ref_gen()
