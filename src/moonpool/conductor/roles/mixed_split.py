"""Gives mixed instances separate roles where that serves more.

A mixed instance computes prompts in chunks beside its decodes. A chunk is at least one tile, and
each step has a fixed time. Under a tight TBT SLO this is most of what a step may take, or more.
Then a prompt breaks the SLO of all answers on its instance.

The mixed instances of a cluster have separate roles if
* the TBT SLO leaves no room for a chunk beside a decode, whatever the load;
* or a third of a step is its fixed time, as long as the demand is not known;
* or the fuller pool of the best split would have a clearly lower load than mixed instances have, by
  the demand of the last minutes. This counts only in a cluster of mixed instances alone.

The roles are the Conductor's alone: the instances take both kinds of work, and are told nothing.
From then on `role_balance` moves them between the roles by the demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.role_balance import LOADED, LoadSums
from moonpool.conductor.state import InstanceState
from moonpool.cost.chunk_limits import CHUNKED_STEP_SHARE, LEAST_CHUNK_TOKENS
from moonpool.types import Role

GAIN = 0.15
"""Least share by which another arrangement must reduce the load."""
FIXED_SHARE = 1.0 / 3.0
"""From this share of a step's fixed time on, mixed instances begin with separate roles."""
DWELL_S = 60.0
"""Least time between two arrangements that differ by the demand."""


class ArrangementLoads(NamedTuple):
    """Demand over capacity of the same instances, mixed and with the best split."""

    mixed: float
    split: float
    num_prefills: int  # of the best split


class MixedSplit:
    """Whether the mixed instances of a cluster have separate roles, and which."""

    def __init__(self, tbt_slo_s: float) -> None:
        self._tbt_slo_s = tbt_slo_s
        self._by_demand: ArrangementLoads | None = None  # the loads when it last decided
        self._changed_s = -inf
        self.is_split = False

    def assign(self, table: InstanceTable, mixed: Sequence[InstanceState]) -> None:
        """Sets the roles of the instances that are mixed by themselves (mutates their states and
        the table). Draining ones must not be among them."""
        self.is_split = len(mixed) >= 2 and self._should_split(table, mixed)
        if not self.is_split:
            for state in mixed:
                _set_role(table, state, Role.MIXED)
            return
        new = [state for state in mixed if state.role is Role.MIXED]
        for number, state in enumerate(new):
            role = _shorter_pool(table)
            if len(new) == len(mixed) and self._by_demand is not None:
                role = Role.PREFILL if number < self._by_demand.num_prefills else Role.DECODE
            _set_role(table, state, role)
        if not table.num_prefills:
            _set_role(table, mixed[0], Role.PREFILL)  # it takes the place of the last one
        elif not table.num_decodes:
            _set_role(table, mixed[0], Role.DECODE)

    def _should_split(self, table: InstanceTable, mixed: Sequence[InstanceState]) -> bool:
        rows = np.array([state.row for state in mixed])
        if not table.may_split(rows).all():
            return False
        if not table.chunk_fits(rows).any():
            return True
        if self._by_demand is not None:
            return self._by_demand.split < self._by_demand.mixed
        return bool((table.fixed_share(rows) > FIXED_SHARE).all())

    def consider(
        self, table: InstanceTable, mixed: Sequence[InstanceState], load: LoadSums, now: float
    ) -> None:
        """Decides by the demand. `assign` follows it."""
        if len(mixed) < 2 or now < self._changed_s + DWELL_S:
            return
        if table.num_prefills + table.num_decodes > (1 if self.is_split else 2) * len(mixed):
            return  # there are other instances
        loads = compare(table, mixed, load, self._tbt_slo_s)
        now_load, other = (
            (loads.split, loads.mixed) if self.is_split else (loads.mixed, loads.split)
        )
        if now_load > LOADED and other < (1.0 - GAIN) * now_load:
            self._by_demand, self._changed_s = loads, now


def compare(
    table: InstanceTable, mixed: Sequence[InstanceState], load: LoadSums, tbt_slo_s: float
) -> ArrangementLoads:
    """The loads of both arrangements under a demand. The instances count as equal to the first."""
    row, num = mixed[0].row, len(mixed)
    prefill_s = load.prefill_s(table).item(row)
    decode_s = load.decode_s(table, tbt_slo_s, 1.0).item(row)
    best, num_prefills = min(
        (max(prefill_s / prefills, decode_s / (num - prefills)), prefills)
        for prefills in range(1, num)
    )
    # Each step of a mixed instance has the fixed time of a prompt, so that prompts have none.
    begin_s = table.prefill_base_s.item(row)
    step_s = CHUNKED_STEP_SHARE * tbt_slo_s
    number, tokens, contexts = load.sums[0], load.sums[4], load.sums[5]
    own_s = table.decode_s_per_sequence.item(row) * tokens
    own_s += table.decode_s_per_context_token.item(row) * contexts
    seen_s = max(load.seen_s, 1e-9)
    work_s = max(prefill_s - begin_s * number / seen_s, 0.0) + own_s / seen_s
    room = 1.0 - begin_s / step_s
    mixed_load = work_s / num / room if room > 0.0 else inf
    # A tile must fit beside the decodes that are served.
    served = min(1.0, 1.0 / mixed_load) if mixed_load > 0.0 else 1.0
    decodes_s = served * own_s / seen_s / num * step_s
    tile = max(table.tile_tokens.item(row), 1.0)
    tile_s = table.prefill_s_per_token.item(row) * np.ceil(LEAST_CHUNK_TOKENS / tile) * tile
    if begin_s + tile_s + decodes_s > step_s:
        mixed_load = inf
    return ArrangementLoads(mixed_load, best, num_prefills)


def _shorter_pool(table: InstanceTable) -> Role:
    """The role that fewer instances have; mixed ones are yet to be given one."""
    only_prefill = int(np.count_nonzero(table.prefills & ~table.decodes))
    only_decode = int(np.count_nonzero(table.decodes & ~table.prefills))
    return Role.PREFILL if only_prefill <= only_decode else Role.DECODE


def _set_role(table: InstanceTable, state: InstanceState, role: Role) -> None:
    if state.role is not role:
        state.role = role
        table.set_role(state.row, role.prefills, role.decodes)
