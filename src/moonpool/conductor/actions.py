"""What happens to the Conductor, and what it asks its driver to do."""

from __future__ import annotations

import msgspec

from moonpool.conductor.explanation import Explanation
from moonpool.metrics import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Token
from moonpool.workers.messages import Command, InstanceInfo, Report

# Events


class InstanceJoined(msgspec.Struct, frozen=True):
    info: InstanceInfo


class InstanceLost(msgspec.Struct, frozen=True):
    """The connection to an instance ended, or it fell silent."""

    instance_id: InstanceId
    reason: str


class RequestArrived(msgspec.Struct, frozen=True):
    request: Request


class RequestCancelled(msgspec.Struct, frozen=True):
    """Nobody waits for the answer any more (client gone, stop string seen)."""

    request_id: RequestId


class Reported(msgspec.Struct, frozen=True):
    instance_id: InstanceId
    report: Report


class DrainRequested(msgspec.Struct, frozen=True):
    """An instance is to leave within so many seconds; `Draining.why_not` says if it cannot."""

    instance_id: InstanceId
    within_s: float
    why: str


class HotRequested(msgspec.Struct, frozen=True):
    """Somebody wants to know what is used most: each instance's answer comes to its state."""

    num_blocks: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; deadlines are checked."""


ConductorEvent = (
    InstanceJoined
    | InstanceLost
    | RequestArrived
    | RequestCancelled
    | Reported
    | DrainRequested
    | HotRequested
    | Tick
)

# Actions


class Send(msgspec.Struct, frozen=True):
    """Give a command to an instance."""

    instance_id: InstanceId
    command: Command


class Deliver(msgspec.Struct, frozen=True):
    """More of an answer, for whoever asked."""

    request_id: RequestId
    tokens: tuple[Token, ...]
    finish: FinishReason | None
    cached_tokens: int


class Refuse(msgspec.Struct, frozen=True):
    """No (further) answer: `status` is HTTP's, `reason` for machines, `message` for people."""

    request_id: RequestId
    status: int
    reason: str
    message: str
    retry_after_s: float | None
    projection: dict[str, float] | None = None


class RequestEnded(msgspec.Struct, frozen=True):
    """Exactly one for each request that arrived: its record is complete, but for the explanation,
    which is put into words only if somebody asks for its `lines()`."""

    record: RequestRecord
    explanation: Explanation


class Announce(msgspec.Struct, frozen=True):
    """For whoever runs the cluster."""

    text: str


ConductorAction = Send | Deliver | Refuse | RequestEnded | Announce
