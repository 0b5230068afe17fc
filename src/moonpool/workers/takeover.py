"""Takes over prefixes from an instance that leaves, in place of what is used less here.

A takeover is a fetch that no work waits for. It ends with one `TakenOver`, whatever comes of it;
what arrived is cached from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.kvcache.transfers import FetchEnded
from moonpool.types import BlockId, BlockKey
from moonpool.workers.actions import FetchBlocks
from moonpool.workers.holdings import Holdings
from moonpool.workers.messages import TakenOver, TakeOver
from moonpool.workers.outbox import Outbox

PREFIX = "takeover:"
"""Of the ids of fetches that are takeovers; no work's id begins so."""
MAX_SHARE = 4
"""No takeover is larger than one in so many of the pool's blocks."""


@dataclass(frozen=True, slots=True)
class _Takeover:
    command: TakeOver
    keys: tuple[BlockKey, ...]  # that are fetched
    blocks: tuple[BlockId, ...]
    depth: int  # of the first of them
    full: bool


class Takeovers:
    """Those under way. Owners are their fetches' ids."""

    def __init__(self, holdings: Holdings, outbox: Outbox) -> None:
        self._holdings = holdings
        self._outbox = outbox
        self._takeovers: dict[str, _Takeover] = {}
        self._num_begun = 0

    @property
    def owners(self) -> set[str]:
        return set(self._takeovers)

    def begin(self, command: TakeOver) -> None:
        pool = self._holdings.pool
        self._num_begun += 1
        owner = f"{PREFIX}{self._num_begun}"
        held = pool.match(command.keys)
        missing = command.keys[len(held) :]
        pool.acquire(owner, held)
        num_blocks = min(len(missing), pool.num_blocks // MAX_SHARE)
        num_blocks = min(num_blocks, self._make_room(owner, num_blocks, command.num_uses))
        blocks = pool.allocate(owner, num_blocks, held)
        while num_blocks and not blocks:  # they are free, but not all in one arena
            num_blocks //= 2
            blocks = pool.allocate(owner, num_blocks, held)
        full = num_blocks < len(missing)
        if not blocks:
            pool.release(owner)
            self._outbox.tell(TakenOver(number=command.number, num_blocks=0, full=full))
            return
        keys = missing[:num_blocks]
        takeover = _Takeover(command, keys, tuple(blocks), len(held), full)
        self._takeovers[owner] = takeover
        self._outbox.do(FetchBlocks(owner, command.source, keys, blocks, command.timeout_s))

    def on_ended(self, event: FetchEnded) -> None:
        takeover = self._takeovers.pop(event.fetch_id)
        pool, outbox = self._holdings.pool, self._outbox
        for offset in range(event.num_blocks):
            block_id = takeover.blocks[offset]
            if pool.seal(block_id, takeover.keys[offset], takeover.depth + offset):
                pool.count_uses(block_id, takeover.command.num_uses)
        pool.release(event.fetch_id)
        outbox.count("taken_over_blocks", event.num_blocks)
        outbox.count("corrupt_slices", event.corrupt_slices)
        outbox.count("fetched_bytes", event.num_bytes)
        outbox.count("failed_fetches", 1 if event.error else 0)
        outbox.tell(
            TakenOver(
                number=takeover.command.number,
                num_blocks=event.num_blocks,
                full=takeover.full,
                error=event.error,
            )
        )

    def _make_room(self, owner: str, num_blocks: int, num_uses: int) -> int:
        """Evicts until so many blocks are free, but nothing that is used as often; returns how many
        are."""
        pool = self._holdings.pool
        while pool.num_free < num_blocks:
            victims = pool.withdraw(f"{owner}:room", 1)
            if not victims:
                break
            if pool.num_uses(victims[0]) >= num_uses:
                pool.acquire(f"{owner}:room", victims)  # it stays
                pool.release(f"{owner}:room")
                break
            pool.release(f"{owner}:room")
        return pool.num_free
