"""Asks a moonpool server by which costs it decides.

The costs that a server measures of itself at its start differ from those that its clients see, and
chunks, admission and placement follow from the server's own. So a simulation of the server decides
by the server's own costs, while its steps take the times that were measured from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.cost.fitted import FittedCost, scaled
from moonpool.cost.recorded import (
    CostEstimatorRecord,
    InstanceRecord,
    RecordError,
    parse_beliefs,
)
from moonpool.http_client.client import HttpClient
from moonpool.types import InstanceId, Role


async def read_stated_costs(client: HttpClient) -> tuple[InstanceRecord, ...]:
    """Returns the costs by which the instances of a moonpool server decide now, learned factors
    included. Returns nothing for another server, or if the API key may not read them. Raises
    ConnectionFailedError."""
    status, body = await client.get("/beliefs")
    if status != 200:
        return ()
    try:
        instances = parse_beliefs(body).instances
    except RecordError:
        return ()
    return tuple(
        msgspec.structs.replace(one, profile=_with_factors(one), prefill=(), decode=(), transfer=())
        for one in instances
    )


def _with_factors(one: InstanceRecord) -> FittedCost:
    prefill, decode, transfer = (
        one.factors.get(name) or 1.0 for name in ("prefill", "decode", "transfer")
    )
    return scaled(one.profile, prefill, decode, transfer)


def record_of(
    stated: Sequence[InstanceRecord], cost: FittedCost, chunk_ratios: tuple[float, ...]
) -> CostEstimatorRecord:
    """Returns the record for a simulation whose steps take `cost`. Steps with prompts take one of
    `chunk_ratios` times as long. If nothing is stated, the instances decide by `cost`, too."""
    instances = tuple(stated) or (InstanceRecord(InstanceId("mixed-0"), Role.MIXED, cost),)
    return CostEstimatorRecord(
        tuple(msgspec.structs.replace(one, prefill=chunk_ratios) for one in instances),
        only_estimates=True,
    )
