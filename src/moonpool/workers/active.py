"""One work inside an instance: its tokens, its blocks and what it waits for.

    prefill   WAITING --admitted--> RUNNING --last chunk--> HANDING_OVER --stream received--> gone
    decode    RECEIVING --KVCache and first token here--> RUNNING --finish--> gone
    mixed     WAITING --admitted--> RUNNING (chunks, then decodes) --finish--> gone

A decode that runs out of blocks goes back to WAITING and is computed again from its tokens.
Whatever happens, a work's blocks are released only when nothing in `pending` can touch them any
more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import BlockId, BlockKey, FinishReason
from moonpool.workers.messages import PrefillStarted, Work, WorkId
from moonpool.workers.outbox import Outbox
from moonpool.workers.rest import Rest
from moonpool.workers.tokens import Tokens


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RECEIVING = "receiving"
    HANDING_OVER = "handing over"


class Pending(Enum):
    """Transfers that may still read or write the work's blocks."""

    FETCH = "fetch"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(slots=True, eq=False)
class ActiveWork:
    """Mutable state of one work. `tokens` are prompt and generated; the KVCache of the first
    `num_computed` of them is in `block_ids`, of whose full blocks the first `num_sealed` have
    names. The tokens up to `num_scheduled` are computed, or will be by the `steps_pending` steps
    under way."""

    work: Work
    phase: Phase
    tokens: Tokens
    target: PeerAddress | None = None
    num_computed: int = 0
    num_scheduled: int = 0
    steps_pending: int = 0
    num_reused: int = 0  # tokens that were here already when its computing began
    num_fetched_tokens: int = 0
    num_loaded_tokens: int = 0
    corrupt_slices: int = 0
    fetch_s: float = 0.0
    num_sealed: int = 0
    num_streamed_blocks: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    pending: set[Pending] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)  # from the SSD, for which it waits
    asked_from: int | None = None  # the first of `keys` that a shared store is being asked for
    fetched_blocks: list[BlockId] = field(default_factory=list)
    fetch_first_index: int = 0
    closing: bool = False
    started: bool = False  # PrefillStarted was told
    early_blocks: int = 0  # of its table, that were here or on their way when it began to compute
    missed: bool = False  # a step of it found that they did not arrive
    granted_blocks: int | None = None  # of its fetch; None: the source has not answered
    fetch_rest: Rest = field(default_factory=Rest)
    has_first_token: bool = False
    kv_arrived: bool = False
    stream_over: bool = False  # what has not arrived of it never will

    @property
    def work_id(self) -> WorkId:
        return self.work.work_id

    @property
    def owner(self) -> str:
        """Name under which the block pool knows this work's holds."""
        return f"work:{self.work.work_id}"

    @property
    def fetch_owner(self) -> str:
        return f"fetch:{self.work.work_id}"

    @property
    def writing(self) -> bool:
        """The messenger may write to blocks that `fetch_owner` holds."""
        return Pending.FETCH in self.pending

    @property
    def asking(self) -> bool:
        return self.asked_from is not None

    @property
    def arriving(self) -> bool:
        """Some of its prefix is on its way."""
        return self.writing or self.asking or bool(self.loads)

    @property
    def early(self) -> bool:
        """It computes, or did in the step under way, while some of its prefix is on its way."""
        return self.early_blocks > 0

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no step computes or has computed yet."""
        return self.tokens.size - self.num_scheduled

    @property
    def decoding(self) -> bool:
        """Only its newest, generated token is left to compute, and more follow here."""
        return self.target is None and self.num_uncomputed == 1 and self.tokens.num_generated > 0

    @property
    def idle(self) -> bool:
        """Nothing under way can touch its blocks."""
        return not self.pending and not self.steps_pending

    @property
    def streaming(self) -> bool:
        return Pending.SEND in self.pending and not self.closing

    def tell_started(self, outbox: Outbox, cached_tokens: int) -> None:
        """Says that its first chunk is computed, once, as soon as is known what need not be."""
        if self.started:
            return
        self.started = True
        outbox.tell(
            PrefillStarted(
                work_id=self.work_id,
                cached_tokens=cached_tokens,
                fetched_tokens=min(self.num_fetched_tokens, cached_tokens),
                loaded_tokens=min(self.num_loaded_tokens, cached_tokens),
                corrupt_slices=self.corrupt_slices,
                fetch_s=self.fetch_s,
                early=self.early,
            )
        )

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the newest token is the last one; None if it is not."""
        sampling, tokens = self.work.sampling, self.tokens
        newest, num_generated = tokens.newest, tokens.num_generated
        if num_generated >= sampling.min_tokens:
            if newest in eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
            if newest in sampling.stop_token_ids:
                return FinishReason.STOP
        if num_generated >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None
