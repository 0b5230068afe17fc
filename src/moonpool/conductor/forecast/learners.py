"""The parts of the Conductor that learn from requests."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.conductor.admission.goodput import GoodputModel
from moonpool.conductor.forecast.cost_estimator import CostEstimator
from moonpool.conductor.forecast.output_predictor import OutputPredictor
from moonpool.conductor.placement.prefetching import Prefetching
from moonpool.conductor.placement.replication import Replication
from moonpool.conductor.roles.role_switching import RoleSwitching


@dataclass(frozen=True, slots=True)
class Learners:
    """`prefetching` and `replication` are None where the configuration leaves them out."""

    output_predictor: OutputPredictor
    cost_estimator: CostEstimator
    goodput: GoodputModel
    roles: RoleSwitching
    prefetching: Prefetching | None
    replication: Replication | None
