"""Computes the costs per token and the power of a plan's choice, and says how reliable these
figures are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import fsum, inf
from typing import Any

from moonpool.distributions import rounded
from moonpool.plan.assess import Assessment
from moonpool.plan.candidate import Candidate, Priced
from moonpool.plan.demand import Demand, Prepared
from moonpool.sim.hardware import calibrated
from moonpool.sim.report.notes import NO_HASHES

MILLION = 1e6


def costs_of(choice: Assessment | None, prepared: Prepared, priced: Priced) -> dict[str, Any]:
    """Returns the cost figures of the choice at the trace's load, or nothing without a choice.

    `usd_per_million_tokens` divides the price by `all` tokens of prompts and answers, by the tokens
    that must be `computed` because no cache could have them, and by the `output` tokens alone.
    """
    if choice is None:
        return {}
    demand = prepared.demand
    usd = 0.0 if demand.at_once else choice.usd_per_h * demand.duration_s / 3600.0
    prompt, output = fsum(demand.input_tokens), fsum(demand.output_tokens)
    counted = {
        "all": prompt + output,
        "computed": prompt - fsum(demand.hit_tokens) + output,
        "output": output,
    }
    watts = priced.power_w(choice.candidate)
    return {
        "usd_per_million_tokens": {
            name: rounded(usd / count * MILLION) if count and usd else None
            for name, count in counted.items()
        },
        "power_kw": rounded(watts / 1e3) if watts else None,
        "power_limit_kw": None if priced.max_power_w == inf else priced.max_power_w / 1e3,
        "notes": list(_notes(choice.candidate, prepared, priced)),
    }


def cost_lines(costs: Mapping[str, Any]) -> Iterator[str]:
    """Yields the cost figures as lines for a person."""
    if not costs:
        return
    usd = costs["usd_per_million_tokens"]
    if usd["all"] is not None:
        yield (
            f"a million tokens cost {usd['all']:.3g} USD, prompts and answers alike; shared out"
            f" over what must be computed {usd['computed']:.3g}, over answers alone"
            f" {usd['output']:.3g}"
        )
    if costs["power_kw"] is not None:
        yield f"its devices draw at most {costs['power_kw']:.3g} kW, by their data sheets"
    for note in costs["notes"]:
        yield f"note: {note}"


def _notes(chosen: Candidate, prepared: Prepared, priced: Priced) -> Iterator[str]:
    """Yields notes on where prices come from, and for which sizes step times were measured."""
    kinds = [chosen.kind, *([chosen.decode_kind] if chosen.decode else [])]
    names = [name for kind in kinds for name in (kind.device, kind.attention_device) if name]
    for name in dict.fromkeys(names):
        price = priced.prices.devices[name]
        when = f", {price.date}" if price.date else ""
        yield f"{name} costs {price.usd_per_h:g} USD/h ({price.source}{when})"
    yield from _domain(prepared.demand, prepared.base.hardware.cost)
    if not prepared.has_hashes:
        yield NO_HASHES


def _domain(demand: Demand, cost: str) -> Iterator[str]:
    if cost.endswith(".json"):
        yield f"step times are those of the profile {cost}"
        return
    if cost != calibrated.NAME:
        yield "step times are a roofline's of published peaks, not measured on these nodes"
        return
    low, high = calibrated.DOMAIN.prompt_tokens
    outside = fsum(n for n in demand.input_tokens if not low <= n <= high)
    share = outside / max(fsum(demand.input_tokens), 1.0)
    yield (
        f"step times were measured for prompts of {low:,.0f} to {high:,.0f} tokens; {share:.0%} of"
        " the trace's prompt tokens are in others, which a roofline prices"
    )
