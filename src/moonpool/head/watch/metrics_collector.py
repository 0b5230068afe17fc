"""Converts what a head sees to metrics: records of requests, counters of instances, its own state.

`api.metrics.catalogue` says what raises each metric.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.api.metrics.labels import LOAD_REFUSALS
from moonpool.api.metrics.server_metrics import ServerMetrics
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.forecast.cost_estimator import learned_factors
from moonpool.conductor.state import AttemptPhase, InstanceState
from moonpool.head.explain import describe_programs
from moonpool.protocol.instance_counters import ATTEMPT_PREEMPTIONS, STEP_TOKENS
from moonpool.protocol.messages import InstanceInfo, InstanceLoad, TransferDone
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, InstanceId

_ANSWERED = (FinishReason.STOP.value, FinishReason.LENGTH.value)
_COUNTED_BY_INSTANCES = (
    ("vllm:num_preemptions", "preemptions"),
    ("vllm:spec_decode_num_drafts", "drafts"),
    ("vllm:spec_decode_num_draft_tokens", "draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "accepted_draft_tokens"),
    ("moonpool:corrupt_slices", "corrupt_slices"),
    ("moonpool:damaged_ssd_blocks", "ssd_damaged_blocks"),
    ("moonpool:ssd_failures", "ssd_failed_operations"),
    ("moonpool:recomputed_tokens", "recomputed_tokens"),
)
"""Metrics without a label, and the counters of load reports that they sum."""
_LABELLED_BY_INSTANCES = (
    *(
        ("moonpool:transfer_bytes", transport, f"{transport}_received_bytes")
        for transport in ("shm", "tcp", "tls", "nixl")
    ),
    ("moonpool:ssd_bytes", "written", "ssd_written_bytes"),
    ("moonpool:ssd_bytes", "read", "ssd_read_bytes"),
    ("moonpool:ssd_seconds", "written", "ssd_write_seconds"),
    ("moonpool:ssd_seconds", "read", "ssd_read_seconds"),
    ("moonpool:prefetched_blocks", "loaded", "prefetched_blocks"),
    ("moonpool:prefetched_blocks", "used", "used_prefetched_blocks"),
    ("moonpool:prefetched_blocks", "wasted", "wasted_prefetched_blocks"),
)
"""Metrics with a label that are read from instances: metric, label value, counter."""
CLASS_COUNTERS = (
    "moonpool:slo_class_requests",
    "moonpool:slo_class_effective_requests",
    "moonpool:slo_class_rejections",
)
"""Counters by SLO class: requests that ended, requests within their SLOs, refused requests."""
MAX_INSTANCES = 4096
"""Most names of instances that are remembered; beyond that, the instance that joined first is
dropped."""


@dataclass(slots=True)
class _Life:
    """One process of an instance, and the numbers that were counted for it. `inherited`: whether an
    earlier head has counted what the first report to this head says."""

    incarnation: int
    inherited: bool = False
    counters: dict[str, float] = field(default_factory=dict)


class MetricsCollector:
    """Fills one `ServerMetrics` object."""

    def __init__(self, metrics: ServerMetrics, slo_classes: Sequence[str] = ()) -> None:
        """`slo_classes`: all class names that records may have."""
        self._metrics = metrics
        for name in slo_classes:
            for counter in CLASS_COUNTERS:
                metrics.add(counter, 0, name)
        self._lives: OrderedDict[InstanceId, _Life] = OrderedDict()
        self._generated_tokens = 0  # tokens of requests that have ended

    # Requests

    def request_ended(self, record: RequestRecord, now: float) -> None:
        metrics = self._metrics
        self._note_first_token(record)
        self._generated_tokens += _generated(record)
        metrics.histogram("vllm:inter_token_latency_seconds").observe_all(record.gaps_s)
        metrics.add("moonpool:fetched_tokens", record.fetched_tokens)
        metrics.add("moonpool:prefill_seconds", record.prefills_took_s)
        metrics.add("moonpool:wasted_prefills", record.num_wasted_prefills)
        metrics.add("moonpool:wasted_prefill_seconds", record.wasted_prefills_took_s)
        self._note_class(record)
        if record.outcome in _ANSWERED:
            self._note_answer(record)
        elif record.attempts or record.outcome == FinishReason.ABORT.value:
            metrics.add("moonpool:requests_failed", label=record.outcome)
        else:
            self.note_refused(record.outcome)

    def _note_class(self, record: RequestRecord) -> None:
        """Counts the request in its SLO class. A request whose client has left is not counted."""
        name = record.slo.class_name
        if not name or record.outcome == FinishReason.ABORT.value:
            return
        is_refused = not record.attempts and record.outcome not in _ANSWERED
        counts = 1, record.effective, is_refused
        for counter, number in zip(CLASS_COUNTERS, counts, strict=True):
            self._metrics.add(counter, number, name)

    def note_refused(self, reason: str) -> None:
        """Counts a request that was refused before it was placed."""
        self._metrics.add("moonpool:requests_rejected", label=reason)
        if reason in LOAD_REFUSALS:
            self._metrics.add("vllm:admission_rejections", label=reason)

    def note_failed(self, reason: str) -> None:
        """Counts an answer that an earlier head began and that failed, for which this head has no
        record."""
        self._metrics.add("moonpool:requests_failed", label=reason)

    def prompt_answered(self, lengths: Sequence[int]) -> None:
        """Notes that all choices to a prompt are complete. `lengths`: the length of each choice in
        tokens."""
        self._metrics.observe("vllm:request_params_n", len(lengths))
        self._metrics.observe("vllm:request_max_num_generation_tokens", max(lengths))

    def _note_first_token(self, record: RequestRecord) -> None:
        """Counts a prompt once, when its first token has come."""
        if record.is_counted or record.first_token_s is None:
            return
        record.is_counted = True
        metrics, prompt = self._metrics, record.num_prompt_tokens
        if record.ttft_s is not None:
            metrics.observe("vllm:time_to_first_token_seconds", record.ttft_s)
        cached = min(record.cached_tokens, prompt)
        fetched = min(record.fetched_tokens, cached)
        loaded = min(record.loaded_tokens, cached - fetched)
        metrics.add("vllm:prompt_tokens", prompt)
        metrics.add("vllm:prompt_tokens_cached", cached)
        by_source = "vllm:prompt_tokens_by_source"
        metrics.add(by_source, prompt - cached, "local_compute")
        metrics.add(by_source, cached - fetched, "local_cache_hit")
        metrics.add(by_source, fetched, "external_kv_transfer")
        by_place = "vllm:prompt_tokens_cached_by_source"
        metrics.add(by_place, cached - fetched - loaded, "device")
        metrics.add(by_place, loaded, "disk")
        metrics.add(by_place, fetched, "p2p")
        if record.uses_cache:
            metrics.add("vllm:prefix_cache_queries", prompt)
            metrics.add("vllm:prefix_cache_hits", cached)
        metrics.observe("vllm:request_prompt_tokens", prompt)
        metrics.observe("vllm:request_prefill_kv_computed_tokens", prompt - cached)

    def _note_answer(self, record: RequestRecord) -> None:
        metrics = self._metrics
        assert record.finished_s is not None
        metrics.add("vllm:request_success", label=record.outcome)
        metrics.observe("vllm:e2e_request_latency_seconds", record.finished_s - record.arrived_s)
        if record.answer_tokens:
            metrics.observe("vllm:request_generation_tokens", record.answer_tokens)
            metrics.observe("vllm:request_params_max_tokens", record.max_tokens)
        if record.tpot_s is not None:
            metrics.observe("vllm:request_time_per_output_token_seconds", record.tpot_s)
        for stage, seconds in record.stages_s().items():
            metrics.observe("moonpool:stage_seconds", seconds, stage)
        began_s, first_s, last_s = (
            record.prefill_started_s,
            record.first_token_s,
            record.last_token_s,
        )
        if began_s is None or first_s is None or last_s is None:
            return
        for name, seconds in (
            ("vllm:request_queue_time_seconds", began_s - record.arrived_s),
            ("vllm:request_prefill_time_seconds", first_s - began_s),
            ("vllm:request_decode_time_seconds", last_s - first_s),
            ("vllm:request_inference_time_seconds", last_s - began_s),
        ):
            metrics.observe(name, max(seconds, 0.0))

    # Instances

    def instance_joined(self, info: InstanceInfo, inherited: bool) -> None:
        """`inherited`: whether an earlier head had this instance, and it is new to this head."""
        instance_id, incarnation = info.instance_id, info.incarnation
        life = self._lives.get(instance_id)
        restarts = int(life is not None and life.incarnation != incarnation)
        self._metrics.add("moonpool:instance_losses", 0, instance_id)
        self._metrics.add("moonpool:instance_restarts", restarts, instance_id)
        # otherwise, only the connection broke, and the instance's counters continue
        if life is None or restarts:
            self._lives[instance_id] = _Life(incarnation, inherited and life is None)
        if len(self._lives) > MAX_INSTANCES:
            self._lives.popitem(last=False)

    def attention_joined(self, name: str) -> None:
        self._metrics.add("moonpool:instance_losses", 0, name)

    def instance_lost(self, instance_id: str) -> None:
        """Counts an instance or an attention worker that was lost without an order to leave."""
        self._metrics.add("moonpool:instance_losses", label=instance_id)

    def instance_load(self, state: InstanceState, load: InstanceLoad) -> None:
        """Adds the growth of an instance's counters, which are totals of one incarnation."""
        life = self._lives.get(state.info.instance_id)
        if life is None:
            return
        before, life.counters = life.counters, load.counters
        if life.inherited:
            life.inherited = False
            return
        metrics = self._metrics

        def grown(name: str) -> float:
            return load.counters.get(name, 0.0) - before.get(name, 0.0)

        metrics.add("moonpool:step_seconds", grown("step_s"), state.role.value)
        for metric, name in _COUNTED_BY_INSTANCES:
            metrics.add(metric, grown(name))
        for metric, label, name in _LABELLED_BY_INSTANCES:
            metrics.add(metric, grown(name), label)
        metrics.histogram("vllm:iteration_tokens_total").grow(STEP_TOKENS.grown(grown))
        metrics.histogram("vllm:request_num_preemptions").grow(ATTEMPT_PREEMPTIONS.grown(grown))

    def transfer_done(self, report: TransferDone) -> None:
        self._metrics.add("moonpool:transfer_seconds", report.seconds)
        self._metrics.add("moonpool:transfers", label="broken" if report.error else "whole")

    # The head

    def heads(self, restarts: int, upgrades: int, epoch: int) -> None:
        """Sets how many heads of this cluster have died and have handed over, and the epoch of this
        one."""
        self._metrics.set("moonpool:head_restarts", restarts)
        self._metrics.set("moonpool:head_upgrades", upgrades)
        self._metrics.set("moonpool:head_epoch", epoch)

    def trace_spans(self, num_sent: int, num_lost: int) -> None:
        self._metrics.set("moonpool:trace_spans", num_sent)
        self._metrics.set("moonpool:lost_trace_spans", num_lost)

    def gauges(
        self,
        conductor: Conductor,
        unsettled: Iterable[RequestRecord],
        longest_tokens: int,
        now: float,
    ) -> None:
        """Sets the gauges to their present values. `unsettled`: records of requests that have ended
        and are not counted yet. `longest_tokens`: tokens of prompt and answer of the longest
        request."""
        self._requests(conductor, unsettled)
        self._pool(conductor, longest_tokens)
        self._roles(conductor, now)
        self._estimates(conductor)

    def _requests(self, conductor: Conductor, unsettled: Iterable[RequestRecord]) -> None:
        metrics, tracked = self._metrics, conductor.requests.values()
        generated = self._generated_tokens
        for record in (*(one.record for one in tracked), *unsettled):
            self._note_first_token(record)
            generated += _generated(record)
        metrics.set("vllm:generation_tokens", generated)
        attempts = [one.attempt for one in tracked if one.attempt is not None]
        queued = sum(a.phase is AttemptPhase.PREFILL and a.started_s is None for a in attempts)
        deferred = conductor.num_waiting
        metrics.set("vllm:num_requests_running", len(attempts) - queued)
        metrics.set("vllm:num_requests_waiting", queued + deferred)
        metrics.set_all("moonpool:programs", describe_programs(conductor))
        metrics.set_all(
            "vllm:num_requests_waiting_by_reason", {"capacity": queued, "deferred": deferred}
        )

    def _pool(self, conductor: Conductor, longest_tokens: int) -> None:
        states = conductor.instances.values()
        loads = [state.load for state in states if state.load is not None]
        held = sum(load.held_blocks for load in loads)
        blocks = sum(_num_blocks(state) for state in states)
        self._metrics.set("vllm:kv_cache_usage_perc", held / blocks if blocks else 0.0)
        sizes = [state.info.layout.block_tokens for state in states]
        self._metrics.set_cache(sizes[0] if sizes else 0, blocks, longest_tokens)
        tiers = [load.ssd for load in loads if load.ssd is not None and not load.ssd.error]
        self._metrics.set_all(
            "moonpool:tier_blocks", {"dram": blocks, "ssd": sum(tier.blocks for tier in tiers)}
        )
        self._metrics.set_all(
            "moonpool:tier_cached_blocks",
            {
                "dram": sum(load.cached_blocks for load in loads),
                "ssd": sum(tier.cached for tier in tiers),
            },
        )

    def _roles(self, conductor: Conductor, now: float) -> None:
        metrics, states = self._metrics, conductor.instances.values()
        roles: dict[str, float] = {}
        for state in states:
            roles[state.role.value] = roles.get(state.role.value, 0) + 1
        metrics.set_all("moonpool:instances", roles)
        metrics.set("moonpool:draining_instances", sum(s.drain is not None for s in states))
        metrics.set_all("moonpool:pool_load", conductor.loads(now)._asdict() if roles else {})
        balance = conductor.roles.report(now)
        advice = balance.advice
        loads = {} if balance.mode == "off" else balance.loads._asdict()
        metrics.set_all("moonpool:role_load", loads)
        advised = {} if advice is None else {advice.role.value: float(advice.num_switches)}
        metrics.set_all("moonpool:role_advised", advised)
        metrics.set_all(
            "moonpool:role_switches",
            {role.value: float(number) for role, number in balance.num_switches.items()},
        )
        metrics.set("moonpool:role_switches_given_up", balance.num_given_up)
        metrics.set_all("moonpool:wanted_instances", _wanted(conductor))

    def _estimates(self, conductor: Conductor) -> None:
        metrics, errors = self._metrics, conductor.cost_estimator.errors
        for name, values in (
            ("moonpool:predictions", {what: float(one.count) for what, one in errors.items()}),
            ("moonpool:predictions_too_much", {w: one.too_much for w, one in errors.items()}),
            ("moonpool:predictions_too_little", {w: one.too_little for w, one in errors.items()}),
        ):
            metrics.set_all(name, values)
        compared = {what: one for what, one in errors.items() if one.num_ratios}
        for part, share in (("p50", 0.5), ("p90", 0.9)):
            ratios = {what: one.ratio(share) for what, one in compared.items()}
            metrics.set_all(f"moonpool:prediction_ratio_{part}", ratios)
        factors = {i: learned_factors(state) for i, state in conductor.instances.items()}
        for kind in ("prefill", "decode", "transfer"):
            learned = {str(i): each[kind] for i, each in factors.items() if kind in each}
            metrics.set_all(f"moonpool:learned_{kind}_factor", learned)


def _generated(record: RequestRecord) -> int:
    return record.num_generated_tokens + record.num_surplus_tokens


def _num_blocks(state: InstanceState) -> int:
    """Returns the instance's present number of blocks, without those of attention workers that it
    has lost."""
    return (0 if state.load is None else state.load.num_blocks) or state.info.num_blocks


def _wanted(conductor: Conductor) -> dict[str, float]:
    autoscale = conductor.roles.autoscale
    wanted = None if autoscale is None else autoscale.wanted
    return {} if wanted is None else {"prefill": wanted.prefill, "decode": wanted.decode}
