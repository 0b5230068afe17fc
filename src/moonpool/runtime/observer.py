"""Turns what the head sees into metrics: records of ended requests, and counters of instances."""

from __future__ import annotations

from moonpool.api.metrics import ServerMetrics
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.state import Stage
from moonpool.metrics import RequestRecord
from moonpool.types import FinishReason, InstanceId
from moonpool.workers.messages import InstanceLoad

_ANSWERED = (FinishReason.STOP.value, FinishReason.LENGTH.value)


class Observer:
    """Feeds one `ServerMetrics`."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._last: dict[InstanceId, tuple[int, dict[str, float]]] = {}

    def request_ended(self, record: RequestRecord) -> None:
        metrics = self._metrics
        if record.first_token_s is not None:
            metrics.observe_first_token(record.first_token_s - record.arrived_s)
            metrics.observe_prompt(record.num_prompt_tokens, record.cached_tokens)
            metrics.observe_tokens(record.num_generated_tokens, record.gaps_s)
        if record.outcome in _ANSWERED:
            assert record.finished_s is not None
            metrics.observe_finished(
                record.outcome,
                e2e_s=record.finished_s - record.arrived_s,
                generation_tokens=record.num_generated_tokens,
                tpot_s=record.tpot_s,
                stages_s=record.stages_s(),
            )
        elif record.prefill_started_s is None and record.outcome != FinishReason.ABORT:
            metrics.observe_rejected(record.outcome)
        else:
            metrics.observe_failed(record.outcome)

    def instance_load(self, instance_id: InstanceId, incarnation: int, load: InstanceLoad) -> None:
        """Counters are totals of one life of the instance; metrics want what came since."""
        life, before = self._last.get(instance_id, (incarnation, {}))
        if life != incarnation:
            before = {}
        self._last[instance_id] = (incarnation, load.counters)

        def new(name: str) -> int:
            return int(load.counters.get(name, 0) - before.get(name, 0))

        self._metrics.add_corrupt_slices(new("corrupt_slices") + new("corrupt_blocks"))
        self._metrics.add_recomputed_tokens(new("recomputed_tokens"))
        for transport in ("shm", "tcp"):
            num_bytes = new(f"{transport}_received_bytes")
            if num_bytes:
                self._metrics.add_transfer(transport, num_bytes)

    def instance_lost(self, instance_id: InstanceId) -> None:
        """Its next life counts from zero."""
        self._last.pop(instance_id, None)

    def gauges(self, conductor: Conductor) -> None:
        attempts = [t.attempt for t in conductor.requests.values() if t.attempt is not None]
        waiting = sum(a.stage is Stage.PREFILL and a.started_s is None for a in attempts)
        loads = [s.load for s in conductor.instances.values() if s.load is not None]
        held = sum(load.held_blocks for load in loads)
        blocks = sum(s.info.num_blocks for s in conductor.instances.values())
        self._metrics.set_load(len(attempts) - waiting, waiting, held / blocks if blocks else 0.0)
        roles: dict[str, int] = {}
        for state in conductor.instances.values():
            roles[state.info.role.value] = roles.get(state.info.role.value, 0) + 1
        self._metrics.set_instances(roles)
