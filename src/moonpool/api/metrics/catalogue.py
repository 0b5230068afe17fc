"""Every metric of `/metrics`: its name, its kind, its meaning, and what raises it.

`python -m moonpool.api.metrics.catalogue` prints the table of docs/watching.md; a test compares
both. A metric has vLLM's name if vLLM has the quantity, so that existing dashboards work; else its
name begins with `moonpool:`. Label values that are known beforehand have a series at 0 from the
start, because Prometheus sees no increase in a series whose first value is 1.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from moonpool.api.metrics.labels import (
    CHOICES,
    DIRECTIONS,
    FAILURES,
    GAP_S,
    LOAD_REFUSALS,
    REFUSALS,
    REQUEST_S,
    ROLES,
    TOKENS,
    TRANSPORTS,
    TTFT_S,
)
from moonpool.protocol.instance_counters import ATTEMPT_PREEMPTIONS, STEP_TOKENS
from moonpool.types import Struct

Kind = Literal["counter", "gauge", "histogram"]


class MetricSpec(Struct, frozen=True, kw_only=False):
    """One metric. `meaning` is the metric's help text. `label`: the label besides model and engine;
    `known`: its values that always have a series. `bounds`: the bounds of a histogram's buckets."""

    name: str
    meaning: str
    raised_by: str
    label: str = ""
    known: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    kind: Kind = "gauge"

    @property
    def exported_name(self) -> str:
        """Returns the name in the output: a counter's name ends in `_total`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


_gauge = MetricSpec
_counter = partial(MetricSpec, kind="counter")


def _histogram(
    name: str, meaning: str, raised_by: str, bounds: tuple[float, ...], label: str = ""
) -> MetricSpec:
    return MetricSpec(name, meaning, raised_by, label, bounds=bounds, kind="histogram")


_FIRST = "the first token of a request, or its embedding; not again after a retry"
_ANSWERED = "the end of a complete answer"
_BEAT = "load reports of instances"
_LEFT = "the end of a request, whatever its outcome"

GAUGES = (
    _gauge(
        "vllm:num_requests_running",
        "Number of requests whose prefill has begun or that decode.",
        "the state now",
    ),
    _gauge(
        "vllm:num_requests_waiting",
        "Number of requests that wait for an instance, for room or for their prefill.",
        "the state now",
    ),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "The waiting requests: 'capacity' are in the queue of an instance, 'deferred' wait for an"
        " instance, for room, for their share or for a retry.",
        "the state now",
        "reason",
        ("capacity", "deferred"),
    ),
    _gauge(
        "moonpool:programs",
        "Programs (agents): 'running' have a call under way, the tools of 'paused' ones run,"
        " 'parked' ones pause for so long that their blocks leave DRAM first, 'waiting' ones are"
        " new and wait for others, and 'ended' counts.",
        "the state now",
        "state",
        ("running", "paused", "parked", "waiting", "ended"),
    ),
    _gauge(
        "vllm:kv_cache_usage_perc",
        "KVCache blocks that requests hold, as a share of all blocks (1 means full).",
        "the last load reports",
    ),
    _gauge(
        "moonpool:instances",
        "Number of live instances, by role.",
        "joins and losses",
        "role",
        ROLES,
    ),
    _gauge(
        "moonpool:draining_instances",
        "Number of instances that drain: they get no new requests.",
        "`pool drain`, a signal to a worker, a switch of its role",
    ),
    _gauge(
        "moonpool:pool_load",
        "Predicted latency over the SLO, by pool; 'decode_projected' at the end of a prefill that"
        " begins now.",
        "the state now",
        "pool",
    ),
    _gauge(
        "moonpool:role_load",
        'Demand of a pool over its capacity, by role; none with `role_balance = "off"`.',
        "arrivals and answers of the last window",
        "role",
    ),
    _gauge(
        "moonpool:role_advised",
        "Number of additional instances that a role needs.",
        "the role balance",
        "role",
        ("prefill", "decode"),
    ),
    _gauge(
        "moonpool:wanted_instances",
        "Number of instances that the load wants, by role; none without `autoscale`.",
        "the autoscaler",
        "role",
    ),
    _gauge(
        "moonpool:tier_blocks",
        "Number of KVCache blocks in a tier; of 'ssd' none where the tier is lost.",
        "joins, losses and load reports",
        "tier",
        ("dram", "ssd"),
    ),
    _gauge(
        "moonpool:tier_cached_blocks",
        "Number of blocks in a tier that hold a cached prefix block.",
        "the last load reports",
        "tier",
        ("dram", "ssd"),
    ),
    _gauge(
        "moonpool:prediction_ratio_p50",
        "Predicted over actual value, median of all predictions (1 means exact).",
        "answers and ended decodes; none until the first",
        "quantity",
    ),
    _gauge(
        "moonpool:prediction_ratio_p90",
        "Predicted over actual value, p90 of all predictions (1 means exact).",
        "answers and ended decodes; none until the first",
        "quantity",
    ),
    *(
        _gauge(
            f"moonpool:learned_{kind}_factor",
            f"Learned time of {kind} over the time in the profile, by instance.",
            "observed times; 1 with `learning = false`" if kind == "prefill" else "likewise",
            "instance",
        )
        for kind in ("prefill", "decode", "transfer")
    ),
    _gauge(
        "moonpool:head_epoch",
        "Number of the head among those that replaced each other on other machines.",
        "the takeover by a standby",
    ),
)

COUNTERS = (
    _counter(
        "vllm:prompt_tokens",
        "Number of tokens of prefilled prompts, cached ones included.",
        _FIRST,
    ),
    _counter(
        "vllm:prompt_tokens_by_source",
        "The same by source: computed, found where it was computed, or fetched from another"
        " instance.",
        _FIRST,
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    _counter(
        "vllm:prompt_tokens_cached",
        "Number of tokens of prefilled prompts that were found in the cluster's cache.",
        _FIRST,
    ),
    _counter(
        "vllm:prompt_tokens_cached_by_source",
        "The same by place: 'device' (the pool of the prefill instance), 'disk', or 'p2p' (another"
        " instance).",
        _FIRST,
        "source",
        ("device", "disk", "p2p"),
    ),
    _counter(
        "vllm:prefix_cache_queries",
        "Number of prompt tokens looked up in the cluster's cache.",
        f"{_FIRST}; not prompts that must be computed (`prompt_logprobs`, embeddings by mean)",
    ),
    _counter(
        "vllm:prefix_cache_hits",
        "Number of prompt tokens found in the cluster's cache, on any instance and tier.",
        _FIRST,
    ),
    _counter(
        "vllm:generation_tokens",
        "Number of tokens generated, those after a stop string included.",
        "each token, also of requests that fail later; no embeddings",
    ),
    _counter(
        "vllm:request_success",
        "Number of complete answers, by finish reason.",
        "the end of an answer by its last token (stop), a stop string (stop), its embedding (stop)"
        " or its limit (length); nothing else",
        "finished_reason",
        ("length", "stop"),
    ),
    _counter(
        "moonpool:requests_rejected",
        "Number of requests that were refused before they were placed, by reason.",
        "a 422, 429 or 503 of the Conductor or of the API; once per choice (`n`) of the Conductor",
        "reason",
        REFUSALS,
    ),
    _counter(
        "vllm:admission_rejections",
        "The rejected requests whose reason is the load, the SLO or a limit.",
        "likewise",
        "reason",
        LOAD_REFUSALS,
    ),
    _counter(
        "moonpool:slo_class_requests",
        "Number of ended requests, by class of service levels; 'default' are those without one.",
        f"{_LEFT}, unless its client left; nothing without `slo.classes`",
        "slo_class",
    ),
    _counter(
        "moonpool:slo_class_effective_requests",
        "Those answered within both SLOs; over all of them, the attainment of the class.",
        "likewise",
        "slo_class",
    ),
    _counter(
        "moonpool:slo_class_rejections", "Those refused by the Conductor.", "likewise", "slo_class"
    ),
    _counter(
        "moonpool:requests_failed",
        "Number of requests that were not refused and ended without a complete answer, by reason.",
        "a client that left ('abort'; also the other choices of a call that failed); of a placed"
        " request a deadline, a fault after all retries, a stop of the server",
        "reason",
        FAILURES,
    ),
    _counter(
        "vllm:num_preemptions",
        "Number of times that an instance took the blocks of a running request for others.",
        _BEAT,
    ),
    _counter("vllm:spec_decode_num_drafts", "Number of drafts verified.", _BEAT),
    _counter("vllm:spec_decode_num_draft_tokens", "Number of draft tokens verified.", _BEAT),
    _counter(
        "vllm:spec_decode_num_accepted_tokens", "Number of draft tokens that were right.", _BEAT
    ),
    _counter(
        "moonpool:corrupt_slices",
        "Number of layer slices whose checksum differed, in transfers and on disk.",
        f"{_BEAT}; damage only: no abort, lost instance or broken connection raises it",
    ),
    _counter(
        "moonpool:damaged_ssd_blocks",
        "Number of blocks that the SSD tier returned damaged, or whose file was cut.",
        f"{_BEAT}; once per block, which is then forgotten",
    ),
    _counter(
        "moonpool:ssd_failures",
        "Number of reads and writes of the SSD tier that failed.",
        f"{_BEAT}; a damaged block is no failed read",
    ),
    _counter(
        "moonpool:recomputed_tokens",
        "Number of prompt tokens that decode instances computed because their KVCache did not"
        " arrive whole.",
        f"{_BEAT}; requests that were placed again count no tokens here",
    ),
    _counter(
        "moonpool:fetched_tokens",
        "Number of prompt tokens fetched from another instance.",
        f"{_LEFT}, if its prefill began",
    ),
    _counter(
        "moonpool:prefill_seconds",
        "Seconds of all prefills, from the first chunk to the end.",
        f"{_LEFT}: of all its attempts",
    ),
    _counter(
        "moonpool:wasted_prefills",
        "Number of prefills whose attempt gave no complete answer.",
        f"{_LEFT}: its attempts but the one that answered",
    ),
    _counter(
        "moonpool:wasted_prefill_seconds",
        "Seconds of wasted prefills, from the first chunk to the end.",
        "likewise",
    ),
    _counter(
        "moonpool:transfer_seconds",
        "Seconds from the reservation of a decode to the end of its KVCache's transfer.",
        "the end of a transfer, unless its request has ended before",
    ),
    _counter(
        "moonpool:transfers",
        "Number of KVCache transfers to decode instances that have ended.",
        "likewise",
        "outcome",
        ("whole", "broken"),
    ),
    _counter(
        "moonpool:transfer_bytes",
        "Bytes of KVCache received, by transport.",
        f"{_BEAT}: handed over, fetched and copied blocks",
        "transport",
        TRANSPORTS,
    ),
    _counter(
        "moonpool:ssd_bytes",
        "Bytes written to and read from the SSD tier.",
        _BEAT,
        "direction",
        DIRECTIONS,
    ),
    _counter(
        "moonpool:ssd_seconds",
        "Seconds that threads of the SSD tier spent writing and reading.",
        _BEAT,
        "direction",
        DIRECTIONS,
    ),
    _counter(
        "moonpool:prefetched_blocks",
        "Blocks loaded from the SSD ahead of a request, and how many were used or wasted.",
        _BEAT,
        "state",
        ("loaded", "used", "wasted"),
    ),
    _counter("moonpool:step_seconds", "Seconds of engine compute, by role.", _BEAT, "role", ROLES),
    _counter(
        "moonpool:role_switches",
        "Number of instances that switched to a role.",
        "the end of a switch",
        "role",
        ("prefill", "decode"),
    ),
    _counter(
        "moonpool:role_switches_given_up",
        "Number of role switches that were begun but not completed.",
        "a loss, a drain or a timeout during a switch",
    ),
    _counter(
        "moonpool:predictions",
        "Number of predictions compared with the actual value.",
        "first tokens (ttft_s), answers (tbt_s), ended decodes (decoding)",
        "quantity",
    ),
    _counter(
        "moonpool:predictions_too_much",
        "Sum of the overestimates, in the quantity's unit.",
        "likewise",
        "quantity",
    ),
    _counter(
        "moonpool:predictions_too_little",
        "Sum of the underestimates, in the quantity's unit.",
        "likewise",
        "quantity",
    ),
    _counter(
        "moonpool:instance_losses",
        "Number of times that the head lost an instance or an attention worker: it died, hung, or"
        " its connection broke.",
        "a loss that nobody ordered: no drain, upgrade or stop",
        "instance_id",
    ),
    _counter(
        "moonpool:instance_restarts",
        "Number of times that an instance joined as another process than before.",
        "a join, also after an upgrade",
        "instance_id",
    ),
    _counter(
        "moonpool:head_restarts",
        "Number of heads of this cluster that died and were replaced.",
        "the supervisor; it outlives heads, so the counter does too",
    ),
    _counter(
        "moonpool:head_upgrades",
        "Number of heads of this cluster that handed over to another release.",
        "likewise",
    ),
    _counter(
        "moonpool:trace_spans", "Number of spans that a collector accepted.", "the trace exporter"
    ),
    _counter(
        "moonpool:lost_trace_spans",
        "Number of spans that were lost: the queue was full, or the collector failed.",
        "the trace exporter",
    ),
)

HISTOGRAMS = (
    _histogram(
        "vllm:time_to_first_token_seconds",
        "Seconds from arrival to the first token.",
        f"{_FIRST}; not if another head delivered it",
        TTFT_S,
    ),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Seconds between two tokens of an answer.",
        f"{_LEFT}: all gaps of its tokens at once",
        GAP_S,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean seconds between the tokens of a request.",
        f"{_ANSWERED} of two tokens or more",
        GAP_S,
    ),
    _histogram(
        "vllm:e2e_request_latency_seconds",
        "Seconds from arrival to the end of the answer.",
        _ANSWERED,
        REQUEST_S,
    ),
    _histogram(
        "vllm:request_queue_time_seconds",
        "Seconds from arrival to the first prefill chunk of the attempt that answered.",
        _ANSWERED,
        REQUEST_S,
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "Seconds from the first prefill chunk to the first token.",
        _ANSWERED,
        REQUEST_S,
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        "Seconds from the first token to the last.",
        _ANSWERED,
        REQUEST_S,
    ),
    _histogram(
        "vllm:request_inference_time_seconds",
        "Seconds from the first prefill chunk to the last token.",
        _ANSWERED,
        REQUEST_S,
    ),
    _histogram(
        "vllm:request_prompt_tokens", "Number of prompt tokens per request.", _FIRST, TOKENS
    ),
    _histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Number of prompt tokens per request that were computed, because no cache had them.",
        _FIRST,
        TOKENS,
    ),
    _histogram(
        "vllm:request_generation_tokens",
        "Number of tokens per answer.",
        f"{_ANSWERED}; no embeddings",
        TOKENS,
    ),
    _histogram(
        "vllm:request_params_max_tokens",
        "Number of tokens that a request allowed.",
        f"{_ANSWERED}; no embeddings",
        TOKENS,
    ),
    _histogram(
        "vllm:request_params_n",
        "Number of choices per prompt (`n`).",
        "the end of the last answer to a prompt, if all choices have one",
        CHOICES,
    ),
    _histogram(
        "vllm:request_max_num_generation_tokens",
        "Number of tokens of the longest answer among the choices to a prompt.",
        "likewise",
        TOKENS,
    ),
    _histogram(
        "vllm:iteration_tokens_total",
        "Number of prompt tokens computed and tokens generated per step of an engine.",
        _BEAT,
        STEP_TOKENS.bounds,
    ),
    _histogram(
        "vllm:request_num_preemptions",
        "Number of times that a request was preempted on the instance where it decodes.",
        f"{_BEAT}: the end of an attempt there, whatever its outcome",
        ATTEMPT_PREEMPTIONS.bounds,
    ),
    _histogram(
        "moonpool:stage_seconds",
        "Seconds of a request in each stage of the attempt that answered.",
        _ANSWERED,
        REQUEST_S,
        "stage",
    ),
)

INFO = _gauge(
    "vllm:cache_config_info",
    "KVCache of all instances: tokens per block, number of blocks, tokens, and how many requests of"
    " the longest kind it holds.",
    "joins and losses",
    "block_size, num_gpu_blocks, kv_cache_size_tokens, kv_cache_max_concurrency",
)
"""The value of this metric is 1; the information is in its labels."""
CATALOGUE = (*GAUGES, INFO, *COUNTERS, *HISTOGRAMS)

_VLLM_BEAT = "a vLLM server's heartbeat"
CACHE_SOURCE = _gauge(
    "moonpool:engine_cache_source",
    "1 for how it is known what a vLLM server caches: events, assumed or distrusted.",
    _VLLM_BEAT,
    "instance_id, source",
)
CACHE_COUNTS = (
    _counter(
        "moonpool:engine_prompt_tokens",
        "Number of prompt tokens that a vLLM server was sent.",
        _VLLM_BEAT,
        "instance_id",
    ),
    _counter(
        "moonpool:engine_expected_hits",
        "Number of these tokens that it was expected to have in its prefix cache.",
        _VLLM_BEAT,
        "instance_id",
    ),
    _counter(
        "moonpool:engine_prefix_cache_queries",
        "Number of prompt tokens that a vLLM server looked up in its prefix cache.",
        _VLLM_BEAT,
        "instance_id",
    ),
    _counter(
        "moonpool:engine_prefix_cache_hits",
        "Number of prompt tokens that a vLLM server found in its prefix cache.",
        _VLLM_BEAT,
        "instance_id",
    ),
)
OF_ENGINES = (CACHE_SOURCE, *CACHE_COUNTS)
"""Metrics that have samples where vLLM servers are used (see `EngineCaches`)."""


def catalogue_table() -> str:
    """Returns the table of docs/watching.md."""
    lines = ["| metric | kind | meaning | raised by |", "| --- | --- | --- | --- |"]
    for spec in (*CATALOGUE, *OF_ENGINES):
        label = f"{{{spec.label}}}" if spec.label else ""
        name = f"`{spec.exported_name}{label}`"
        lines.append(f"| {name} | {spec.kind} | {spec.meaning} | {spec.raised_by} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(catalogue_table())
