"""The blocks that a vLLM server can reach: in its own cache, and in the pool of its host that its
connector uses.

Pure. The pool reports its changes as an instance would. A block in vLLM's own cache or in the
pool's DRAM counts as in DRAM: a load from there takes less than a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from moonpool.protocol.messages import BlocksChanged, BlocksSnapshot
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import MALFORMED, BlockKey

_DRAM, _SSD = 1, 2


class PooledBlocks:
    """The keys that the pool holds, and what the head has been told about these and about vLLM's
    keys."""

    def __init__(self, address: PeerAddress) -> None:
        self.address = address
        self._tiers: dict[BlockKey, int] = {}
        self._changed: dict[BlockKey, None] = {}
        self._told: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def handle(self) -> bytes:
        """A decode instance finds the blocks of a prefill by this handle."""
        return msgspec.json.encode(self.address)

    def hear(self, report: BlocksChanged | BlocksSnapshot) -> None:
        """Handles a report of the pool."""
        if isinstance(report, BlocksSnapshot):
            self.forget()
            self._set(report.keys, _DRAM)
            self._set(report.demoted, _SSD)
            return
        self._set(report.stored, _DRAM)
        self._set(report.demoted, _SSD)
        for key in report.removed:
            if self._tiers.pop(key, 0):
                self._changed[key] = None

    def forget(self) -> None:
        """Notes that the pool is gone."""
        self._changed.update(dict.fromkeys(self._tiers))
        self._tiers.clear()

    def holds(self, key: BlockKey) -> bool:
        return key in self._tiers

    def changes(
        self,
        gained: Iterable[BlockKey],
        lost: Iterable[BlockKey],
        is_cached: Callable[[BlockKey], bool],
        sequence: int,
    ) -> BlocksChanged | None:
        """Returns the changes that the head does not know yet, or None if there are none. `gained`
        and `lost` are the changes of vLLM's own cache."""
        stored: list[BlockKey] = []
        demoted: list[BlockKey] = []
        removed: list[BlockKey] = []
        for key in {**dict.fromkeys(gained), **dict.fromkeys(lost), **self._changed}:
            tier = _DRAM if is_cached(key) else self._tiers.get(key, 0)
            if tier == self._told.get(key, 0):
                continue
            if tier:
                self._told[key] = tier
                (stored if tier == _DRAM else demoted).append(key)
            else:
                del self._told[key]
                removed.append(key)
        self._changed.clear()
        if not (stored or demoted or removed):
            return None
        return BlocksChanged(
            sequence=sequence,
            stored=tuple(stored),
            removed=tuple(removed),
            demoted=tuple(demoted),
        )

    def snapshot(self, cached: Iterable[BlockKey], next_sequence: int) -> BlocksSnapshot:
        """Returns all blocks, those of the pool and those in vLLM's own cache (`cached`)."""
        self._changed.clear()
        self._told = dict(self._tiers) | dict.fromkeys(cached, _DRAM)
        dram = tuple(key for key, tier in self._told.items() if tier == _DRAM)
        ssd = tuple(key for key, tier in self._told.items() if tier == _SSD)
        return BlocksSnapshot(next_sequence=next_sequence, keys=dram, demoted=ssd)

    def _set(self, keys: Iterable[BlockKey], tier: int) -> None:
        for key in keys:
            if self._tiers.get(key) != tier:
                self._tiers[key] = tier
                self._changed[key] = None


def address_of(handle: bytes) -> PeerAddress | None:
    """Returns the pool that a handle names, or None if one of vLLM's own connectors made the
    handle."""
    try:
        return msgspec.json.decode(handle, type=PeerAddress)
    except MALFORMED:
        return None
