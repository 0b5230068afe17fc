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
"""

from __future__ import annotations

from moonpool.config import (
    EngineConfig,
    ModelConfig,
    MooncakeConfig,
    NetworkConfig,
    PoolConfig,
    SloConfig,
)
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


DownFrame = Setup | Stop | TurnedAway | Command
UpFrame = Apply | Joined | Failed | Report
