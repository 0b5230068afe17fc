"""Says in sentences what the figures of a simulation leave out, for page and terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from moonpool.cost.domain import CostDomain

NO_HASHES = (
    "The trace has no block hashes, so it cannot show which prompts share a prefix: nothing is"
    " found in the cache, however much a real one would save."
)


def notes(figures: dict[str, Any]) -> list[str]:
    """Returns the notes on the figures of one simulation, which may be none."""
    found = [outside_domain(figures)]
    if not figures.get("trace_has_hashes", True):
        found.append(NO_HASHES)
    return [note for note in found if note]


def outside_domain(figures: dict[str, Any]) -> str:
    """Says how much of the run was outside the sizes that its costs were measured for. Returns ""
    if no part was outside, or if the costs were not measured."""
    domain = figures["cost_domain"]
    if not domain or not (domain["outside_prefill_share"] or domain["outside_decode_share"]):
        return ""
    name = Path(figures["config"]["hardware"]["cost"]).name
    measured = msgspec.convert(domain["measured"], CostDomain).describe()
    return (
        f"{name} was measured for {measured}; {domain['outside_prefill_share']:.0%} of computed"
        f" prompt tokens and {domain['outside_decode_share']:.0%} of generated ones lie outside,"
        f" where {domain['outside']} takes over."
    )
