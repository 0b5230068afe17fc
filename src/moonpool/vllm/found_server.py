"""The server behind an instance, from when it was found until it is gone."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.vllm.dialects.server_dialect import ServerDialect
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.served_slots import ServedSlots


@dataclass(slots=True)
class FoundServer:
    """`slots`: of a server that has any."""

    dialect: ServerDialect
    facts: VllmFacts
    incarnation: int
    cost: FittedCost | None = None
    is_measured: bool = False  # else `cost` is assumed
    layout: BlockLayout | None = None
    instance: VllmInstance | None = None  # set by the first `Setup`
    slots: ServedSlots | None = None  # likewise
