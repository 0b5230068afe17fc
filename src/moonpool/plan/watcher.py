"""Watches a simulation for the planner: which requests missed their SLOs, when they arrived, and
what they lacked.

A rejected request is a miss, and so is one that failed. The cause of a miss is read off where it
shows: by the reason of its refusal, or by which SLO it broke; whether decode was short of speed or
of memory, by how both were used at that moment.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

from moonpool.metrics import RequestRecord
from moonpool.sim.collector import COMPLETED, Collector
from moonpool.sim.simulation import Simulation
from moonpool.types import RequestId, Role

BIN_S = 60.0


class Cause(Enum):
    """What a request that missed its SLOs would have needed more of."""

    PREFILL = "prefill time"
    DECODE_SPEED = "decode speed"
    DECODE_MEMORY = "decode memory"
    POOL = "room in the pool"
    DEADLINE = "time until the deadline"


_BY_REASON = {
    "ttft_slo": Cause.PREFILL,
    "no_decode_capacity": Cause.DECODE_MEMORY,
    "no_prefill_capacity": Cause.POOL,
}


class Watcher(Collector):
    """In the collector's place. Requests that arrived before `begin_s` are served, not counted."""

    def __init__(self, simulation: Simulation, begin_s: float, speed: float) -> None:
        super().__init__()
        self.misses: Counter[Cause] = Counter()
        self.gave_up = False
        self._simulation = simulation
        self._begin_s = begin_s
        self._speed = speed
        self._reasons: dict[RequestId, str] = {}
        self._arrived: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()

    @property
    def num_missed(self) -> int:
        return self.misses.total()

    def by_minute(self) -> tuple[tuple[int, int, int], ...]:
        """(minute of the trace, requests that arrived in it, misses of these)."""
        minutes = sorted(self._arrived)
        return tuple((minute, self._arrived[minute], self._missed[minute]) for minute in minutes)

    def note_refused(self, request_id: RequestId, status: int, reason: str) -> None:
        self._reasons[request_id] = reason
        super().note_refused(request_id, status, reason)

    def note_ended(self, record: RequestRecord) -> None:
        reason = self._reasons.pop(record.request_id, "")
        if record.arrived_s < self._begin_s:
            self._prefill_s.pop(record.request_id, None)
            self._refused.pop(record.request_id, None)
            return
        super().note_ended(record)
        minute = int(record.arrived_s * self._speed // BIN_S)
        self._arrived[minute] += 1
        if record.effective:
            return
        self._missed[minute] += 1
        self.misses[self._cause(record, reason)] += 1

    def _cause(self, record: RequestRecord, reason: str) -> Cause:
        if record.outcome in COMPLETED:
            assert record.ttft_s is not None
            late = record.ttft_s > record.slo.ttft_s
            return Cause.PREFILL if late and not self._waited_for_decode(record) else self._decode()
        if reason in _BY_REASON:
            return _BY_REASON[reason]
        if reason.startswith(("decode_load", "tbt_slo")):
            return self._decode()
        return Cause.DEADLINE

    def _waited_for_decode(self, record: RequestRecord) -> bool:
        """Whether most of a late first token's time passed after its prefill."""
        stages_s = record.stages_s()
        return stages_s.get("handover", 0.0) > 0.5 * record.slo.ttft_s

    def _decode(self) -> Cause:
        """Which of the two is nearer to its limit, over the instances that decode."""
        held = memory = 0
        step_s = 0.0
        nodes = [n for n in self._simulation.nodes.values() if n.role is not Role.PREFILL]
        block_tokens = self._simulation.hardware.layout.block_tokens
        for node in nodes:
            tokens = node.instance.pool.num_held * block_tokens
            held += tokens
            memory += min(node.info.engine_tokens or tokens, node.info.num_blocks * block_tokens)
            step_s += node.info.cost.decode_step_s(node.instance.num_running, tokens)
        slow = step_s / len(nodes) / self._simulation.config.slo.tbt_s
        return Cause.DECODE_MEMORY if held > slow * max(memory, 1) else Cause.DECODE_SPEED
