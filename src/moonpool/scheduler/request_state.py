"""The state of one request's attempt at an instance: its tokens, its blocks, its transfers.

`instance.py` shows the phases of an attempt as a diagram.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.protocol.messages import AttemptId, AttemptSpan, AttemptSpec, PrefillStarted
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.scheduler.actions import ActionBuffer, DraftTask
from moonpool.scheduler.speculation.drafts import DraftState
from moonpool.types import BlockId, BlockKey, FinishReason, TokenLogprobs, Tokens


class RequestPhase(Enum):
    """Where the scheduler keeps the request; the diagram in `instance.py` shows the order."""

    WAITING = "waiting"
    RUNNING = "running"
    RECEIVING = "receiving"
    HANDING_OVER = "handing over"


class PendingTransfer(Enum):
    """Transfers that may still read or write the request's blocks."""

    FETCH = "fetch"
    SEND = "send"
    RECEIVE = "receive"


class TransferEta(NamedTuple):
    """The remaining time of a transfer that arrives layer by layer, estimated from its progress.

    `left_s`: remaining time. `part_s`: duration of the last reported part, which is also the
    expected time until the next report. `num_layers`: layers that have arrived.
    """

    left_s: float = 0.0
    part_s: float = 0.0
    num_layers: int = 0

    def updated(self, num_layers: int, seconds: float, all_layers: int) -> TransferEta:
        """The estimate after `num_layers` of `all_layers` arrived within `seconds`."""
        layer_s = seconds / num_layers
        part_s = layer_s * max(0, num_layers - self.num_layers)
        return TransferEta(layer_s * (all_layers - num_layers), part_s, num_layers)

    @property
    def due_s(self) -> float:
        """The remaining time, for an instance that can act only when a report arrives. Rounds to
        the nearer of this report and the next one: acting too early costs as much waiting as acting
        too late costs idling."""
        return self.left_s - self.part_s / 2


@dataclass(slots=True)
class TenantAccount:
    """The counter of one tenant at this instance. `served`: tokens computed for the tenant, over
    its weight."""

    weight: float
    served: float = 0.0
    num_requests: int = 0

    def charge(self, num_tokens: int) -> None:
        self.served += num_tokens / self.weight


@dataclass(slots=True, eq=False)
class RequestState:
    """Mutable state of one attempt at a request.

    `tokens` are the prompt and the generated tokens. The KVCache of the first `num_computed` tokens
    is in `block_ids`, but in place of the first `num_unseen_blocks` stands a later block. The first
    `num_cached_blocks` of these blocks are, or were, in the prefix cache. The tokens up to
    `num_scheduled` are computed, or will be by the `steps_pending` steps in progress.
    """

    attempt: AttemptSpec
    phase: RequestPhase
    tokens: Tokens
    # address of the decode instance, or None if this instance decodes
    target: PeerAddress | None = None
    num_computed: int = 0
    num_scheduled: int = 0
    steps_pending: int = 0
    num_preemptions: int = 0
    num_reused: int = 0  # prompt tokens whose KVCache was present when the prefill began
    num_fetched_tokens: int = 0
    num_loaded_tokens: int = 0
    corrupt_slices: int = 0
    fetch_s: float = 0.0
    num_cached_blocks: int = 0
    num_streamed_blocks: int = 0
    # number of leading blocks that the request no longer holds, because no later token sees them
    num_unseen_blocks: int = 0
    block_ids: list[BlockId] = field(default_factory=list)  # the block table of the request
    # keys of the request's full blocks, as far as known
    keys: list[BlockKey] = field(default_factory=list)
    pending: set[PendingTransfer] = field(default_factory=set)
    # ids of the SSD loads that the request waits for
    load_ids: set[str] = field(default_factory=set)
    lookup_start: int | None = None  # index in `keys` from which a shared store is looked up
    fetched_blocks: list[BlockId] = field(default_factory=list)
    fetch_first_index: int = 0  # index in `keys` of the first fetched block
    # whether the attempt has ended, while transfers or steps may still use its blocks
    closing: bool = False
    started: bool = False  # whether PrefillStarted was reported
    # blocks present or arriving when the request began to compute early; 0 without overlap
    num_overlap_blocks: int = 0
    missed: bool = False  # whether a step found that part of the prefix had not arrived
    # number of blocks granted for its fetch, or None if the source has not answered
    num_granted_blocks: int | None = None
    fetch_eta: TransferEta = field(default_factory=TransferEta)
    has_first_token: bool = False
    kv_arrived: bool = False
    # logprobs by position in the prompt
    scored: dict[int, TokenLogprobs] = field(default_factory=dict)
    pooled: bytes = b""  # the engine's sum of the hidden states of the computed tokens
    stream_ended: bool = False  # whether no more KVCache of the request will arrive
    # whether the request waits until the Conductor says that it goes on without the stream
    stream_broken: bool = False
    # account of its tenant, or None if the request is in no queue of the scheduler
    account: TenantAccount | None = None
    aged_s: float = 0.0  # the time from which the request counts as one of the best priority
    # drafts (guessed tokens) in the step in progress; not part of `tokens`
    drafts: tuple[int, ...] = ()
    draft_task: DraftTask | None = None  # work of the draft model in the step in progress
    speculation: DraftState | None = None  # None if the request was never given a draft

    @property
    def attempt_id(self) -> AttemptId:
        """Id of the attempt; a retry of the same request has another one."""
        return self.attempt.attempt_id

    @property
    def owner(self) -> BlockOwner:
        """The block pool's owner of the blocks in the request's block table."""
        return BlockOwner("work", self.attempt.attempt_id)

    @property
    def fetch_owner(self) -> BlockOwner:
        """The block pool's owner of the prefix blocks that the request holds while it waits."""
        return BlockOwner("fetch", self.attempt.attempt_id)

    @property
    def fetching(self) -> bool:
        """Whether the messenger may write to blocks that `fetch_owner` holds."""
        return PendingTransfer.FETCH in self.pending

    @property
    def looking_up(self) -> bool:
        """Whether a shared store still has to answer which blocks it has."""
        return self.lookup_start is not None

    @property
    def arriving(self) -> bool:
        """Whether a part of the request's prefix is arriving, or may be."""
        return self.fetching or self.looking_up or bool(self.load_ids)

    @property
    def overlapping(self) -> bool:
        """Whether the request began to compute while part of its prefix was arriving, and the
        outcome is still open."""
        return self.num_overlap_blocks > 0

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that no step has computed or is computing."""
        return self.tokens.size - self.num_scheduled

    @property
    def decoding(self) -> bool:
        """Whether this instance decodes the request, and only the newest generated token is left to
        compute."""
        # Without the properties, whose calls count: it is asked several times a step.
        tokens = self.tokens
        return (
            self.target is None
            and tokens.size - self.num_scheduled == 1
            and tokens.size > tokens.first_generated
        )

    @property
    def idle(self) -> bool:
        """Whether no transfer and no step in progress can touch the request's blocks."""
        return not self.pending and not self.steps_pending

    @property
    def streaming(self) -> bool:
        """Whether the request's blocks are sent to the decode instance as they fill."""
        return PendingTransfer.SEND in self.pending and not self.closing

    def num_prompt_tokens_of(self, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` to be computed are prompt tokens."""
        left = len(self.attempt.token_ids) - self.num_computed
        return min(num_tokens, max(left, 0))

    def report_started(self, actions_out: ActionBuffer, cached_tokens: int) -> None:
        """Reports once that the prefill began, as soon as it is known how many tokens are
        cached."""
        if self.started:
            return
        self.started = True
        actions_out.report(
            PrefillStarted(
                attempt_id=self.attempt_id,
                cached_tokens=cached_tokens,
                fetched_tokens=min(self.num_fetched_tokens, cached_tokens),
                loaded_tokens=min(self.num_loaded_tokens, cached_tokens),
                corrupt_slices=self.corrupt_slices,
                fetch_s=self.fetch_s,
                early=self.overlapping,
            )
        )

    def report_span(
        self,
        actions_out: ActionBuffer,
        name: str,
        seconds: float,
        num_tokens: int,
        num_bytes: int = 0,
    ) -> None:
        """Reports a part of a traced attempt that has just ended."""
        if self.attempt.is_traced:
            span = AttemptSpan(
                attempt_id=self.attempt_id,
                name=name,
                seconds=seconds,
                num_tokens=num_tokens,
                num_bytes=num_bytes,
            )
            actions_out.report(span)

    def finish_reason(self, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Returns why the newest token is the last one, or None if more tokens follow."""
        sampling, tokens = self.attempt.sampling, self.tokens
        if sampling.pooling != "none":
            return FinishReason.STOP  # an embedding request ends with its prompt
        num_generated = tokens.size - tokens.first_generated
        if num_generated >= sampling.min_tokens:
            newest = tokens.newest
            if newest in eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
            if newest in sampling.stop_token_ids:
                return FinishReason.STOP
        if num_generated >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None
