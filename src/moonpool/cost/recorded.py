"""A record of a live Conductor's cost model and its errors, to be replayed in a simulation.

The head writes it; `moonpool simulate --beliefs` reads it. Owns the format and its checks.
"""

from __future__ import annotations

import msgspec

from moonpool.cost.fitted import FittedCost
from moonpool.cost.online import MAX_FACTOR
from moonpool.types import MALFORMED, InstanceId, Role, Struct


class InstanceRecord(Struct, frozen=True):
    """The cost of one instance, as recorded. `prefill`, `decode` and `transfer` are the recent
    ratios of observed to predicted seconds; a list is empty if nothing was observed."""

    instance_id: InstanceId
    role: Role
    profile: FittedCost
    prefill: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    factors: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # names of the Conductor's `LearnedFactor` objects


class CostEstimatorRecord(Struct, frozen=True):
    """The costs of all instances, as recorded. `errors` are the prediction errors, by predicted
    quantity. With `only_estimates`, a simulated step takes the time of its hardware, and the
    profiles serve only the estimates of the instances and the Conductor."""

    instances: tuple[InstanceRecord, ...]
    errors: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    only_estimates: bool = False


class RecordError(ValueError):
    """The text is not a valid record; the message is one line."""


def parse_beliefs(text: str | bytes) -> CostEstimatorRecord:
    """Parses and checks a record. Raises RecordError."""
    try:
        record = msgspec.json.decode(text, type=CostEstimatorRecord)
    except MALFORMED as error:
        raise RecordError(f"not a record of `moonpool profile --beliefs`: {error}") from None
    if not record.instances:
        raise RecordError(
            "the record has no instances: make it while the cluster's instances are up"
        )
    for instance in record.instances:
        _check(instance)
    return record


def _check(record: InstanceRecord) -> None:
    cost, name = record.profile, record.instance_id
    if min((*cost.prefill, *cost.decode, cost.transfer_latency_s)) < 0:
        raise RecordError(f"the profile of {name} has a negative time")
    if not any(cost.prefill) or not any(cost.decode):
        raise RecordError(f"in the profile of {name}, prefill or decode takes no time")
    if min(cost.shared_memory_bytes_per_s, cost.network_bytes_per_s) <= 0:
        raise RecordError(f"the profile of {name} has a bandwidth of 0 or less")
    for ratio in (*record.prefill, *record.decode, *record.transfer):
        if not 1.0 / MAX_FACTOR <= ratio <= MAX_FACTOR:
            raise RecordError(
                f"{name} takes {ratio:g} times what its profile predicts;"
                f" the factor must lie between 1/{MAX_FACTOR:g} and {MAX_FACTOR:g}"
            )
