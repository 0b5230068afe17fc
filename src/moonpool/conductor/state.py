"""The Conductor's state of instances, of tenants and of requests under way. All state in this
module is soft."""

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
    """How far an attempt has come."""

    PREFILL = "prefill"
    # the first token is drawn, and the decode instance has not accepted the request yet
    HANDOVER = "handover"
    DECODE = "decode"


MAX_STALLS = 64
"""Number of recent answers from which the time that prompts add to gaps is learned."""
HALF_LIFE_S = 20.0
"""Half-life of the weight of tokens that were computed for a tenant."""
FOLD_S = 0.5
"""The weight of tokens decays in steps of this time, because tokens come often."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement of a request, as booked."""

    attempt_id: AttemptId
    prefill: InstanceId
    decode: InstanceId | None
    fetch_from: InstanceId | None
    prefill_ns: int
    num_tokens: int  # context length: tokens of the prompt and of the answer so far
    booked_tokens: int  # KVCache tokens booked on the decoder; 0 means that none are needed there
    decodes: bool  # whether the attempt decodes; False if the first token is also the last
    tbt_s: float  # predicted
    # keys of the blocks that the attempt's prefill adds to the prefill instance
    expected_keys: Sequence[BlockKey]
    begins_at: int = 0  # number of tokens of the answer before this attempt
    waits: bool = False  # whether the attempt waits to join the batch of its decode instance
    # whether the decode instance computes the prompt in chunks beside other decodes
    in_chunks: bool = False
    interval: DecodeInterval | None = None
    interval_tokens: int = 0  # answer length on which the predicted end is based; 0 means none
    phase: AttemptPhase = AttemptPhase.PREFILL
    started_s: float | None = None
    prefilled_s: float | None = None
    # prefill time by the profile, with the tokens that were actually cached; 0 before the prefill
    # has started, and for a prefill from which no factor can be learned
    expected_s: float = 0.0
    decoding_since_s: float | None = None
    first_token: Token | None = None

    @property
    def decoder(self) -> InstanceId:
        """Returns the instance that produces the tokens."""
        return self.decode if self.decode is not None else self.prefill


@dataclass(slots=True, eq=False)
class ShareAccount:
    """The present and recent use of one tenant, by which `waiting.fair_share` compares tenants."""

    weight: float = 1.0
    given: float = 0.0  # computed tokens over the tenant's weight, decayed up to `at_s`
    at_s: float = 0.0
    held_tokens: int = 0  # KVCache tokens that the tenant's requests under way hold
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
    share: float = 1.0  # weight of the request's tenant
    cache_share: float = 1.0  # share of each instance's cache that the tenant may have
    competes: bool = False  # whether other tenants had requests when this one arrived
    num_attempts: int = 0
    num_decisions: int = 0  # number of decisions about the request's admission
    predicted_step_s: float = 0.0  # step time of the decode instance, as predicted at admission
    num_faults: int = 0  # number of faults since the request's last token
    # whether the request had to wait for an instance or for room, or to begin again, by no fault of
    # its own
    has_waited: bool = False
    call_has_begun: bool = False  # whether another choice of the call was admitted before
    # prompt tokens that were cached where the request was first considered; None before that
    found_tokens: int | None = None
    num_named_tokens: int = -1  # number of tokens from which `keys` were computed
    predicted_output_tokens: float = 0.0
    generated: list[int] = field(default_factory=list)
    explanation: Explanation = field(default_factory=Explanation)
    num_turns: int = 0  # number of turns of the session before this one
    pause_s: float | None = None  # time since the previous turn of the session
    program: Program | None = None  # the program of which the request is a call
    # rows to which the request's program should not move
    crowded: list[int] = field(default_factory=list)
    # instances where the request failed; others are preferred
    failed_on: set[InstanceId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Drain:
    """An instance that gets no new work. When the instance's present work has ended, it changes its
    role or leaves."""

    reason: str  # for people
    since_s: float
    until_s: float  # time at which a role change is given up, or at which a departure takes place
    becomes: Role | None  # the new role, or None if the instance leaves
    commanded: bool = False  # whether the instance has received the command
    returns: bool = False  # whether another process takes the place of the instance


@dataclass(slots=True, eq=False)
class InstanceState:
    """An instance and its bookings."""

    info: InstanceInfo
    row: int
    # the instance's own role, or the role that a mixed instance is given (`roles.mixed_split`)
    role: Role
    prefills: dict[AttemptId, TrackedRequest] = field(default_factory=dict)
    # the running attempts among `prefills`
    started: dict[AttemptId, Attempt] = field(default_factory=dict)
    decodes: dict[AttemptId, TrackedRequest] = field(default_factory=dict)
    # requests that were prefilled here and are decoded elsewhere, until their attempts end
    handed_over: dict[AttemptId, TrackedRequest] = field(default_factory=dict)
    # attempts that fetch a prefix from this instance
    serving: dict[AttemptId, Attempt] = field(default_factory=dict)
    # tokens booked here for a prefix of an instance that leaves, by the number of the fetch
    handover_tokens: dict[int, int] = field(default_factory=dict)
    freed_s: float = NEVER_S  # time at which the prefill before the oldest started one ended
    load: InstanceLoad | None = None
    resyncing: bool = False  # whether a snapshot of the instance's blocks was requested
    drain: Drain | None = None
    hot: HotPrefixes | None = None  # the most used prefixes of the instance, if requested
    prefill_factor: LearnedFactor = field(default_factory=LearnedFactor)
    decode_factor: LearnedFactor = field(default_factory=LearnedFactor)
    transfer_factor: LearnedFactor = field(default_factory=LearnedFactor)
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STALLS))

    @property
    def drained(self) -> bool:
        """Whether no attempt needs the instance any more. A request that the instance handed over
        no longer needs it once the decode instance has accepted the request. Fetches from the
        instance do not count, because they are served in any role."""
        return not self.decodes and self.prefilled

    @property
    def prefilled(self) -> bool:
        """Whether no attempt needs the instance for its prefill any more."""
        if self.prefills:
            return False
        attempts = [tracked.attempt for tracked in self.handed_over.values()]
        return all(attempt is None or attempt.phase is AttemptPhase.DECODE for attempt in attempts)

    def busy_until_s(self) -> float:
        """Returns when the started prefills, which run one after another, should be over."""
        until_s = self.freed_s if self.started else NEVER_S
        for attempt in self.started.values():
            assert attempt.started_s is not None
            until_s = max(until_s, attempt.started_s) + attempt.prefill_ns * S_PER_NS
        return until_s
