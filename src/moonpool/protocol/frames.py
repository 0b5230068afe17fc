"""The frames of the control connection between a worker and the head.

    worker                                                 head
      | <-- handshake: both prove the cluster's secret ---> |  transfer.auth, service "control"
      | -- Apply (role, host) ----------------------------> |
      | <-- Setup (model, pool, engine, SLO tables) ------- |
      |   loads the model, allocates, calibrates            |
      | -- Joined (InstanceInfo), or Failed (why) --------> |
      | <-- commands -------------------------------------- |  protocol.messages
      | -- reports, heartbeats ---------------------------> |
      | <-- Stop, or TurnedAway (why) --------------------- |

An attention worker sends ApplyAttention, receives the Setup, and replies with AttentionReady. An
instance that has attention workers receives its Setup once they are ready, and AttentionMoved
when one of them is replaced.

A standby sends ApplyStandby every second. A standby receives the Setup once, and Leadership every
second, which all workers receive while a standby is present. AnswersCopied brings it the logs of
the answers under way.

A frame is 4 bytes of length and a msgpack map, tagged with the name of its class
(`link.channel`). The handshake agrees on a version (`protocol.versions`). Fields of a newer version
are left out if an older version was agreed on: both ends refuse fields and frames that they do not
know.
"""

from __future__ import annotations

import msgspec

from moonpool.config.tables import (
    AttentionConfig,
    EngineConfig,
    ModelConfig,
    MooncakeConfig,
    NetworkConfig,
    PoolConfig,
    SloConfig,
)
from moonpool.protocol.messages import Command, InstanceInfo, Report
from moonpool.protocol.model_offer import ModelOffer
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId, Role, Struct

CONTROL_SERVICE = "control"
HEARTBEAT_S = 1.0
QUIET_HEARTBEAT_S = 5.0
"""The interval of heartbeats of a worker that has been idle for a while."""
SILENCE_S = 15.0
"""A worker that sends nothing for this long counts as dead. The worker's heartbeat thread shares
the process with the engine, so this must outlast a brief lack of CPU on its machine."""


class Apply(Struct, frozen=True, tag=True):
    """A worker offers to become an instance of this role."""

    role: Role
    host: str
    pid: int
    attention: tuple[str, ...] = ()  # the instance's attention workers, if it only reconnects
    offer: ModelOffer | None = None  # offer of a vLLM server; since protocol 11


class ApplyAttention(Struct, frozen=True, tag=True):
    """A worker offers to become an attention worker."""

    host: str
    pid: int


class AttentionReady(Struct, frozen=True, tag=True):
    """The attention worker listens at this address."""

    address: PeerAddress


class AttentionMoved(Struct, frozen=True, tag=True):
    """The instance's attention worker at `place` was replaced, or has a new address."""

    place: int
    address: PeerAddress


class Setup(Struct, frozen=True, tag=True):
    """The settings that all instances of a cluster must share, and those for this one."""

    model: ModelConfig
    pool: PoolConfig
    mooncake: MooncakeConfig
    network: NetworkConfig
    engine: EngineConfig
    slo: SloConfig  # service levels of requests without an SLO of their own
    learning: bool  # whether instances correct their cost model online
    num_instances: int  # number of instances that share the memory of one machine
    # number of processes that share the cores of one machine, including all stages
    num_processes: int
    attention: tuple[PeerAddress, ...] = ()  # attention workers of this instance
    # how blocks are divided among the attention workers
    sharing: AttentionConfig = AttentionConfig()


class HeadAddress(Struct, frozen=True):
    """The address where a head listens for workers, or will listen when it takes over."""

    host: str
    port: int


class ApplyStandby(Struct, frozen=True, tag=True):
    """A standby is there; or, with a later epoch than the receiver's, it has replaced this head.

    `wants_answers`: whether the standby keeps copies of the answers under way.
    """

    address: HeadAddress
    pid: int
    epoch: int = 0
    wants_answers: bool = False


class AnswerBegun(Struct, frozen=True):
    """An answer has begun whose client may come back; `number` identifies it on this connection.
    `digest`: the digest of its call; `seed` and the other fields: the random values drawn for
    it."""

    number: int
    tenant: str
    request_id: str
    digest: bytes
    seed: int
    created_s: int
    ids: bytes
    max_model_tokens: int
    num_returns: int = 0


class AnswersCopied(Struct, frozen=True, tag=True):
    """News of the answers under way: `grown` has further bytes of their logs, `ended` the numbers
    of answers that are complete or abandoned. `is_first`: whether earlier copies no longer count.
    """

    begun: tuple[AnswerBegun, ...] = ()
    grown: tuple[tuple[int, bytes], ...] = ()
    ended: tuple[int, ...] = ()
    is_first: bool = False


class Leadership(Struct, frozen=True, tag=True):
    """The head is alive, and its workers should try `standbys` when it is not.

    `instances`, for standbys: the instances that requests should wait for; `offers`: the models of
    instances that are vLLM servers. `replaced`: whether the head has stopped serving, because a
    head of this epoch at `standbys` serves.
    """

    epoch: int
    standbys: tuple[HeadAddress, ...] = ()
    instances: dict[InstanceId, Role] = msgspec.field(default_factory=dict)
    replaced: bool = False
    offers: dict[InstanceId, ModelOffer] = msgspec.field(default_factory=dict)


class Joined(Struct, frozen=True, tag=True):
    """The instance is ready to serve."""

    info: InstanceInfo
    release: str = ""  # release of the worker; since protocol 11


class Failed(Struct, frozen=True, tag=True):
    """The worker cannot start; one line for the user."""

    message: str


class Stop(Struct, frozen=True, tag=True):
    """The worker must shut down."""


class TurnedAway(Struct, frozen=True, tag=True):
    """The head rejects this instance; one line for the user."""

    message: str


WorkFrame = Setup | AttentionMoved | Command
DownFrame = WorkFrame | Stop | TurnedAway | Leadership | AnswersCopied
UpFrame = Apply | ApplyAttention | ApplyStandby | AttentionReady | Joined | Failed | Report
