"""What the headers of a call say to the picker. Names of llm-d come first, older ones after."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from urllib.parse import quote

from moonpool.api.errors import ApiError
from moonpool.types import PRIORITY_RANGE, Slo, Struct

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
PREFILL = "x-prefiller-host-port"
OWN = (DESTINATION, PREFILL, "x-encoder-hosts-ports", "x-data-parallel-host-port")
"""Headers that steer a call: if a client sends them, they never reach a server."""
SERVED = "x-gateway-destination-endpoint-served"
"""Which of the addresses in DESTINATION the gateway has used, where it had several."""
DROPPED = "x-llm-d-request-dropped-reason"
TTFT = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TIMEOUT = ("x-request-timeout-ms",)
FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
MAX_PAYER_CHARS = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+=-]{1,128}")
_REASONS = {
    429: "rejected-saturated",
    422: "rejected-slo",
    504: "rejected-ttl-expired",
}


class CallTerms(Struct, frozen=True):
    """The service levels of a call, its time limit, and its priority: lower ones go first. `payer`:
    the tenant whose share of the endpoints it takes; "": that of all who name none."""

    slo: Slo
    timeout_s: float
    priority: int = 0
    payer: str = ""


def read_terms(
    headers: Mapping[str, str], usual: Slo, timeout_s: float, objectives: Mapping[str, int]
) -> CallTerms:
    """`usual` and `timeout_s` hold unless the headers say otherwise. `objectives`: priorities by
    name, of which higher ones go first. Raises ApiError."""
    ttft_ms, tpot_ms = _milliseconds(headers, TTFT), _milliseconds(headers, TPOT)
    slo = usual
    if ttft_ms is not None or tpot_ms is not None:
        slo = Slo(
            ttft_s=usual.ttft_s if ttft_ms is None else ttft_ms / 1e3,
            tbt_s=usual.tbt_s if tpot_ms is None else tpot_ms / 1e3,
            ttft_stated=usual.ttft_stated or ttft_ms is not None,
            tbt_stated=usual.tbt_stated or tpot_ms is not None,
        )
    timeout_ms = _milliseconds(headers, TIMEOUT)
    if timeout_ms is not None:
        timeout_s = min(timeout_s, timeout_ms / 1e3)
    _, objective = _first(headers, OBJECTIVE)
    least, most = PRIORITY_RANGE
    priority = min(max(-objectives.get(objective or "", 0), least), most)
    _, payer = _first(headers, FAIRNESS)
    name = quote(payer or "", safe="")[:MAX_PAYER_CHARS]
    return CallTerms(slo=slo, timeout_s=timeout_s, priority=priority, payer=name)


def request_id_of(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def dropped_reason(error: ApiError) -> str:
    """Why a call went to no server, in llm-d's words."""
    if error.status == 503:
        stopping = error.code == "server_stopping"
        return "rejected-shutting-down" if stopping else "rejected-no-endpoints"
    return _REASONS.get(error.status, "")


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    for name in names:
        if name in headers:
            return name, headers[name]
    return names[0], None


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    name, text = _first(headers, names)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < 1e12:
        text = f"The header {name} must be a number of milliseconds above 0."
        raise ApiError(text, param=name, code="invalid_header")
    return value
