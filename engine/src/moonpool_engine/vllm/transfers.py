"""What the scheduler's side of the connector tells the workers' side, and back. vLLM carries it.

These are plain values: vLLM sends them between its own processes. `connector` makes them known as
vLLM's own kinds of values, so that nothing else here needs vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.host_pool.messages import RankBlocks


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Blocks to copy from the pool before the step reads them. `ranks[r]` names them for rank r,
    from the pool's first block on; vLLM's `block_ids` take those
    from `first` on, whose keys are `keys`."""

    owner: str
    req_id: str
    first: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    ranks: tuple[RankBlocks, ...]


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Full blocks of a request, the first at index `first` of its prompt. They keep their content
    until the request is preempted, or its end is allowed by the worker."""

    req_id: str
    first: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class StepTransfers:
    """The transfers of one step. `preempted` requests lose their blocks at once. `finished` ones
    keep them until their stores have ended."""

    loads: Sequence[LoadSpec] = ()
    stores: Sequence[StoreSpec] = ()
    preempted: Sequence[str] = ()
    finished: Sequence[str] = ()
    has_work: bool = True
    """Whether the step computes anything: else nobody waits for it."""


@dataclass(slots=True)
class LoadsEnded:
    """How many ranks have ended each load, and the first wrong block (an index of the prompt) of
    those that failed."""

    ended: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: LoadsEnded) -> LoadsEnded:
        """Adds what another rank says."""
        for owner, count in other.ended.items():
            self.ended[owner] = self.ended.get(owner, 0) + count
        for owner, index in other.wrong.items():
            self.wrong[owner] = min(self.wrong.get(owner, index), index)
        return self


@dataclass(frozen=True, slots=True)
class RankReady:
    """What a worker says after its start: the group of its blocks, or why it uses no pool."""

    group: bytes
    rank: int
    num_ranks: int
    refusal: str = ""
