"""What the Conductor remembers: the instances, and the requests under way. Soft state, all of
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from moonpool.conductor.decode_forecast import Stay
from moonpool.conductor.explanation import Explanation
from moonpool.conductor.fleet import NEVER_S, S_PER_NS
from moonpool.cost.learned import LearnedFactor
from moonpool.metrics import RequestRecord
from moonpool.types import BlockKey, InstanceId, Request, Role, Token
from moonpool.workers.messages import HotPrefixes, InstanceInfo, InstanceLoad, WorkId


class Stage(Enum):
    """How far an attempt is."""

    PREFILL = "prefill"
    HANDOVER = "handover"  # first token drawn; decode has not yet accepted
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement of a request, as booked."""

    work_id: WorkId
    prefill: InstanceId
    decode: InstanceId | None
    fetch_from: InstanceId | None
    prefill_ns: int
    num_tokens: int  # of its context: prompt and answer so far
    booked_tokens: int  # room at the instance that gives the tokens; 0: none is needed there
    answers: bool  # False if the first token is also the last
    tbt_s: float  # predicted
    expected_keys: Sequence[BlockKey]  # blocks that its prefill adds to the instance's
    stay: Stay | None = None
    stay_tokens: int = 0  # length of the answer that the stay's end was reckoned with; 0: none
    stage: Stage = Stage.PREFILL
    started_s: float | None = None
    expected_s: float = 0.0  # of its prefill, by the profile, with what was then really cached
    decoding_since_s: float | None = None
    first_token: Token | None = None

    @property
    def decoder(self) -> InstanceId:
        """The instance that gives the tokens."""
        return self.decode if self.decode is not None else self.prefill


@dataclass(slots=True, eq=False)
class Tracked:
    """A request under way. `generated` were delivered already: a new attempt goes on after them."""

    request: Request
    record: RequestRecord
    keys: Sequence[BlockKey] = ()
    attempt: Attempt | None = None
    num_attempts: int = 0
    predicted_output_tokens: float = 0.0
    generated: list[int] = field(default_factory=list)
    explanation: Explanation = field(default_factory=Explanation)
    failed_on: set[InstanceId] = field(default_factory=set)  # other instances come first


@dataclass(slots=True, eq=False)
class Drain:
    """An instance gets no new work; when what it has is over, it becomes something else, or
    leaves."""

    reason: str  # for people
    since_s: float
    until_s: float  # then it is given up, and the instance serves on as before
    becomes: Role | None  # None: it leaves
    told: bool = False  # the instance knows


@dataclass(slots=True, eq=False)
class InstanceState:
    """An instance and what is booked on it."""

    info: InstanceInfo
    row: int
    prefills: dict[WorkId, Tracked] = field(default_factory=dict)
    started: dict[WorkId, Attempt] = field(default_factory=dict)  # those of `prefills` that run
    decodes: dict[WorkId, Tracked] = field(default_factory=dict)
    handed_over: dict[WorkId, Tracked] = field(default_factory=dict)  # prefilled here
    serving: dict[WorkId, Attempt] = field(default_factory=dict)  # fetches from here
    taking: dict[int, int] = field(default_factory=dict)  # tokens booked for what it takes over
    freed_s: float = NEVER_S  # when the oldest of the started prefills could go on alone
    load: InstanceLoad | None = None
    resyncing: bool = False  # all its blocks were asked for
    drain: Drain | None = None
    hot: HotPrefixes | None = None  # what it uses most, if somebody asked
    prefill_factor: LearnedFactor = field(default_factory=LearnedFactor)
    decode_factor: LearnedFactor = field(default_factory=LearnedFactor)
    transfer_factor: LearnedFactor = field(default_factory=LearnedFactor)

    @property
    def drained(self) -> bool:
        """No work needs it any more. What it handed over is the decode instance's, once that has
        accepted; fetches are served in any role."""
        if self.prefills or self.decodes:
            return False
        attempts = [tracked.attempt for tracked in self.handed_over.values()]
        return all(attempt is None or attempt.stage is Stage.DECODE for attempt in attempts)

    def busy_until_s(self) -> float:
        """When the prefills that have started should be over: they run one after another."""
        until_s = self.freed_s if self.started else NEVER_S
        for attempt in self.started.values():
            assert attempt.started_s is not None
            until_s = max(until_s, attempt.started_s) + attempt.prefill_ns * S_PER_NS
        return until_s
