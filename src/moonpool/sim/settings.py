"""What a simulation depends on besides its configuration, its hardware and its arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.cost.recorded import CostEstimatorRecord
from moonpool.types import Struct


class SimulationSettings(Struct, frozen=True):
    """The settings of one simulated run. `slow`, `drain` and `restart` are by name of an instance.

    `seed`: with None, the configuration's seed counts. For `noise`, `slow` and `recorded` see
    `Perturbation`. `drain` gives the times at which instances drain and leave; `restart` likewise,
    and an empty instance of the same name joins afterwards. `tenant_share`: a tenant's share of an
    overloaded cluster, relative to 1. `tenant_cache`: most of each instance's cache that a tenant
    may have. Without `layer_wise`, KVCache is sent and loaded whole. `capped_answers`: clients cap
    each answer at the length it has, as a replay does. `boot_s`: until an instance that autoscale
    starts can serve. `sample_s`: between two samples of the load. `node_series`: instances whose
    busy time is sampled. `most_programs`: that run at a time; None means as many as the trace has.
    `objects`: policies themselves, by config key (see `plugins.policies`).
    """

    noise: float = 0.0
    slow: Mapping[str, float] = {}
    drain: Mapping[str, float] = {}
    restart: Mapping[str, float] = {}
    tenant_share: Mapping[str, float] = {}
    tenant_cache: Mapping[str, float] = {}
    layer_wise: bool = True
    capped_answers: bool = False
    boot_s: float = 120.0
    seed: int | None = None
    recorded: CostEstimatorRecord | None = None
    sample_s: float = 5.0
    node_series: int = 32
    most_programs: int | None = None
    objects: Mapping[str, Any] = {}


USUAL_SETTINGS = SimulationSettings()
