"""Describes requests, instances and hot prefixes as plain JSON values, for the HTTP endpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

from moonpool import __version__
from moonpool.conductor.conductor import Conductor, PoolLoads
from moonpool.conductor.forecast.cost_estimator import learned_factors
from moonpool.conductor.roles.role_balance import Pools
from moonpool.conductor.state import InstanceState
from moonpool.config.tables import Config
from moonpool.request_record import RequestRecord
from moonpool.types import BlockKey, Slo, payer_of

_NO_INSTANTS = (
    "arrived_s",
    "expected_ttft_s",
    "gap_runs",
    "kept_tbt_top10_mean_s",
    "predicted_tbt_s",
    "predicted_ttft_s",
    "prefills_took_s",
    "wasted_prefills_took_s",
)


def stage_of(record: RequestRecord | None) -> str:
    """Returns what a request does now, in a few words, or "" if it is not placed yet."""
    if record is None or record.placed_s is None:
        return ""
    if record.prefill_started_s is None:
        return "queue"
    if record.prefill_done_s is None:
        tokens = f"{record.num_prompt_tokens} tokens, {record.cached_tokens} of them cached"
        return f"prefill of {tokens}"
    return "handover" if record.first_token_s is None else "decode"


def describe_head(
    up_s: float, restarts: int, upgrades: int, upgrade_error: str | None, epoch: int
) -> dict[str, Any]:
    """Describes this process, which has run for `up_s` and follows earlier heads."""
    return {
        "pid": os.getpid(),
        "up_s": round(up_s, 1),
        "restarts": restarts,
        "upgrades": upgrades,
        "upgrade_error": upgrade_error,
        "release": __version__,
        "epoch": epoch,
    }


def describe_record(record: RequestRecord, explanation: tuple[str, ...]) -> dict[str, Any]:
    """Describes a request: its placement with the reasons, and the time of each stage."""
    since_arrival_s = {
        name.removesuffix("_s"): round(value - record.arrived_s, 6)
        for name in record.__slots__
        if name.endswith("_s")
        and name not in _NO_INSTANTS
        and (value := getattr(record, name)) is not None
    }
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "program": record.program or None,
        "parent_program": record.parent_program or None,
        "slo_class": record.slo.class_name or None,
        "outcome": record.outcome or "running",
        "attempts": record.attempts,
        "prefill_instance": record.prefill_instance,
        "decode_instance": record.decode_instance,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "fetched_tokens": record.fetched_tokens,
        "loaded_tokens": record.loaded_tokens,
        "corrupt_slices": record.corrupt_slices,
        "generated_tokens": record.answer_tokens,
        "slo": describe_slo(record.slo),
        "predicted": {"ttft_s": record.expected_ttft_s, "tbt_s": record.predicted_tbt_s},
        "refused_by": record.projection,
        "observed": {
            "ttft_s": record.ttft_s,
            "tpot_s": record.tpot_s,
            "tbt_top10_mean_s": record.tbt_top10_mean_s,
        },
        "since_arrival_s": since_arrival_s,
        "stages_s": record.stages_s(),
        "why": list(explanation),
    }


def describe_slo(slo: Slo) -> dict[str, Any]:
    """Describes the SLOs, and says which of them are assumed: no request is refused for an assumed
    SLO."""
    return {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s, "assumed": list(slo.assumed)}


def describe_programs(conductor: Conductor) -> dict[str, int]:
    """Counts the programs (agents) by state: a call is under way, a tool runs, blocks leave DRAM
    first because the pause is long, or a new program waits."""
    programs = conductor.programs
    running, parked = programs.num_running, programs.num_parked
    waiting = conductor.num_programs_waiting
    return {
        "running": max(running - waiting, 0),
        "paused": len(programs) - running - parked,
        "parked": parked,
        "waiting": waiting,
        "ended": programs.num_ended,
    }


def describe_cluster(conductor: Conductor, now: float) -> dict[str, Any]:
    """Describes the instances with their pools and reservations, and the cluster's totals."""
    instances = [
        _describe_instance(conductor, state, now) for state in conductor.instances.values()
    ]
    return {
        "instances": instances,
        "slo": describe_slo(conductor.default_slo),
        "lack": conductor.lack or None,
        "answers_paused": conductor.num_pauses,
        "programs": describe_programs(conductor),
        "requests_under_way": len(conductor.requests),
        "requests_waiting": conductor.num_waiting,
        "indexed_blocks": len(conductor.index),
        "role_balance": _describe_roles(conductor, now),
        "drains": {
            "left": conductor.drains.num_left,
            "handed_over_blocks": conductor.drains.num_handed_blocks,
        },
        "predictions": {
            name: error.summary() for name, error in conductor.cost_estimator.errors.items()
        },
        "longest_gaps_over_mean": conductor.instance_table.tbt_tail,
        "late_ttft_over_predicted": conductor.instance_table.ttft_tail,
    }


def describe_server(config: Config) -> dict[str, Any]:
    """Describes the configuration without its secrets, and which service levels are assumed."""
    tables = msgspec.to_builtins(config)
    tables["api"]["api_keys"] = len(config.api.api_keys)
    tables["vllm"] |= {role: len(places) for role, places in config.vllm.places.items()}
    slo = config.slo.usual
    tables["slo"] = {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s}
    return {"config": tables, "assumed_slos": list(slo.assumed)}


def describe_to_tenant(conductor: Conductor, tenant: str) -> dict[str, Any]:
    """Describes what a tenant may know: which instances there are, and its own requests."""
    own = [
        tracked
        for tracked in conductor.requests.values()
        if payer_of(tracked.request.tenant) == tenant
    ]
    return {
        "instances": [named_instance(state) for state in conductor.instances.values()],
        "requests_under_way": len(own),
        "requests_waiting": sum(tracked.attempt is None for tracked in own),
    }


def named_instance(state: InstanceState) -> dict[str, Any]:
    """Describes what every client may know of an instance."""
    return {
        "instance_id": state.info.instance_id,
        "role": state.role.value,
        "draining": None if state.drain is None else state.drain.reason,
    }


def _describe_roles(conductor: Conductor, now: float) -> dict[str, Any]:
    """Describes the role balance: the load of both pools, its advice and its switches."""
    report, instance_table = conductor.roles.report(now), conductor.instance_table
    advice = report.advice
    return {
        "mode": report.mode,
        "load": None if report.mode == "off" else finite_loads(report.loads),
        "advice": None
        if advice is None
        else advice.describe(instance_table.num_prefills, instance_table.num_decodes),
        "switches": {role.value: number for role, number in report.num_switches.items()},
        "given_up": report.num_given_up,
    }


def finite_loads(loads: Pools | PoolLoads) -> dict[str, float | None]:
    """Returns the loads by pool, or None for a pool without instances."""
    return {
        name: round(load, 4) if isfinite(load) else None for name, load in loads._asdict().items()
    }


def _describe_instance(conductor: Conductor, state: InstanceState, now: float) -> dict[str, Any]:
    info, load = state.info, state.load
    described = named_instance(state) | {
        "handed_over_blocks": conductor.drains.num_handed(info.instance_id),
        "host": info.host,
        "pid": info.pid,
        "stages": info.num_stages,
        "ranks": info.num_ranks,
        "incarnation": str(info.incarnation),
        "address": f"{info.address.tcp_host}:{info.address.tcp_port}",
        "queued_prefills": len(state.prefills),
        "queue_s": round(float(conductor.instance_table.queue_s(now)[state.row]), 4),
        "booked_decodes": len(state.decodes),
        "serving_fetches": len(state.serving),
        "indexed_blocks": conductor.index.num_blocks(info.instance_id),
        "pool": {
            "dtype": info.layout.dtype,
            "arithmetic": info.layout.arithmetic,
            "block_tokens": info.layout.block_tokens,
            "block_bytes": info.layout.block_bytes,
            "blocks": info.num_blocks,
            "promised": info.num_blocks,
        },
        "cost": msgspec.to_builtins(info.cost),
        "learned": learned_factors(state),
    }
    if load is not None:
        described["pool"] |= {
            "blocks": load.num_blocks,
            "held": load.held_blocks,
            "available": load.free_blocks,
            "cached": load.cached_blocks,
            "owners": load.owners,
        }
        if load.ssd is not None:
            described["ssd"] = msgspec.to_builtins(load.ssd)
        if load.cache_view is not None:
            described["cache_view"] = msgspec.to_builtins(load.cache_view)
        described["running"] = load.num_running
        described["waiting"] = load.num_waiting
        described["counters"] = load.counters
    return described


MAX_LISTED_BLOCKS = 16_384
"""The most blocks that one instance may list for `/cluster/hot`."""


@dataclass(slots=True)
class _Prefix:
    num_uses: int
    num_tokens: int
    num_bytes: int


def describe_hot(conductors: Sequence[Conductor], num_prefixes: int) -> list[dict[str, Any]]:
    """Describes the most used prefixes of all models first.

    Uses are summed over the instances that list the prefix. The index tells where the prefix's last
    block is.
    """
    found = [(p, c, key) for c in conductors for key, p in _hot_prefixes(c).items()]
    found.sort(key=lambda item: (-item[0].num_uses, -item[0].num_tokens))
    return [_describe(conductor, key, prefix) for prefix, conductor, key in found[:num_prefixes]]


def _hot_prefixes(conductor: Conductor) -> dict[BlockKey, _Prefix]:
    found: dict[BlockKey, _Prefix] = {}
    for state in conductor.instances.values():
        if state.hot is None:
            continue
        layout = state.info.layout
        for prefix in state.hot.prefixes:
            size = len(prefix.keys)
            one = found.setdefault(
                prefix.keys[-1],
                _Prefix(0, size * layout.block_tokens, size * layout.block_bytes),
            )
            one.num_uses += prefix.num_uses
    return found


def _describe(conductor: Conductor, key: BlockKey, prefix: _Prefix) -> dict[str, Any]:
    holders = conductor.index.holders_of(key)
    return {
        "name": spoken_name(key),
        "key": key.hex(),
        "tokens": prefix.num_tokens,
        "bytes": prefix.num_bytes,
        "hits": prefix.num_uses,
        "replicas": len(holders),
        "dram": [name for name, on_ssd in holders if not on_ssd],
        "ssd": [name for name, on_ssd in holders if on_ssd],
    }


_KINDS_TEXT = (
    "amber ashen azure bold brave brief bright brisk broad calm clear coral crisp dark deep "
    "dense dry dusky early even fair far fine firm fleet fond free fresh full gentle gilt "
    "glad golden grand green grey hardy high hollow humble inner ivory keen kind late lean "
    "light live lone long loud low lucid lunar merry mild misty near noble north olive open "
    "outer pale"
)
_THINGS_TEXT = (
    "anchor arch bay beacon birch boat brook buoy canal cape cedar cliff cloud coast cove "
    "crane creek dale delta dock dune eagle elm falcon fern field fjord ford forest gale "
    "geyser glen grove gull harbor haven heron hill inlet isle jetty keel kelp lagoon lake "
    "lark ledge lily marsh meadow mesa mill moor moss oak otter pearl pier pine pond port "
    "quay reef rill"
)
SPOKEN_KINDS, SPOKEN_THINGS = _KINDS_TEXT.split(), _THINGS_TEXT.split()


def spoken_name(key: bytes) -> str:
    """Returns a name such as "calm-otter-17" for a hash: equal hashes get equal names, of which
    there are 409,600. Raises ValueError for fewer than four bytes."""
    if len(key) < 4:
        raise ValueError(f"a name needs four bytes, not {len(key)}")
    number = int.from_bytes(key[:4], "big")
    number, kind = divmod(number, len(SPOKEN_KINDS))
    number, thing = divmod(number, len(SPOKEN_THINGS))
    return f"{SPOKEN_KINDS[kind]}-{SPOKEN_THINGS[thing]}-{number % 100}"
