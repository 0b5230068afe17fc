"""Defines the settings of a simulation besides its configuration, hardware and arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.cost.recorded import CostEstimatorRecord
from moonpool.types import Struct


class SimulationSettings(Struct, frozen=True):
    """The settings of one simulated run.

    If `seed` is None, the configuration's seed counts. `slow`, `drain` and `restart` map names of
    instances. `Perturbation` explains `noise`, `slow` and `recorded`. `drain` gives the times at
    which instances drain and leave; after a `restart`, an empty instance of the same name joins.
    `tenant_share` is a tenant's share of an overloaded cluster, relative to 1. `tenant_cache` is
    the largest part of each instance's cache that a tenant may have. Without `layer_wise`, all
    layers of KVCache are sent and loaded together. With `capped_answers`, clients cap each answer
    at its true length, as a replay does. `boot_s` is the time until an instance that autoscale
    starts can serve. `sample_s` is the time between two samples of the load. `node_series` names
    the instances whose busy time is sampled. At most `most_programs` programs run at a time; None
    means as many as the trace has. `objects` has policy objects by config key (see
    `plugins.policies`).
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
