"""What every store below DRAM must do, wherever it keeps the blocks: on this machine's SSD
(`store`), or in a store that other instances and other clusters use too (`mooncake`).

Every operation returns at once and ends with exactly one terminal event, until which its blocks may
be touched and after which never. What is loaded has been verified slice by slice; whatever goes
wrong is an error in the event, and no more than a miss to a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from moonpool.messenger.gate import LayerGate
from moonpool.messenger.store.counters import StoreCounts
from moonpool.types import BlockId, BlockKey


class TierStore(Protocol):
    """`tests/contract/test_stores.py` says in full what is expected."""

    @property
    def name(self) -> str:
        """As people know the kind of it."""
        ...

    @property
    def shared(self) -> bool:
        """Others use it too: it may hold what was not stored here, and forget what was."""
        ...

    @property
    def num_slots(self) -> int:
        """The slots 0 ... num_slots - 1 can be named."""
        ...

    @property
    def stored(self) -> Sequence[tuple[int, BlockKey]]:
        """What was found at the start, as (slot, name), the longest unused first."""
        ...

    @property
    def read_bytes_per_s(self) -> float:
        """A first estimate."""
        ...

    def describe(self) -> str:
        """One line for the log."""
        ...

    def counts(self) -> StoreCounts: ...

    def store(
        self,
        store_id: str,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        slots: Sequence[int],
    ) -> None:
        """Puts `block_ids[i]`, whose content is named `keys[i]`, into `slots[i]`. Ends with
        StoreEnded."""
        ...

    def load(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        gate: LayerGate | None = None,
    ) -> None:
        """Gets `keys[i]`, which should be in `slots[i]`, into `block_ids[i]`. Ends with LoadEnded.
        With a `gate`, one layer of all blocks comes after the other, as far as the size of a layer
        allows; then it is told how far the load has come, and LoadProgress is posted."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """This instance gives these slots up: they may be written anew."""
        ...

    def close(self) -> None:
        """Every operation under way ends first, those that still wait with an error."""
        ...


@runtime_checkable
class SharedStore(TierStore, Protocol):
    """One that others fill, too: what is there must be asked."""

    def look_up(self, lookup_id: str, keys: Sequence[BlockKey]) -> None:
        """How long a run of `keys` is there. Ends with LookUpEnded."""
        ...
