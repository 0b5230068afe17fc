"""Mooncake's inline rule: which prompts a decode instance computes itself, within its batch.

"A prefill is put into a decode batch only if it needs no chunking and does not break the TBT SLO;
otherwise it goes to the separate pool" (v3 section 5). What is cached there needs no computing, so
the next turn of a conversation often qualifies where its last answer lies. Pure; books nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moonpool.conductor.fleet import Bools, Fleet, Floats
from moonpool.conductor.policies import Demand


class Inline(NamedTuple):
    """A decode instance's row, and what is predicted there."""

    row: int
    prefill_s: float
    ttft_s: float


def best_inline(
    demand: Demand,
    fleet: Fleet,
    able: Bools,
    hit_tokens: Floats,
    queue_s: Floats,
    separate_ttft_s: float,
) -> Inline | None:
    """The decode instance that gives the first token soonest by the rule, if that is before
    the prefill pool would: in an idle cluster the pools stay apart. `able`: has room, may be taken.

    All prompts that are booked inline and have not ended go into one step with this one: they must
    fit the SLO together. The instance sizes its chunks by the SLO anyway (`workers.pace`), so a
    wrong estimate here delays the prompt, and not those that decode.
    """
    new = demand.num_tokens - hit_tokens
    rows = (able & ~fleet.prefills & (new <= fleet.chunk_tokens)).nonzero()[0]
    if not len(rows):
        return None
    batch, context = fleet.booked_batch[rows], fleet.booked_context[rows]
    prefill_s = fleet.prefill_s(demand.num_tokens, hit_tokens)[rows]
    decodes_s = fleet.f[rows] * batch + fleet.g[rows] * context
    step_s = np.maximum(fleet.e[rows], queue_s[rows] + prefill_s) + decodes_s
    # A step is under way when the prompt comes, unless nobody decodes.
    under_way_s = np.where(batch > 0, fleet.e[rows] + decodes_s, 0.0)
    ttft_s = under_way_s + step_s
    fits = step_s <= demand.tbt_s
    fits &= context + demand.num_tokens <= fleet.engine_tokens[rows]
    fits &= ttft_s < separate_ttft_s
    if not np.count_nonzero(fits):
        return None
    best = int(np.where(fits, ttft_s, np.inf).argmin())
    return Inline(int(rows[best]), prefill_s.item(best), ttft_s.item(best))
