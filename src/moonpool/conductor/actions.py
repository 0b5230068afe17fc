"""The Conductor's events (input) and actions (output, for its driver)."""

from __future__ import annotations

import msgspec

from moonpool.conductor.placement.choice import Explanation
from moonpool.protocol.messages import Command, InstanceInfo, Report
from moonpool.refusal import Refusal
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Role, Token

# Events


class InstanceJoined(msgspec.Struct, frozen=True):
    info: InstanceInfo


class InstanceLost(msgspec.Struct, frozen=True):
    """The connection to an instance ended, or its heartbeats stopped."""

    instance_id: InstanceId
    reason: str


class InstanceCrashed(msgspec.Struct, frozen=True):
    """The process of an instance has crashed, and nobody killed it from outside. The loss of the
    instance may be reported before or after the crash."""

    instance_id: InstanceId


class InstanceForgotten(msgspec.Struct, frozen=True):
    """A lost instance now serves another model, so requests no longer wait for it."""

    instance_id: InstanceId


class RequestArrived(msgspec.Struct, frozen=True):
    """`delivered`: the tokens that the client has from an earlier head, or None for a new
    request."""

    request: Request
    delivered: tuple[int, ...] | None = None


class InstancesExpected(msgspec.Struct, frozen=True):
    """An earlier head had these instances. Requests may wait until these instances join the present
    head."""

    roles: dict[InstanceId, Role]


class InstancesLaunched(msgspec.Struct, frozen=True):
    """The launcher of these instances replaces one that leaves when it gets `Relaunch`."""

    instance_ids: tuple[InstanceId, ...]


class RequestCancelled(msgspec.Struct, frozen=True):
    """The answer is no longer needed: its client has left, another choice of its call failed, or
    the head stops. `reason`: the outcome of its record."""

    request_id: RequestId
    reason: str = FinishReason.ABORT.value


class RequestFinished(msgspec.Struct, frozen=True):
    """The answer is complete although its engine goes on: the first `num_tokens` tokens are its
    whole text, because a stop string ends it. Tokens that an earlier head delivered are
    included."""

    request_id: RequestId
    reason: FinishReason
    num_tokens: int


class DeadlineMoved(msgspec.Struct, frozen=True):
    """The request has another deadline."""

    request_id: RequestId
    deadline_s: float


class Reported(msgspec.Struct, frozen=True):
    instance_id: InstanceId
    report: Report


class DrainRequested(msgspec.Struct, frozen=True):
    """An instance is to leave within `within_s` seconds; `Draining.why_not` tells if it cannot.
    `returns`: another process will take its place, so requests may wait for it."""

    instance_id: InstanceId
    within_s: float
    why: str
    returns: bool = False


class CacheDropRequested(msgspec.Struct, frozen=True):
    """An operator wants all instances to drop the cached blocks that no request holds."""


class HotRequested(msgspec.Struct, frozen=True):
    """The most used prefixes are requested; each instance's answer is stored in its state."""

    num_blocks: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: deadlines, drains and roles are checked."""


ConductorEvent = (
    InstanceJoined
    | InstanceLost
    | RequestArrived
    | InstancesExpected
    | InstancesLaunched
    | RequestCancelled
    | RequestFinished
    | DeadlineMoved
    | Reported
    | DrainRequested
    | HotRequested
    | CacheDropRequested
    | InstanceCrashed
    | InstanceForgotten
    | Tick
)

# Actions


class Send(msgspec.Struct, frozen=True):
    """Sends a command to an instance."""

    instance_id: InstanceId
    command: Command


class Deliver(msgspec.Struct, frozen=True):
    """Passes more tokens of an answer to its client."""

    request_id: RequestId
    tokens: tuple[Token, ...]
    finish: FinishReason | None
    cached_tokens: int


class Refuse(msgspec.Struct, frozen=True):
    """The request is rejected, or its answer ends early with an error."""

    request_id: RequestId
    refusal: Refusal


class RequestEnded(msgspec.Struct, frozen=True):
    """This action comes exactly once for each request that arrived. Its record is complete except
    for the explanation, which `Explanation.lines` formats on demand."""

    record: RequestRecord
    explanation: Explanation


class Announce(msgspec.Struct, frozen=True):
    """Asks the driver to write a line to the operator's log."""

    text: str
    is_warning: bool = False


class Relaunch(msgspec.Struct, frozen=True):
    """Asks the launcher to start another instance once this one has left."""

    instance_id: InstanceId


class InstancesWanted(msgspec.Struct, frozen=True):
    """How many instances of each role the load needs (`autoscale`). A program that starts and stops
    instances may follow it."""

    prefill: int
    decode: int


ConductorAction = Send | Deliver | Refuse | RequestEnded | Announce | Relaunch | InstancesWanted
