"""The control connection between head and worker: what frames it carries, beyond commands and
reports.

worker                                   head
  | -- handshake (messenger.auth, service "control") --> |
  | -- Apply (role, host) -----------------------------> |
  | <-- Setup (model, pool, engine, slo tables) -------- |
  |   loads, allocates, calibrates                       |
  | -- Joined (InstanceInfo)  or  Failed (why) --------> |
  | <-- commands            reports, heartbeats ------->  |
  | <-- Stop, or TurnedAway (why)                        |

An attention worker says ApplyAttention, gets the Setup, and answers AttentionReady. Instances that
own attention workers get their Setup when these are there, and AttentionMoved when one of them is
replaced.
"""

from __future__ import annotations

from moonpool.config import (
    AttentionConfig,
    EngineConfig,
    ModelConfig,
    MooncakeConfig,
    NetworkConfig,
    PoolConfig,
    SloConfig,
)
from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import Role, Struct
from moonpool.workers.messages import Command, InstanceInfo, Report

CONTROL_SERVICE = "control"
HEARTBEAT_S = 1.0
SILENCE_S = 15.0
"""A worker that said nothing for this long is taken for dead: its heartbeat thread shares the
process with the engine, so this must outlast a machine that is briefly starved of CPU."""


class Apply(Struct, frozen=True, tag=True):
    role: Role
    host: str
    pid: int
    attention: tuple[str, ...] = ()  # workers it has already, if it only comes back


class ApplyAttention(Struct, frozen=True, tag=True):
    host: str
    pid: int


class AttentionReady(Struct, frozen=True, tag=True):
    """Model workers find it there."""

    address: PeerAddress


class AttentionMoved(Struct, frozen=True, tag=True):
    """The attention worker with that number is another one now, or listens elsewhere."""

    place: int
    address: PeerAddress


class Setup(Struct, frozen=True, tag=True):
    """Everything an instance must agree on with the others."""

    model: ModelConfig
    pool: PoolConfig
    mooncake: MooncakeConfig
    network: NetworkConfig
    engine: EngineConfig
    slo: SloConfig  # of requests that were promised nothing themselves
    learning: bool  # instances believe their steps as they see them
    num_instances: int  # expected on one machine, to divide its memory among
    num_processes: int  # the same with all their stages, to divide its cores among
    attention: tuple[PeerAddress, ...] = ()  # workers that hold this instance's blocks
    sharing: AttentionConfig = AttentionConfig()  # among them


class Joined(Struct, frozen=True, tag=True):
    info: InstanceInfo


class Failed(Struct, frozen=True, tag=True):
    """The worker cannot start; one line for the person who started it."""

    message: str


class Stop(Struct, frozen=True, tag=True):
    """End the process in good order."""


class TurnedAway(Struct, frozen=True, tag=True):
    """The head will not have this instance; one line for the person who started it."""

    message: str


WorkFrame = Setup | AttentionMoved | Command
DownFrame = WorkFrame | Stop | TurnedAway
UpFrame = Apply | ApplyAttention | AttentionReady | Joined | Failed | Report
