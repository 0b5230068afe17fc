"""What a live Conductor believed, and how far the truth was from it: to be replayed in simulation.

Written by the head, read by `moonpool simulate --beliefs`. Owns the format and its checks; nothing
is decided here.
"""

from __future__ import annotations

import msgspec

from moonpool.cost.fitted import FittedCost
from moonpool.cost.learned import MOST
from moonpool.types import InstanceId, Role, Struct


class InstanceRecord(Struct, frozen=True):
    """`prefill`, `decode` and `transfer` are the recent ratios of times taken to times that the
    profile says; empty where nothing was seen."""

    instance_id: InstanceId
    role: Role
    profile: FittedCost
    prefill: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    factors: dict[str, float] = msgspec.field(default_factory=dict)  # the Conductor's


class BeliefRecord(Struct, frozen=True):
    """`errors` are those of predictions, by what was predicted."""

    instances: tuple[InstanceRecord, ...]
    errors: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)


class RecordError(ValueError):
    """It is no record of beliefs; one line says why."""


def parse_beliefs(text: str | bytes) -> BeliefRecord:
    """Raises RecordError."""
    try:
        record = msgspec.json.decode(text, type=BeliefRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"it is no record of `moonpool profile --beliefs-of`: {error}") from None
    if not record.instances:
        raise RecordError("it names no instance: record a cluster whose instances are up")
    for instance in record.instances:
        _check(instance)
    return record


def _check(record: InstanceRecord) -> None:
    cost, name = record.profile, record.instance_id
    if min((*cost.prefill, *cost.decode, cost.transfer_latency_s)) < 0:
        raise RecordError(f"the profile of {name} holds a negative time")
    if not any(cost.prefill) or not any(cost.decode):
        raise RecordError(f"by the profile of {name} all work takes no time")
    if min(cost.shared_memory_bytes_per_s, cost.network_bytes_per_s) <= 0:
        raise RecordError(f"the profile of {name} holds a bandwidth of 0 or less")
    for ratio in (*record.prefill, *record.decode, *record.transfer):
        if not 1.0 / MOST <= ratio <= MOST:
            raise RecordError(f"{name} departs {ratio:g} times from its profile: at most {MOST:g}")
