"""The messages between the scheduler's side of the connector and the workers' side, which vLLM
carries.

The messages are plain values, because vLLM sends them between its processes. `connector` makes them
known as vLLM's own kinds of values, so that nothing else here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.host_pool.messages import RankBlocks

BlockTable = Sequence[Sequence[int]]
"""For each of vLLM's groups of KVCache: the ids of blocks that follow one another in a prompt; 0
where a group has none, or needs none."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Blocks to copy from the pool. `ranks` names the pool's blocks for each space, of a prefix of
    `num_found` blocks; vLLM's `block_ids` take those from `first` on, whose keys are `keys`. A
    later step reads the loaded blocks."""

    owner: str
    req_id: str
    first: int
    keys: tuple[bytes, ...]
    block_ids: BlockTable
    num_found: int
    ranks: tuple[RankBlocks, ...]


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Full blocks of a request, the first at index `first` of its prompt. Blocks keep their content
    until the request is preempted, or until the worker allows its end. Blocks of groups with a
    window keep it until all ranks have reported `number`."""

    req_id: str
    first: int
    keys: tuple[bytes, ...]
    block_ids: BlockTable
    number: int = 0


@dataclass(slots=True)
class StepTransfers:
    """The transfers of one step. `preempted` requests lose their blocks at once. `finished`
    requests keep their blocks until their stores have ended."""

    loads: Sequence[LoadSpec] = ()
    stores: Sequence[StoreSpec] = ()
    preempted: Sequence[str] = ()
    finished: Sequence[str] = ()
    has_work: bool = True
    """Whether the step computes anything; if not, no request waits for it."""


@dataclass(slots=True)
class TransfersEnded:
    """How many ranks have ended each load and each store (by its number), and the first wrong block
    (an index of the prompt) of the loads that failed."""

    ended: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: TransfersEnded) -> TransfersEnded:
        """Adds the report of another rank."""
        for owner, count in other.ended.items():
            self.ended[owner] = self.ended.get(owner, 0) + count
        for owner, index in other.wrong.items():
            self.wrong[owner] = min(self.wrong.get(owner, index), index)
        for number, count in other.stored.items():
            self.stored[number] = self.stored.get(number, 0) + count
        return self


@dataclass(frozen=True, slots=True)
class RankReady:
    """What a worker reports after its start: the group of its blocks, or why it uses no pool.
    `rank` is its number among the `num_ranks` processes of this vLLM. `windows`: for each of vLLM's
    groups of KVCache the number of blocks of its window, or 0 without one."""

    group: bytes
    rank: int
    num_ranks: int
    refusal: str = ""
    windows: tuple[int, ...] = (0,)
