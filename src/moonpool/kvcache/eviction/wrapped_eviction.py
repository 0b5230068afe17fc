"""The common part of eviction policies that wrap another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from moonpool.kvcache.eviction.policies import EvictionPolicy
from moonpool.types import BlockId


class WrappedEviction(ABC):
    """An `EvictionPolicy` that passes on to another one what it does not decide itself."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        # The policy beneath all others knows the evictable blocks.
        self._innermost: EvictionPolicy = (
            policy._innermost if isinstance(policy, WrappedEviction) else policy
        )

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        self._policy.touch(block_ids)

    def evict(self, block_id: BlockId) -> bool:
        gone = self._policy.evict(block_id)
        if gone:
            self._end(block_id)
        return gone

    def forget(self, block_id: BlockId) -> None:
        self._policy.forget(block_id)
        self._end(block_id)

    def __len__(self) -> int:
        return len(self._innermost)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._innermost

    @abstractmethod
    def _end(self, block_id: BlockId) -> None:
        """Drops the data of a block that lost its key."""
