"""What happens to the Conductor, and what it asks its driver to do."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.metrics import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Token
from moonpool.workers.messages import Command, InstanceInfo, Report

# Events


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The connection to an instance ended, or it fell silent."""

    instance_id: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """Nobody waits for the answer any more (client gone, stop string seen)."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Reported:
    instance_id: InstanceId
    report: Report


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are checked."""


ConductorEvent = InstanceJoined | InstanceLost | RequestArrived | RequestCancelled | Reported | Tick

# Actions


@dataclass(frozen=True, slots=True)
class Send:
    """Give a command to an instance."""

    instance_id: InstanceId
    command: Command


@dataclass(frozen=True, slots=True)
class Deliver:
    """More of an answer, for whoever asked."""

    request_id: RequestId
    tokens: tuple[Token, ...]
    finish: FinishReason | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """No (further) answer: `status` is HTTP's, `reason` for machines, `message` for people."""

    request_id: RequestId
    status: int
    reason: str
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Exactly one for each request that arrived: its record is complete."""

    record: RequestRecord


ConductorAction = Send | Deliver | Refuse | RequestEnded
