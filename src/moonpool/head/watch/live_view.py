"""Describes a running cluster for the live page: one frame of plain JSON values a second.

A frame is computed only when a page is open. The sums of a frame come from the records of ended
requests, which the head keeps anyway, so they reach back no further than these records.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from moonpool.conductor.actions import HotRequested
from moonpool.conductor.conductor import DEFAULT_SLO, Conductor
from moonpool.conductor.state import AttemptPhase, InstanceState, TrackedRequest
from moonpool.distributions import percentiles
from moonpool.head.explain import (
    MAX_LISTED_BLOCKS,
    describe_hot,
    describe_slo,
    finite_loads,
    named_instance,
)
from moonpool.head.watch.live_events import LiveEvents
from moonpool.head.watch.live_history import ANSWERED, LiveHistory, most_loaded
from moonpool.request_record import RequestRecord
from moonpool.types import Slo, payer_of

RECENT_S = 600.0
NUM_LISTED = 40
"""Most requests that a frame lists, including those under way."""
MAX_GROUPS = 20
"""Most tenants, and most programs, that a frame lists."""
PERCENTILES = (50, 90, 99)


class LiveView:
    """The sources of one cluster's frames, besides its records."""

    def __init__(
        self,
        conductors: Sequence[Conductor],
        post: Callable[[HotRequested], None],
        now: Callable[[], float],
    ) -> None:
        """`conductors`: one for each model; the list may grow."""
        self._conductors = conductors
        self._now = now
        self.hot = HotList(conductors, post, now)
        self.history = LiveHistory(conductors)
        self.events = LiveEvents(conductors)
        self._moved = MovedBytes()
        self.observers = (self.history, self.events)
        """Observers that must be told of each request that has ended."""

    def tick(self, now: float) -> None:
        self.history.tick(now)
        self.events.tick(now)

    def frame(self, newest: Iterable[RequestRecord], tenant: str | None) -> dict[str, Any]:
        """Returns one frame. Only operators see hot prefixes and transfers, because the key of a
        block does not tell whose it is."""
        now = self._now()
        described = describe_live(self._conductors, newest, now, tenant)
        described["history"] = self.history.describe(now, tenant)
        if tenant is None:
            described["hot"] = self.hot.watched()
            states = [state for each in self._conductors for state in each.instances.values()]
            described["moved"] = self._moved.describe(states, now)
            described["events"] = self.events.describe(now)
        return described


def describe_live(
    conductors: Sequence[Conductor], newest: Iterable[RequestRecord], now: float, tenant: str | None
) -> dict[str, Any]:
    """Returns the present state, the sums of the last ten minutes and the last requests.

    `newest`: records of ended requests, the last ended first. `tenant`: the tenant to whose
    requests the view is limited, without loads; None means everything.
    """
    own = [
        tracked
        for conductor in conductors
        for tracked in conductor.requests.values()
        if tenant is None or payer_of(tracked.request.tenant) == tenant
    ]
    recent = _recent(newest, now, tenant)
    running = [_describe_running(tracked, now) for tracked in own[-NUM_LISTED // 2 :][::-1]]
    ended = [_describe_ended(record, now) for record in recent[: NUM_LISTED - len(running)]]
    loads = most_loaded(conductors, now)
    slo = conductors[0].default_slo if conductors else DEFAULT_SLO
    return {
        "tenant": tenant,
        "slo": describe_slo(slo),
        "instances": [
            _describe_instance(conductor, state, now, with_load=tenant is None)
            for conductor in conductors
            for state in conductor.instances.values()
        ],
        "loads": None if tenant is not None else finite_loads(loads),
        "under_way": len(own),
        "stages": dict(Counter(_stage_of(tracked) for tracked in own)),
        "totals": _totals(recent),
        "requests": running + ended,
        "programs": _describe_groups(own, recent, partial(_program_of, tenant)),
        "payers": None
        if tenant is not None
        else _describe_groups(own, recent, lambda record: payer_of(record.tenant)),
    }


def _recent(newest: Iterable[RequestRecord], now: float, tenant: str | None) -> list[RequestRecord]:
    """Returns the records of the last ten minutes, the last ended first."""
    found: list[RequestRecord] = []
    for record in newest:
        if record.finished_s is None:
            continue
        if record.finished_s < now - RECENT_S:
            break
        if tenant is None or payer_of(record.tenant) == tenant:
            found.append(record)
    return found


# Requests


def _stage_of(tracked: TrackedRequest) -> str:
    attempt = tracked.attempt
    if attempt is None:
        return "waiting"
    if attempt.phase is AttemptPhase.PREFILL and attempt.started_s is None:
        return "queue_and_fetch"
    return attempt.phase.value


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
        "program": record.program,
        "parent_program": record.parent_program,
        "prefill": record.prefill_instance,
        "decode": record.decode_instance,
        "seconds": round(seconds, 4),
        "ttft_s": record.ttft_s,
        "tbt_s": record.tbt_top10_mean_s,
        "effective": record.effective,
        "prompt_tokens": record.num_prompt_tokens,
        "generated_tokens": record.answer_tokens,
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
    answered = [record for record in records if record.outcome in ANSWERED]
    ended_early = Counter(record.outcome for record in records if record.outcome not in ANSWERED)
    return {
        "ended": len(records),
        "answered": len(answered),
        "effective": sum(record.effective for record in answered),
        "generated_tokens": sum(record.num_generated_tokens for record in records),
        "ttft_s": _percentiles([r.ttft_s for r in answered if r.ttft_s is not None]),
        "tbt_s": _percentiles(
            [tbt_s for r in answered if (tbt_s := r.tbt_top10_mean_s) is not None]
        ),
        "tokens": _tokens_by_tier(records),
        "not_answered": dict(ended_early.most_common()),
    }


def _program_of(viewer: str | None, record: RequestRecord) -> str:
    """Returns the name of the request's program and of its parent; for a viewer who sees all
    tenants, also the tenant."""
    payer = payer_of(record.tenant) if viewer is None else ""
    parent = record.parent_program
    name = f"{record.program} (of {parent})" if parent else record.program
    return f"{payer}: {name}" if payer and name else name


def _describe_groups(
    running: Sequence[TrackedRequest],
    ended: Sequence[RequestRecord],
    name_of: Callable[[RequestRecord], str],
) -> list[dict[str, Any]]:
    """Returns the figures of each tenant, or of each program, over the last ten minutes, ordered by
    prompt tokens, the most first. Requests without a name form a group, too."""
    groups: dict[str, list[RequestRecord]] = {}
    for record in ended:
        groups.setdefault(name_of(record), []).append(record)
    under_way = Counter(name_of(tracked.record) for tracked in running)
    tokens = Counter(
        {
            name: sum(record.num_prompt_tokens for record in groups.get(name, ()))
            for name in {*groups, *under_way}
        }
    )
    return [
        {"name": name, "under_way": under_way[name], **_totals(groups.get(name, ()))}
        for name, _ in tokens.most_common(MAX_GROUPS)
    ]


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    return percentiles(values, *PERCENTILES) if values else None


# Instances


def _describe_instance(
    conductor: Conductor, state: InstanceState, now: float, *, with_load: bool
) -> dict[str, Any]:
    described = named_instance(state)
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
        }
        if load.cache_view is not None and load.cache_view.note:
            described["note"] = load.cache_view.note
        if load.ssd is not None:
            described["ssd"] = {
                "blocks": load.ssd.blocks,
                "cached": load.ssd.cached,
                "damaged": int(load.counters.get("ssd_damaged_blocks", 0)),
                "error": load.ssd.error,
            }
    return described


def _loads(conductor: Conductor, state: InstanceState, now: float, slo: Slo) -> tuple[float, float]:
    """Returns the predicted latency over its SLO: for what runs, and for all that is booked.

    On an instance that prefills and decodes, the larger of both counts.
    """
    table, row, role = conductor.instance_table, state.row, state.role
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


HOT_S = 2.0
"""An instance that does not report its hot prefixes within this time is left out."""
WATCHED_EVERY_S = 10.0
WATCHED_BLOCKS = 2048
"""Most blocks that an instance lists for the page. Each list also goes into the event log."""
MAX_CACHED_BLOCKS = 50_000
"""An instance with more blocks is not asked for the page, because its steps wait while it ranks
them."""
NUM_WATCHED = 10


class HotList:
    """Asks the instances for their most used prefixes: once for a client, and repeatedly while an
    operator watches the live page."""

    def __init__(
        self,
        conductors: Sequence[Conductor],
        post: Callable[[HotRequested], None],
        now: Callable[[], float],
    ) -> None:
        self._conductors = conductors
        self._post = post
        self._now = now
        self._asked_s = float("-inf")

    async def collect(self, num_prefixes: int) -> list[dict[str, Any]]:
        """Returns the most used prefixes first. Waits for reports, at most `HOT_S`."""
        for state in self._states():
            state.hot = None
        self._post(HotRequested(MAX_LISTED_BLOCKS))
        until_s = self._now() + HOT_S
        while self._now() < until_s:
            if all(state.hot is not None for state in self._states()):
                break
            await asyncio.sleep(HOT_S / 100)
        return describe_hot(self._conductors, num_prefixes)

    def watched(self) -> list[dict[str, Any]] | None:
        """Returns the latest reports, and asks for new reports if these are old. Returns None if
        the instances cache too many blocks to be asked again and again."""
        loads = [state.load for state in self._states()]
        if any(load is not None and load.cached_blocks > MAX_CACHED_BLOCKS for load in loads):
            return None
        if self._now() - self._asked_s >= WATCHED_EVERY_S:
            self._asked_s = self._now()
            self._post(HotRequested(WATCHED_BLOCKS))
        return describe_hot(self._conductors, NUM_WATCHED)

    def _states(self) -> Iterator[InstanceState]:
        for conductor in self._conductors:
            yield from conductor.instances.values()


WINDOW_S = 10.0
_MAX_REMEMBERED = 64
FLOWS = ("handed_over", "fetched", "copied", "sent", "ssd_loaded", "ssd_stored")
_Bytes = dict[str, float]


class MovedBytes:
    """The bytes that each instance has moved, from the counters of its load reports, and the rates
    between the newest report and one up to `WINDOW_S` older. Reports are remembered only while an
    operator watches."""

    def __init__(self) -> None:
        self._before: deque[tuple[float, dict[tuple[str, int], _Bytes]]] = deque(
            maxlen=_MAX_REMEMBERED
        )

    def describe(self, states: Iterable[InstanceState], now: float) -> list[dict[str, Any]]:
        """Returns totals in bytes and rates in bytes/s, one entry per instance that has reported.

        A rate is None until a report is at least a second old.
        """
        totals = {
            (str(state.info.instance_id), state.info.incarnation): moved_bytes(
                state.load.counters, state.info.layout.block_bytes
            )
            for state in states
            if state.load is not None
        }
        while self._before and self._before[0][0] < now - WINDOW_S:
            self._before.popleft()
        since_s, earlier = self._before[0] if self._before else (now, {})
        self._before.append((now, totals))
        passed_s = now - since_s
        return [
            {
                "instance_id": key[0],
                "bytes": moved,
                "bytes_per_s": _rates(moved, earlier.get(key), passed_s),
            }
            for key, moved in totals.items()
        ]


def moved_bytes(counters: Mapping[str, float], block_bytes: int) -> _Bytes:
    """Returns the bytes of each of `FLOWS` since the process started.

    `handed_over`: bytes received from prefill instances. `fetched`: bytes fetched for a request.
    `copied`: bytes taken over from a leaving instance, or replicated. `sent`: bytes handed over to
    decode instances.
    """
    fetched = counters.get("fetched_bytes", 0.0)  # bytes that requests and copies fetched
    copied = min(counters.get("taken_over_blocks", 0.0) * block_bytes, fetched)
    return {
        "handed_over": counters.get("received_bytes", 0.0),
        "fetched": fetched - copied,
        "copied": copied,
        "sent": counters.get("sent_bytes", 0.0),
        "ssd_loaded": counters.get("loaded_bytes", 0.0),
        "ssd_stored": counters.get("stored_bytes", 0.0),
    }


def _rates(moved: _Bytes, earlier: _Bytes | None, passed_s: float) -> _Bytes | None:
    if earlier is None or passed_s < 1.0:
        return None
    return {name: max(moved[name] - earlier[name], 0.0) / passed_s for name in FLOWS}
