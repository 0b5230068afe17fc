"""The Conductor's state of instances, of tenants and of requests under way. All of it is soft
state."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from moonpool.conductor.forecast.decode_forecast import DecodeInterval
from moonpool.conductor.instance_table import NEVER_S, S_PER_NS
from moonpool.conductor.placement.choice import Explanation
from moonpool.conductor.programs.program import Program
from moonpool.cost.online import LearnedFactor
from moonpool.protocol.messages import AttemptId, HotPrefixes, InstanceInfo, InstanceLoad
from moonpool.request_record import RequestRecord
from moonpool.types import BlockKey, InstanceId, Request, Role, Token


class AttemptPhase(Enum):
    """Progress of an attempt."""

    PREFILL = "prefill"
    HANDOVER = "handover"  # the first token is drawn, the decode instance has not accepted yet
    DECODE = "decode"


MAX_STALLS = 64
"""The recent answers from which the time that prompts add to gaps is learned."""
HALF_LIFE_S = 20.0
"""What was computed for a tenant counts half after this time."""
FOLD_S = 0.5
"""Tokens decay in steps of this time: there are many of them."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement of a request, as booked."""

    attempt_id: AttemptId
    prefill: InstanceId
    decode: InstanceId | None
    fetch_from: InstanceId | None
    prefill_ns: int
    num_tokens: int  # context: prompt and answer so far
    booked_tokens: int  # KVCache booked on the decoder; 0 means that none is needed there
    decodes: bool  # False if the first token is also the last
    tbt_s: float  # predicted
    expected_keys: Sequence[BlockKey]  # blocks that its prefill adds to the prefill instance
    begins_at: int = 0  # tokens of the answer before it
    waits: bool = False  # to join the batch of its decode instance
    in_chunks: bool = False  # its decode instance computes the prompt in chunks beside others
    interval: DecodeInterval | None = None
    interval_tokens: int = 0  # answer length that the interval's end is based on; 0 means none
    phase: AttemptPhase = AttemptPhase.PREFILL
    started_s: float | None = None
    prefilled_s: float | None = None
    expected_s: float = 0.0  # prefill time by the profile, with the tokens actually cached
    decoding_since_s: float | None = None
    first_token: Token | None = None

    @property
    def decoder(self) -> InstanceId:
        """The instance that produces the tokens."""
        return self.decode if self.decode is not None else self.prefill


@dataclass(slots=True, eq=False)
class ShareAccount:
    """What one tenant has and had lately, by which `waiting.fair_share` compares tenants."""

    weight: float = 1.0
    given: float = 0.0  # computed tokens over the weight, decayed up to `at_s`
    at_s: float = 0.0
    held_tokens: int = 0  # of KVCache, by its requests that are under way
    num_under_way: int = 0
    seen_s: float = 0.0

    def level(self, now: float) -> float:
        kept: float = 0.5 ** (max(now - self.at_s, 0.0) / HALF_LIFE_S)
        return self.given * kept + self.held_tokens / self.weight

    def charge(self, num_tokens: int, now: float) -> None:
        """Notes that this many tokens were computed for the tenant."""
        if now - self.at_s > FOLD_S:
            self.given *= 0.5 ** ((now - self.at_s) / HALF_LIFE_S)
            self.at_s = now
        self.given += num_tokens / self.weight


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request under way. A new attempt continues after the tokens in `generated`, which are
    already delivered."""

    request: Request
    record: RequestRecord
    keys: Sequence[BlockKey] = ()
    attempt: Attempt | None = None
    account: ShareAccount = field(default_factory=ShareAccount)
    share: float = 1.0  # of its tenant
    cache_share: float = 1.0  # likewise
    competes: bool = False  # with those of other tenants, when it arrived
    num_attempts: int = 0
    num_decisions: int = 0  # on its admission
    predicted_step_s: float = 0.0  # of its decode instance, when it was admitted
    num_faults: int = 0  # since the last token
    has_waited: bool = False  # for an instance or for room, which is not its fault
    call_has_begun: bool = False  # another choice of its call was admitted before
    found_tokens: int | None = None  # cached where it was first considered; None before that
    num_named_tokens: int = -1  # `keys` are those of this many tokens
    predicted_output_tokens: float = 0.0
    generated: list[int] = field(default_factory=list)
    explanation: Explanation = field(default_factory=Explanation)
    num_turns: int = 0  # of its session before this one
    pause_s: float | None = None  # since the turn before
    program: Program | None = None  # that it is a call of
    crowded: list[int] = field(default_factory=list)  # rows to which its program should not move
    failed_on: set[InstanceId] = field(default_factory=set)  # other instances are preferred


@dataclass(slots=True, eq=False)
class Drain:
    """An instance that gets no new work. When its present work has ended, it changes its role or
    leaves."""

    reason: str  # for people
    since_s: float
    until_s: float  # a role change is given up then; a departure takes place
    becomes: Role | None  # None: it leaves
    commanded: bool = False  # the instance has received the command
    returns: bool = False  # another process takes its place


@dataclass(slots=True, eq=False)
class InstanceState:
    """An instance and its bookings."""

    info: InstanceInfo
    row: int
    role: Role  # its own, or the one that a mixed instance is given (`roles.mixed_split`)
    prefills: dict[AttemptId, TrackedRequest] = field(default_factory=dict)
    started: dict[AttemptId, Attempt] = field(
        default_factory=dict
    )  # the running ones of `prefills`
    decodes: dict[AttemptId, TrackedRequest] = field(default_factory=dict)
    handed_over: dict[AttemptId, TrackedRequest] = field(
        default_factory=dict
    )  # prefilled here, decoded elsewhere
    serving: dict[AttemptId, Attempt] = field(default_factory=dict)  # they fetch a prefix from here
    handover_tokens: dict[int, int] = field(default_factory=dict)  # booked, by fetch
    freed_s: float = NEVER_S  # when the prefill before the oldest started one ended
    # Before then, its first prefills teach nothing new (`CostEstimator.learn_first_prefills`).
    teaches_at_s: float = NEVER_S
    load: InstanceLoad | None = None
    resyncing: bool = False  # a snapshot of its blocks was requested
    drain: Drain | None = None
    hot: HotPrefixes | None = None  # its most used prefixes, if requested
    prefill_factor: LearnedFactor = field(default_factory=LearnedFactor)
    decode_factor: LearnedFactor = field(default_factory=LearnedFactor)
    transfer_factor: LearnedFactor = field(default_factory=LearnedFactor)
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STALLS))

    @property
    def drained(self) -> bool:
        """No attempt needs the instance any more. A request that it handed over no longer needs it
        once the decode instance has accepted; fetches are served in any role."""
        return not self.decodes and self.prefilled

    @property
    def prefilled(self) -> bool:
        """No attempt needs it as a prefill instance any more."""
        if self.prefills:
            return False
        attempts = [tracked.attempt for tracked in self.handed_over.values()]
        return all(attempt is None or attempt.phase is AttemptPhase.DECODE for attempt in attempts)

    def busy_until_s(self) -> float:
        """When the started prefills, which run one after another, should be over."""
        until_s = self.freed_s if self.started else NEVER_S
        for attempt in self.started.values():
            assert attempt.started_s is not None
            until_s = max(until_s, attempt.started_s) + attempt.prefill_ns * S_PER_NS
        return until_s
