"""Converts records of ended requests and counters of instances to metrics."""

from __future__ import annotations

from moonpool.api.metrics import Prediction, ServerMetrics
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.cost_estimator import learned_factors
from moonpool.conductor.state import AttemptStage
from moonpool.protocol.messages import InstanceInfo, InstanceLoad
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, InstanceId

_ANSWERED = (FinishReason.STOP.value, FinishReason.LENGTH.value)
PREFETCH_COUNTERS = {
    "loaded": "prefetched_blocks",
    "used": "used_prefetched_blocks",
    "wasted": "wasted_prefetched_blocks",
}


class MetricsCollector:
    """Fills one `ServerMetrics`."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last: dict[InstanceId, tuple[int, dict[str, float]]] = {}

    def request_ended(self, record: RequestRecord, now: float) -> None:
        metrics = self._metrics
        if record.first_token_s is not None:
            metrics.observe_first_token(record.first_token_s - record.arrived_s)
            metrics.observe_prompt(record.num_prompt_tokens, record.cached_tokens)
            metrics.observe_tokens(record.num_generated_tokens, record.gaps_s)
        answered = record.outcome in _ANSWERED
        if record.prefill_started_s is not None:
            ends_s = record.prefill_done_s or record.finished_s
            assert ends_s is not None
            spent_s = max(ends_s - record.prefill_started_s, 0.0)
            metrics.observe_prefill(spent_s, record.fetched_tokens, wasted=not answered)
        if answered:
            assert record.finished_s is not None
            metrics.observe_finished(
                record.outcome,
                e2e_s=record.finished_s - record.arrived_s,
                generation_tokens=record.num_generated_tokens,
                tpot_s=record.tpot_s,
                stages_s=record.stages_s(),
                phases_s=_phases_s(record),
                max_tokens=record.max_tokens,
            )
        elif record.prefill_started_s is None and record.outcome != FinishReason.ABORT:
            metrics.observe_rejected(record.outcome)
        else:
            metrics.observe_failed(record.outcome)

    def instance_load(self, info: InstanceInfo, load: InstanceLoad) -> None:
        """Adds the growth of an instance's counters, which are totals of one incarnation."""
        instance_id, incarnation = info.instance_id, info.incarnation
        life, before = self._last.get(instance_id, (incarnation, {}))
        if life != incarnation:
            before = {}
        self._last[instance_id] = (incarnation, load.counters)

        def grown(name: str) -> float:
            return load.counters.get(name, 0.0) - before.get(name, 0.0)

        def new(name: str) -> int:
            return int(grown(name))

        self._metrics.add_step_seconds(info.role.value, grown("step_s"))
        self._metrics.add_corrupt_slices(new("corrupt_slices"))
        self._metrics.add_recomputed_tokens(new("recomputed_tokens"))
        self._metrics.add_drafts(new("drafts"), new("draft_tokens"), new("accepted_draft_tokens"))
        for transport in ("shm", "tcp", "tls", "nixl"):
            num_bytes = new(f"{transport}_received_bytes")
            if num_bytes:
                self._metrics.add_transfer(transport, num_bytes)

        for direction, verb in (("written", "write"), ("read", "read")):
            num_bytes = new(f"ssd_{direction}_bytes")
            if num_bytes:
                self._metrics.add_ssd(direction, num_bytes, grown(f"ssd_{verb}_seconds"))
        for state, name in PREFETCH_COUNTERS.items():
            self._metrics.add_prefetched(state, new(name))
        self._metrics.add_ssd_failures(new("ssd_failed_operations"))

    def instance_lost(self, instance_id: InstanceId) -> None:
        """Forgets an instance: its next incarnation counts from zero."""
        self._last.pop(instance_id, None)

    def gauges(self, conductor: Conductor, now: float) -> None:
        attempts = [t.attempt for t in conductor.requests.values() if t.attempt is not None]
        waiting = sum(a.stage is AttemptStage.PREFILL and a.started_s is None for a in attempts)
        loads = [s.load for s in conductor.instances.values() if s.load is not None]
        running, waiting = len(attempts) - waiting, waiting + conductor.num_waiting
        held = sum(load.held_blocks for load in loads)
        blocks = sum(s.info.num_blocks for s in conductor.instances.values())
        self._metrics.set_load(running, waiting, held / blocks if blocks else 0.0)
        layouts = [s.info.layout for s in conductor.instances.values()]
        self._metrics.set_cache(layouts[0].block_tokens if layouts else 0, blocks)
        tiers = [load.ssd for load in loads if load.ssd is not None]
        self._metrics.set_tiers(
            {"dram": blocks, "ssd": sum(tier.blocks for tier in tiers if not tier.error)},
            {
                "dram": sum(load.cached_blocks for load in loads),
                "ssd": sum(tier.cached for tier in tiers),
            },
        )
        roles: dict[str, int] = {}
        for state in conductor.instances.values():
            roles[state.role.value] = roles.get(state.role.value, 0) + 1
        self._metrics.set_instances(roles)
        self._metrics.set_pool_loads(conductor.loads(now)._asdict() if roles else {})
        balance = conductor.roles.report(now)
        advice = balance.advice
        self._metrics.set_role_balance(
            loads={} if balance.mode == "off" else balance.loads._asdict(),
            advised={} if advice is None else {advice.role.value: advice.num_switches},
            switches={role.value: number for role, number in balance.num_switches.items()},
            given_up=balance.num_given_up,
            wanted=_wanted(conductor),
            draining=sum(s.drain is not None for s in conductor.instances.values()),
        )
        self._cost_estimator(conductor)

    def _cost_estimator(self, conductor: Conductor) -> None:
        self._metrics.set_predictions(
            {
                name: Prediction(
                    error.count,
                    error.too_much,
                    error.too_little,
                    error.ratio(0.5),
                    error.ratio(0.9),
                )
                for name, error in conductor.cost_estimator.errors.items()
            }
        )
        by_instance = {i: learned_factors(state) for i, state in conductor.instances.items()}
        kinds = next(iter(by_instance.values()), {})
        self._metrics.set_learned(
            {kind: {i: each[kind] for i, each in by_instance.items()} for kind in kinds}
        )


def _wanted(conductor: Conductor) -> dict[str, int]:
    autoscale = conductor.roles.autoscale
    wanted = None if autoscale is None else autoscale.wanted
    return {} if wanted is None else {"prefill": wanted.prefill, "decode": wanted.decode}


def _phases_s(record: RequestRecord) -> tuple[float, float, float] | None:
    """Returns the seconds before prefill, in prefill, and from the first token on."""
    began_s, first_s, ended_s = record.prefill_started_s, record.first_token_s, record.finished_s
    if began_s is None or first_s is None or ended_s is None:
        return None
    queue_s, prefill_s = began_s - record.arrived_s, first_s - began_s
    return max(queue_s, 0.0), max(prefill_s, 0.0), max(ended_s - first_s, 0.0)
