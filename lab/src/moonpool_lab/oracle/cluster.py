"""The limits of a simulated cluster: its instances as resources, and the least work of requests.

The configuration decides which instances prefill and which decode. Decode instances may compute any
prompt, in chunks (`conductor.inline_chunks`), or only those of the Conductor's inline rule
(`conductor.inline_prefill`): prompts that fit into one step without breaking the TBT SLO. With
`role_balance = "switch"` every instance may do everything. If instances have different hardware,
the least time of any of them counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from moonpool.config.tables import Config, ConfigError
from moonpool.cost.model import CHUNKED_STEP_SHARE, SHARED_CHUNK_TOKENS
from moonpool.sim.hardware.build import Hardware, NodeHardware
from moonpool.sim.workload import Arrival
from moonpool.trace.row import MAX_LENGTH_TOKENS
from moonpool.types import Role
from moonpool_lab.oracle.bound import Resource, Work
from moonpool_lab.oracle.floors import CostFloor, floor_of
from moonpool_lab.oracle.least_work import LeastWork, Rates, least_work_of

DECODE_KINDS = ("decode pace", "decode memory", "decode seats")
INLINE_MARGIN = 1.25
"""The Conductor's corrections may make it predict a step time that is too short by this factor."""
LIMITED_BATCHING = ("chunked", "fixed-chunks", "alternating")
"""Batching policies whose steps have at most `engine.chunk_tokens` tokens."""


def limits_of(
    config: Config, hardware: Hardware, arrivals: Sequence[Arrival], noise: float = 0.0
) -> tuple[LeastWork, list[Resource]]:
    """Returns the least work of the requests, and the instances of the cluster as resources.

    `noise`: the same as in `Simulation`. Raises ConfigError for a cluster whose limits are not
    known.
    """
    if config.engine.speculative_config is not None:
        raise ConfigError(
            "there is no bound for instances that guess tokens: leave out"
            " engine.speculative_config, or compare simulations"
        )
    if any(arrival.after for arrival in arrivals):
        raise ConfigError(
            "there is no bound for calls of programs, which come when others have ended: give a"
            " trace of single requests"
        )
    if config.slo.classes:
        raise ConfigError("there is no bound for classes of service levels: leave out slo.classes")
    longest = max((a.input_tokens + a.output_tokens for a in arrivals), default=1)
    rates = _rates(config, hardware, longest, noise)
    demand = least_work_of(arrivals, rates)
    return demand, _resources(config, demand, rates.inline_tokens > 0)


def _rates(config: Config, hardware: Hardware, longest_tokens: int, noise: float) -> Rates:
    engine = config.engine
    step_tokens = engine.chunk_tokens
    if engine.batching not in LIMITED_BATCHING:
        step_tokens = max(step_tokens, longest_tokens)
    step_tokens += engine.max_sequences

    def floor(part: NodeHardware) -> CostFloor:
        found = floor_of(part.ground_truth, engine.max_sequences, step_tokens)
        return found.scaled(_least_factor(part, noise))

    roles = [role for role in Role if _count(config, role)]
    switches = config.conductor.role_balance == "switch"
    decoding = [r for r in roles if r.decodes or switches]
    decode = reduce(_faster, [floor(hardware.of_role(role)) for role in decoding])
    inline_tokens = _inline_tokens(config, decode, hardware.decode)
    prefilling = [r for r in roles if r.prefills or inline_tokens or switches]
    return Rates(
        prefill=reduce(_faster, [floor(hardware.of_role(role)) for role in prefilling]),
        decode=decode,
        slo=config.slo.usual,
        engine_tokens=max(hardware.of_role(role).engine_tokens for role in decoding),
        block_tokens=config.pool.block_tokens,
        caches=config.pool.prefix_caching,
        inline_tokens=inline_tokens,
        step_tokens=engine.chunk_tokens,
    )


def _inline_tokens(config: Config, floor: CostFloor, part: NodeHardware) -> int:
    """Returns the most tokens of a prompt that a decode instance may compute, by the Conductor's
    estimates."""
    rules = config.for_conductor()
    if not (rules.inline_prefill and config.cluster.decode):
        return 0
    if rules.inline_chunks and _takes_chunks(config, part):
        return MAX_LENGTH_TOKENS
    limit_s = INLINE_MARGIN * config.slo.usual.tbt_s
    low, high = 0, config.engine.chunk_tokens
    while low < high:
        middle = (low + high + 1) // 2
        prompt_s = min(floor.prefill_s(0.0, float(middle)), part.estimate.prefill_s(middle, 0))
        fits = prompt_s <= limit_s
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _takes_chunks(config: Config, part: NodeHardware) -> bool:
    """Whether the Conductor may find room for a chunk in a decode instance's steps."""
    step_s, s_per_token = part.estimate.decode[0], part.estimate.prefill[1]
    step_s += s_per_token * min(config.engine.chunk_tokens, SHARED_CHUNK_TOKENS)
    return step_s <= INLINE_MARGIN * CHUNKED_STEP_SHARE * config.slo.usual.tbt_s


def _least_factor(part: NodeHardware, noise: float) -> float:
    """Returns the least factor by which noise multiplies a step's time."""
    ratios = [ratio for ratios in part.decode_spread for ratio in ratios]
    return (1.0 - noise) * min(1.0, *part.contention) * min([1.0, *ratios])


def _faster(one: CostFloor, other: CostFloor) -> CostFloor:
    first, second = one.departure, other.departure
    return replace(
        one,
        departure=lambda num_tokens, cached: min(
            first(num_tokens, cached), second(num_tokens, cached)
        ),
        prompt_s=min(one.prompt_s, other.prompt_s),
        token_s=min(one.token_s, other.token_s),
        pair_s=min(one.pair_s, other.pair_s),
        alone_s=np.minimum(one.alone_s, other.alone_s),
        context_s=min(one.context_s, other.context_s),
        beside_sequence_s=min(one.beside_sequence_s, other.beside_sequence_s),
        num_stages=min(one.num_stages, other.num_stages),
    )


def _count(config: Config, role: Role) -> int:
    cluster = config.cluster
    counts = {Role.PREFILL: cluster.prefill, Role.DECODE: cluster.decode}
    return counts.get(role, cluster.mixed)


def _resources(config: Config, demand: LeastWork, inline: bool) -> list[Resource]:
    prefills, decodes, mixed = (_count(config, role) for role in Role)
    all_instances = prefills + decodes + mixed
    prefilling, decoding = prefills + mixed, decodes + mixed
    if config.conductor.role_balance == "switch":
        prefilling = decoding = all_instances
    arrived_s, prefill_until_s = demand.arrived_s, demand.prefill_until_s
    spans = demand.node_from_s, demand.node_until_s
    resources = [
        Resource(
            "prefill",
            prefilling,
            (Work(demand.pool_prefill_s, arrived_s, prefill_until_s),),
            (Work(demand.pool_node_s, *spans),),
        )
    ]
    for name, work_s in zip(DECODE_KINDS, demand.decode_s, strict=True):
        work = Work(work_s, arrived_s, demand.decode_until_s)
        resources.append(Resource(name, decoding, (work,)))
    if inline or mixed or prefilling == decoding:
        prefill = Work(demand.prefill_s, arrived_s, prefill_until_s)
        beside = Work(demand.beside_s, arrived_s, demand.decode_until_s)
        nodes = Work(demand.node_s, *spans)
        resources.append(Resource("all steps", all_instances, (prefill, beside), (nodes,)))
    return resources
