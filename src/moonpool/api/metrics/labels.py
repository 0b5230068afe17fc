"""Bounds of histograms, and the label values that are known beforehand."""

from __future__ import annotations

# vLLM's bounds and some smaller ones, so that quantiles of its dashboards keep their meaning.
# fmt: off
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
GAP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
CHOICES = (1, 2, 5, 10, 20)

_OF_LOAD = (
    "admission_policy",
    "batch_full",
    "decode_load",
    "decode_load_predicted",
    "fair_share",
    "goodput_decode",
    "goodput_prefill",
    "long_queue",
    "no_decode_capacity",
    "no_prefill_capacity",
    "programs_wait",
    "ttft_slo",
)
_OF_STATE = (
    "deadline",
    "head_replaced",
    "no_decode_instance",
    "no_instance",
    "no_prefill_instance",
    "policy_error",
    "server_stopping",
)
_OF_API_LOAD = (
    "rate_limit",
    "too_many_bodies",
    "too_many_calls",
    "too_many_grammars",
    "too_many_large_bodies",
    "too_many_requests",
)
_OF_API = ("answer_differs", "grammar_not_compiled")
_OF_PLACED = (
    "abort",
    "blocks_lost",
    "drained",
    "engine_error",
    "form_lost",
    "head_failed",
    "instance_lost",
    "instances_ended",
    "no_blocks",
    "refused_by_engine",
    "tbt_slo_late",
    "ttft_slo_late",
)
LOAD_REFUSALS = tuple(sorted((*_OF_LOAD, *_OF_API_LOAD)))
"""Reasons of refusals for the load, the SLO or a limit."""
REFUSALS = tuple(sorted((*_OF_LOAD, *_OF_API_LOAD, *_OF_STATE, *_OF_API)))
FAILURES = tuple(sorted((*_OF_PLACED, *_OF_LOAD, *_OF_STATE)))
"""The reasons for which a placed request may fail; a request that is placed again may also be
refused for the load or the state of the cluster."""
ROLES = ("prefill", "decode", "mixed")
TRANSPORTS = ("shm", "tcp", "tls", "nixl")
DIRECTIONS = ("written", "read")
