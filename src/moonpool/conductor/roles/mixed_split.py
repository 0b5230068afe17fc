"""Gives mixed instances separate roles where the TBT SLO leaves too little room for prompts.

A mixed instance computes prompts in chunks beside its decodes. A chunk is at least one tile, and
each step has a fixed time. Under a tight TBT SLO the fixed time is most of what a step may take, or
more. A prompt in such steps breaks the SLO of all answers on its instance, or hardly advances.

So the mixed instances of a cluster become prefill and decode instances then, by their profiles,
before there is any demand: a change under load costs the answers under way. Only the Conductor
knows these separate roles. The instances accept both kinds of work and get no command.
`role_balance` moves them between the roles by the demand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.state import InstanceState
from moonpool.cost.model import CHUNKED_STEP_SHARE, LEAST_CHUNK_TOKENS
from moonpool.protocol.messages import InstanceInfo
from moonpool.types import Role

FIXED_SHARE = 0.25
"""Mixed instances have separate roles where the fixed time of a step is above this share of what
a step may take. The fixed time of the built-in A800 node is 19 ms, so its mixed instances are split
if the TBT SLO is below 0.09 s."""


def assign_roles(
    table: InstanceTable, mixed: Sequence[InstanceState], num_switching: int, tbt_slo_s: float
) -> bool:
    """Sets the roles of the instances that were started as mixed and do not drain. `num_switching`
    further ones drain in order to get another role. Returns whether mixed instances have separate
    roles."""
    enough = len(mixed) + num_switching >= 2
    if not mixed or not enough or not all(_is_tight(state.info, tbt_slo_s) for state in mixed):
        for state in mixed:
            _set_role(table, state, Role.MIXED)
        return False
    for state in mixed:
        if state.role is Role.MIXED:
            _set_role(table, state, _smaller_pool(table))
    if not table.num_prefills:
        # the next mixed instance takes the place of the last one
        _set_role(table, mixed[0], Role.PREFILL)
    elif not table.num_decodes:
        _set_role(table, mixed[0], Role.DECODE)
    return True


def _is_tight(info: InstanceInfo, tbt_slo_s: float) -> bool:
    """Whether decodes alone keep the SLO, but leave too little room for prompts. Uses the profile
    only, so that neither load nor learned factors change the result."""
    begin_s, s_per_token, *_ = info.cost.prefill
    empty_s, s_per_decode, _ = info.cost.decode
    limit_s, tile = CHUNKED_STEP_SHARE * tbt_slo_s, info.cost.tile_tokens
    if not info.chunk_tokens or empty_s + s_per_decode > limit_s:
        # the instance does not size chunks, or even one decode alone exceeds the limit
        return False
    # largest chunk beside one decode
    chunk_tokens = -(-(LEAST_CHUNK_TOKENS + 1) // tile) * tile - 1
    step_s = max(begin_s + s_per_token * chunk_tokens, empty_s) + s_per_decode
    return step_s > limit_s or begin_s > FIXED_SHARE * limit_s


def _smaller_pool(table: InstanceTable) -> Role:
    """Returns the role that fewer instances have. Instances that are still mixed do not count."""
    only_prefill = int(np.count_nonzero(table.prefills & ~table.decodes))
    only_decode = int(np.count_nonzero(table.decodes & ~table.prefills))
    return Role.PREFILL if only_prefill <= only_decode else Role.DECODE


def _set_role(table: InstanceTable, state: InstanceState, role: Role) -> None:
    if state.role is not role:
        state.role = role
        table.set_role(state.row, role.prefills, role.decodes)
