"""Gathers the figures of a run, named as in `simulate --json` and `replay --json`."""

from __future__ import annotations

from typing import Any

import msgspec

from moonpool.conductor.forecast.cost_estimator import learned_factors
from moonpool.config.tables import Config
from moonpool.distributions import rounded
from moonpool.sim.metrics import Collector
from moonpool.sim.sim_instance import SimInstance
from moonpool.sim.simulation import Simulation
from moonpool.types import Role


def summarise(simulation: Simulation, wall_s: float) -> dict[str, Any]:
    """Returns all figures of a simulation, which depend on trace, configuration and seed.

    Only `wall_s` also depends on the machine.
    """
    found = simulation.collector
    simulated_s = max(simulation.last_end_s, 1e-9)
    # If all requests arrive at the same time, goodput is measured over the whole run.
    arriving_s = simulation.last_arrival_s or simulated_s
    nodes = [*simulation.past_nodes, *simulation.nodes.values()]
    has_programs = len(simulation.clients.figures) > 0
    return {
        **request_figures(found, arriving_s),
        **({"programs": simulation.clients.figures.summary()} if has_programs else {}),
        "predictions": {
            name: {key: rounded(value) for key, value in error.summary().items()}
            for name, error in simulation.conductor.cost_estimator.errors.items()
        },
        "learned": _learned(simulation),
        "transfer": _transfers(nodes),
        "ssd": _ssd(nodes),
        "utilisation": {
            role.value: rounded(_utilisation(nodes, role))
            for role in Role
            if any(role in node.role_s for node in nodes)
        },
        "roles": _roles(simulation),
        "instance_hours": _instance_hours(simulation, nodes),
        "scaling": _scaling(simulation),
        "drains": {
            "left": simulation.conductor.drains.num_left,
            "handed_over_blocks": simulation.conductor.drains.num_handed_blocks,
        },
        **_replicated(simulation),
        "bubbles": _bubbles(nodes, simulated_s),
        "kvcache_occupation_byte_s": _occupation(nodes, simulation.hardware.layout.block_bytes),
        "cost_domain": _cost_domain(simulation, nodes),
        **_speculation(simulation.config, nodes),
        "preemptions": int(sum(n.instance.counters.get("preemptions", 0) for n in nodes)),
        "simulated_s": rounded(simulated_s, 9),
        "wall_s": round(wall_s, 3),
        "events": simulation.clock.num_run,
        "seed": simulation.seed,
        "config": _without_secrets(simulation.config),
    }


def request_figures(found: Collector, arriving_s: float) -> dict[str, Any]:
    """Returns the figures that follow from the requests alone, simulated or live.

    `arriving_s` is the time of the last arrival.
    """
    return {
        "requests": found.num_requests,
        "completed": found.num_completed,
        "rejected": sum(found.rejected.values()),
        "rejected_by_reason": dict(sorted(found.rejected.items())),
        "failed": found.num_failed,
        "effective": found.num_effective,
        "effective_share": rounded(found.num_effective / max(found.num_requests, 1)),
        "goodput_rps": rounded(found.num_effective / arriving_s),
        "ttft_s": found.ttft_s.summary(),
        "tbt_s": found.gap_s.summary(),
        "tbt_top10_mean_s": found.tbt_top10_mean_s.summary(),
        "cache": {
            "input_tokens": found.input_tokens,
            "hit_tokens": found.hit_tokens,
            "fetched_tokens": found.fetched_tokens,
            "loaded_tokens": found.loaded_tokens,
            "hit_ratio": rounded(found.hit_tokens / max(found.input_tokens, 1)),
        },
        "output_tokens": found.output_tokens,
        "prefill_compute_s": {"mean": rounded(found.prefill_compute_s.mean)},
        "wasted_prefill_s": rounded(found.wasted_prefill_s),
        "wasted_prefills": found.num_wasted,
        "stages_s": {
            stage: rounded(seconds / max(found.num_completed, 1))
            for stage, seconds in found.stages_s.items()
        },
        "predicted_ttft_error_s": {
            "mean_absolute": rounded(found.ttft_error_s.mean),
            "bias": rounded(found.ttft_bias_s / max(found.ttft_error_s.count, 1)),
        },
        **_tenants(found),
        **slo_class_figures(found),
    }


def _tenants(found: Collector) -> dict[str, Any]:
    """Returns the figures of each tenant, if the trace names tenants."""
    tenants = found.tenants()
    return (
        {"tenants": {name: tenants[name].summary() for name in sorted(tenants)}} if tenants else {}
    )


def slo_class_figures(found: Collector) -> dict[str, Any]:
    """Returns the figures of each class of service levels, if requests name a class."""
    classes = found.slo_classes
    return {"slo_classes": {n: classes[n].summary() for n in sorted(classes)}} if classes else {}


def _replicated(simulation: Simulation) -> dict[str, int]:
    """Returns the blocks that were copied ahead of requests, if the Conductor replicates."""
    replication = simulation.conductor.replication
    return {} if replication is None else {"replicated_blocks": replication.num_blocks}


def _learned(simulation: Simulation) -> dict[str, Any]:
    """Returns the final correction factors of the Conductor's cost estimates, over instances."""
    factors: dict[str, list[float]] = {"prefill": [], "decode": [], "transfer": []}
    for state in simulation.conductor.instances.values():
        learned, role = learned_factors(state), state.info.role
        for kind in ("prefill", "transfer") if role.prefills else ():
            factors[kind].append(learned[kind])
        if role.decodes:
            factors["decode"].append(learned["decode"])
    return {
        kind: {
            "least": rounded(min(values)),
            "most": rounded(max(values)),
            "changed": sum(value != 1.0 for value in values),
        }
        for kind, values in factors.items()
    }


def _cost_domain(simulation: Simulation, nodes: list[SimInstance]) -> dict[str, Any] | None:
    """Returns the sizes for which the cost was measured, and how many tokens of this run were
    outside these sizes, or None if the cost was not measured."""
    domain = simulation.hardware.prefill.domain
    if domain is None:
        return None
    figures = [node.engine.figures for node in nodes]
    prefill = sum(each.outside_prefill_tokens for each in figures)
    decode = sum(each.outside_decode_tokens for each in figures)
    all_prefill = sum(each.prefill_tokens for each in figures)
    all_decode = sum(each.decode_tokens for each in figures)
    return {
        "measured": msgspec.to_builtins(domain),
        "outside_prefill_share": rounded(prefill / max(all_prefill, 1)),
        "outside_decode_share": rounded(decode / max(all_decode, 1)),
        "outside": simulation.hardware.prefill.outside_domain,
    }


def _without_secrets(config: Config) -> dict[str, Any]:
    tables: dict[str, Any] = msgspec.to_builtins(config)
    tables["api"]["api_keys"] = len(config.api.api_keys)
    tables["slo"]["classes"] = list(tables["slo"]["classes"])  # a list, as in a file's tables
    return tables


def _speculation(config: Config, nodes: list[SimInstance]) -> dict[str, Any]:
    """Returns the numbers of drafts and of accepted drafts, if the instances speculate."""
    if config.engine.speculative_config is None:
        return {}

    def count(name: str) -> int:
        return int(sum(node.instance.counters.get(name, 0) for node in nodes))

    drafting_s = sum(node.engine.figures.drafting_s for node in nodes)
    return {
        "speculation": {
            "drafts": count("drafts"),
            "draft_tokens": count("draft_tokens"),
            "accepted_draft_tokens": count("accepted_draft_tokens"),
            "drafting_s": rounded(drafting_s),
        }
    }


def _transfers(nodes: list[SimInstance]) -> dict[str, Any]:
    figures = [node.messenger.figures for node in nodes]
    return {
        "bytes": sum(f.num_bytes for f in figures),
        "seconds": rounded(sum(f.seconds for f in figures)),
        "fetches": sum(f.num_fetches for f in figures),
        "fetched_bytes": sum(f.fetched_bytes for f in figures),
        "streams": sum(f.num_streams for f in figures),
    }


def _ssd(nodes: list[SimInstance]) -> dict[str, Any]:
    """Returns the figures of the SSD tier, all 0 without an SSD.

    Dropped blocks were evicted before they could be written. Refused blocks were not admitted or
    found no slot. Spared blocks were on the SSD already. Prefetched blocks were loaded ahead of a
    request. They are used by a request, wasted if they leave DRAM unused, or still waiting.
    """
    figures = [node.messenger.figures for node in nodes]

    def count(name: str) -> int:
        return int(sum(node.instance.counters.get(name, 0) for node in nodes))

    tiers = [node.instance.tier for node in nodes]
    return {
        "written_bytes": sum(f.stored_bytes for f in figures),
        "read_bytes": sum(f.loaded_bytes for f in figures),
        "write_s": {"mean": rounded(_mean([(f.storing_s, f.num_stores) for f in figures]))},
        "read_s": {"mean": rounded(_mean([(f.loading_s, f.num_loads) for f in figures]))},
        "demoted_blocks": count("stored_blocks"),
        "promoted_blocks": count("loaded_blocks"),
        "spared_blocks": count("spared_writes"),
        "refused_blocks": count("refused_blocks"),
        "dropped_blocks": count("dropped_blocks"),
        "prefetched_blocks": count("prefetched_blocks"),
        "used_prefetched_blocks": count("used_prefetched_blocks"),
        "wasted_prefetched_blocks": count("wasted_prefetched_blocks"),
        "blocks": sum(tier.slots.num_cached for tier in tiers if tier is not None),
        "slots": sum(tier.slots.num_blocks for tier in tiers if tier is not None),
    }


def _mean(sums: list[tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in sums) / max(sum(number for _, number in sums), 1)


def _utilisation(nodes: list[SimInstance], role: Role) -> float:
    """Returns the share of the time until the last answer in which a role's engines computed."""
    span_s = sum(node.role_s.get(role, 0.0) for node in nodes)
    return sum(node.busy_s.get(role, 0.0) for node in nodes) / max(span_s, 1e-9)


def _roles(simulation: Simulation) -> dict[str, Any]:
    """Returns the role changes by the role balance, and its announcements."""
    switching = simulation.conductor.roles
    return {
        "mode": switching.mode,
        "switches": sum(switching.num_switches.values()),
        "switches_to": {role.value: n for role, n in sorted(switching.num_switches.items())},
        "given_up": switching.num_given_up,
        "announced": [[rounded(at_s, 3), text] for at_s, text in simulation.announced],
    }


def _instance_hours(simulation: Simulation, nodes: list[SimInstance]) -> dict[str, float]:
    """Returns the hours of instances by role, from their start (before boot) to their end."""
    hours: dict[str, float] = {}
    for role in Role:
        seconds = sum(node.role_s.get(role, 0.0) for node in nodes)
        seconds += simulation.scaling.num_boots[role] * simulation.settings.boot_s
        if seconds:
            hours[role.value] = rounded(seconds / 3600.0)
    return hours


def _scaling(simulation: Simulation) -> dict[str, Any]:
    """Returns the numbers of instances that autoscale wanted, as (seconds, prefill, decode), and
    how many instances it started and ended."""
    scaling = simulation.scaling
    return {
        "wanted": [
            [rounded(at_s, 3), prefill, decode] for at_s, prefill, decode in simulation.wanted
        ],
        "boots": scaling.num_boots.total(),
        "drains": scaling.num_drains.total(),
    }


def _bubbles(nodes: list[SimInstance], span_s: float) -> dict[str, Any]:
    """Returns number and mean of idle times between steps, and their share of instance time."""
    figures = [node.engine.figures for node in nodes]
    idle_s = sum(f.bubble_s for f in figures)
    number = sum(f.num_bubbles for f in figures)
    return {
        "count": number,
        "mean_s": rounded(idle_s / max(number, 1)),
        "share": rounded(idle_s / max(len(nodes) * span_s, 1e-9)),
    }


def _occupation(nodes: list[SimInstance], block_bytes: int) -> dict[str, float]:
    """Returns the KVCache occupation in bytes x seconds, by role (Mooncake v3 section 5.2)."""
    total: dict[str, float] = {}
    for node in nodes:
        for role, block_s in node.held_block_s.items():
            total[role.value] = total.get(role.value, 0.0) + block_s * block_bytes
    return {role: rounded(byte_s) for role, byte_s in total.items()}
