"""Describes a running cluster for the live page: one frame of plain JSON values a second.

A frame is computed only when somebody looks. Its history comes from the records of ended requests,
which the head keeps anyway, so it reaches back no further than they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

from moonpool.conductor.conductor import Conductor
from moonpool.conductor.state import AttemptStage, InstanceState, TrackedRequest
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, Slo, payer_of

BIN_S = 10.0
NUM_BINS = 60
NUM_LISTED = 40
"""Most requests that a frame lists, those under way included."""
PERCENTILES = (0.5, 0.9, 0.99)
_ANSWERED = (FinishReason.STOP.value, FinishReason.LENGTH.value)


def describe_live(
    conductor: Conductor, newest: Iterable[RequestRecord], now: float, tenant: str | None
) -> dict[str, Any]:
    """Returns one frame.

    `newest`: records of ended requests, the last ended first. `tenant`: only its own requests, and
    no loads; None: everything.
    """
    own = [
        tracked
        for tracked in conductor.requests.values()
        if tenant is None or payer_of(tracked.request.tenant) == tenant
    ]
    recent = _recent(newest, now, tenant)
    running = [_describe_running(tracked, now) for tracked in own[-NUM_LISTED // 2 :][::-1]]
    ended = [_describe_ended(record, now) for record in recent[: NUM_LISTED - len(running)]]
    slo = conductor.default_slo
    return {
        "tenant": tenant,
        "slo": {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s},
        "instances": [
            _describe_instance(conductor, state, now, with_load=tenant is None)
            for state in conductor.instances.values()
        ],
        "loads": None if tenant is not None else _finite(conductor.loads(now)._asdict()),
        "under_way": len(own),
        "stages": dict(Counter(_stage_of(tracked) for tracked in own)),
        "totals": _totals(recent),
        "history": {"bin_s": BIN_S, "bins": _history(recent, now)},
        "requests": running + ended,
    }


def _recent(newest: Iterable[RequestRecord], now: float, tenant: str | None) -> list[RequestRecord]:
    """Returns the records of the history's time, the last ended first."""
    found: list[RequestRecord] = []
    for record in newest:
        if record.finished_s is None:
            continue
        if record.finished_s < now - NUM_BINS * BIN_S:
            break
        if tenant is None or payer_of(record.tenant) == tenant:
            found.append(record)
    return found


# Requests


def _stage_of(tracked: TrackedRequest) -> str:
    attempt = tracked.attempt
    if attempt is None:
        return "waiting"
    if attempt.stage is AttemptStage.PREFILL and attempt.started_s is None:
        return "queue_and_fetch"
    return attempt.stage.value


def _describe_running(tracked: TrackedRequest, now: float) -> dict[str, Any]:
    record = tracked.record
    described = _describe(record, now - record.arrived_s)
    return described | {
        "outcome": "",
        "stage": _stage_of(tracked),
        "ended_s_ago": None,
    }


def _describe_ended(record: RequestRecord, now: float) -> dict[str, Any]:
    assert record.finished_s is not None
    described = _describe(record, record.finished_s - record.arrived_s)
    return described | {
        "outcome": record.outcome,
        "stage": "",
        "ended_s_ago": round(now - record.finished_s, 1),
    }


def _describe(record: RequestRecord, seconds: float) -> dict[str, Any]:
    tenant = payer_of(record.tenant)
    request_id = str(record.request_id)
    return {
        "id": request_id.removeprefix(f"{tenant}/") if tenant else request_id,
        "tenant": tenant,
        "prefill": record.prefill_instance,
        "decode": record.decode_instance,
        "seconds": round(seconds, 4),
        "ttft_s": record.ttft_s,
        "tbt_s": record.tbt_top10_mean_s,
        "effective": record.effective,
        "generated_tokens": record.num_generated_tokens,
        "tokens": _tokens_by_tier([record]),
        "stages_s": {name: round(spent_s, 5) for name, spent_s in record.stages_s().items()},
    }


def _tokens_by_tier(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Splits prompt tokens by where their KVCache came from."""
    tokens = {"dram": 0, "fetched": 0, "ssd": 0, "computed": 0}
    for record in records:
        if record.prefill_done_s is None and record.first_token_s is None:
            continue
        fetched = min(record.fetched_tokens, record.cached_tokens)
        loaded = min(record.loaded_tokens, record.cached_tokens - fetched)
        tokens["fetched"] += fetched
        tokens["ssd"] += loaded
        tokens["dram"] += record.cached_tokens - fetched - loaded
        tokens["computed"] += max(record.num_prompt_tokens - record.cached_tokens, 0)
    return tokens


# Sums


def _totals(records: Sequence[RequestRecord]) -> dict[str, Any]:
    answered = [record for record in records if record.outcome in _ANSWERED]
    ended_early = Counter(record.outcome for record in records if record.outcome not in _ANSWERED)
    return {
        "ended": len(records),
        "answered": len(answered),
        "effective": sum(record.effective for record in answered),
        "generated_tokens": sum(record.num_generated_tokens for record in records),
        "ttft_s": percentiles([r.ttft_s for r in answered if r.ttft_s is not None]),
        "tbt_s": percentiles(
            [tbt_s for r in answered if (tbt_s := r.tbt_top10_mean_s) is not None]
        ),
        "tokens": _tokens_by_tier(records),
        "not_answered": dict(ended_early.most_common()),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Returns nearest-rank percentiles; None without values."""
    if not values:
        return None
    ranked = sorted(values)
    return {
        f"p{round(100 * share)}": ranked[max(ceil(share * len(ranked)) - 1, 0)]
        for share in PERCENTILES
    }


@dataclass(slots=True)
class _Bin:
    answered: int = 0
    effective: int = 0
    not_answered: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)

    def add(self, record: RequestRecord) -> None:
        self.generated_tokens += record.num_generated_tokens
        if record.outcome not in _ANSWERED:
            self.not_answered += 1
            return
        self.answered += 1
        self.effective += record.effective
        self.prompt_tokens += record.num_prompt_tokens
        self.cached_tokens += record.cached_tokens
        if record.ttft_s is not None:
            self.ttft_s.append(record.ttft_s)
        if record.tbt_top10_mean_s is not None:
            self.tbt_s.append(record.tbt_top10_mean_s)

    def described(self) -> dict[str, Any]:
        ttft_s, tbt_s = percentiles(self.ttft_s), percentiles(self.tbt_s)
        return {
            "answered": self.answered,
            "effective": self.effective,
            "not_answered": self.not_answered,
            "generated_tokens": self.generated_tokens,
            "hit": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "ttft_p90_s": ttft_s and ttft_s["p90"],
            "tbt_p90_s": tbt_s and tbt_s["p90"],
        }


def _history(records: Iterable[RequestRecord], now: float) -> list[dict[str, Any]]:
    """Returns one entry per `BIN_S`, the oldest first."""
    bins = [_Bin() for _ in range(NUM_BINS)]
    last = int(now // BIN_S)
    for record in records:
        assert record.finished_s is not None
        index = NUM_BINS - 1 - (last - int(record.finished_s // BIN_S))
        if 0 <= index < NUM_BINS:
            bins[index].add(record)
    return [one.described() for one in bins]


# Instances


def _describe_instance(
    conductor: Conductor, state: InstanceState, now: float, *, with_load: bool
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "instance_id": state.info.instance_id,
        "role": state.info.role.value,
        "draining": None if state.drain is None else state.drain.reason,
    }
    if not with_load:
        return described
    present, projected = _loads(conductor, state, now, conductor.default_slo)
    described |= {
        "host": state.info.host,
        "load": present,
        "projected": projected,
        "prefills": len(state.prefills),
        "decodes": len(state.decodes),
        "serving_fetches": len(state.serving),
        "blocks": state.info.num_blocks,
        "held": 0,
        "cached": 0,
    }
    if (load := state.load) is not None:
        described |= {
            "blocks": load.num_blocks or state.info.num_blocks,
            "held": load.held_blocks,
            "cached": load.cached_blocks,
            "received_bytes": sum(
                load.counters.get(f"{kind}_received_bytes", 0.0) for kind in ("shm", "tcp", "tls")
            ),
        }
        if load.ssd is not None:
            described["ssd"] = {"blocks": load.ssd.blocks, "cached": load.ssd.cached}
    return described


def _loads(conductor: Conductor, state: InstanceState, now: float, slo: Slo) -> tuple[float, float]:
    """Returns the predicted latency over its SLO: of what runs, and with all that is booked.

    The larger of both on an instance that prefills and decodes.
    """
    table, row, role = conductor.instance_table, state.row, state.info.role
    present = projected = 0.0
    if role.prefills:
        busy_s = max(table.busy_until_s.item(row) - now, 0.0)
        present = busy_s / slo.ttft_s
        projected = table.queue_s(now).item(row) / slo.ttft_s
    if role.decodes:
        batch, booked = table.decoding_batch.item(row), table.booked_batch.item(row)
        if batch:
            step_s = table.tbt_s(row, batch, table.decoding_context.item(row))
            present = max(present, step_s / slo.tbt_s)
        if booked:
            step_s = table.tbt_s(row, booked, table.booked_context.item(row))
            projected = max(projected, step_s / slo.tbt_s)
    return round(present, 4), round(projected, 4)


def _finite(loads: dict[str, float]) -> dict[str, float | None]:
    return {name: round(load, 4) if isfinite(load) else None for name, load in loads.items()}
