"""Reads what the headers of a call tell the picker. Names of llm-d come first, older ones after."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from urllib.parse import quote

from moonpool.api.call_headers import seconds_of
from moonpool.api.errors import ApiError
from moonpool.api.models.forwarded_bodies import ForwardedBody
from moonpool.api.program_identity import HEADERS, program_of
from moonpool.config.slo import SloConfig
from moonpool.types import PRIORITY_RANGE, ProgramContext, Slo, Struct

DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"
PREFILL = "x-prefiller-host-port"
RANK = "x-data-parallel-rank"
OWN = (DESTINATION, PREFILL, RANK, "x-encoder-hosts-ports", "x-data-parallel-host-port")
"""Headers that steer a call; if a client sends them, they never reach a server."""
SERVED = "x-gateway-destination-endpoint-served"
"""Which of the addresses in DESTINATION the gateway has used, where it had several."""
DROPPED = "x-llm-d-request-dropped-reason"
TTFT = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
SLO_CLASS = ("x-slo-class",)
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
    the tenant whose share of the endpoints the call takes; "" means the common tenant of all calls
    without a name."""

    slo: Slo
    timeout_s: float
    priority: int = 0
    payer: str = ""


def read_terms(
    headers: Mapping[str, str], levels: SloConfig, timeout_s: float, objectives: Mapping[str, int]
) -> CallTerms:
    """Returns the terms that the headers of a call state. `levels` apply unless the headers state
    other service levels; a header can only shorten `timeout_s`. `objectives`: priorities by name;
    calls with a higher one go first. Raises ApiError."""
    objective, payer = (_first(headers, names)[1] or "" for names in (OBJECTIVE, FAIRNESS))
    usual = levels.slo_of(_class_name(headers, levels, objective), payer)
    slo = usual.with_own(_seconds(headers, TTFT), _seconds(headers, TPOT))
    own_s = _seconds(headers, TIMEOUT)
    if own_s is not None:
        timeout_s = min(timeout_s, own_s)
    least, most = PRIORITY_RANGE
    priority = min(max(-objectives.get(objective, 0), least), most)
    name = quote(payer, safe="")[:MAX_PAYER_CHARS]
    return CallTerms(slo=slo, timeout_s=timeout_s, priority=priority, payer=name)


def read_program(headers: Mapping[str, str], body: ForwardedBody) -> ProgramContext | None:
    """Returns the program (agent) that a call belongs to, or None if its client names none. Raises
    ApiError."""
    known = {name: headers.get(name.decode(), "").encode("latin-1", "replace") for name in HEADERS}
    return program_of(known, body.vllm_xargs, body.agent_hint, body.prompt_cache_key)


def _class_name(headers: Mapping[str, str], levels: SloConfig, objective: str) -> str:
    """The class of service levels that a call names. An objective is one only if a class has its
    name. Raises ApiError."""
    header, named = _first(headers, SLO_CLASS)
    if named and not levels.has(named):
        text = f"The header {header} names none of the classes that this picker has."
        raise ApiError(text, param=header, code="invalid_header")
    return named or objective


def request_id_of(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


def dropped_reason(error: ApiError) -> str:
    """Returns why a call went to no server, in llm-d's words, or "" if llm-d has no word for it."""
    if error.status == 503:
        stopping = error.code == "server_stopping"
        return "rejected-shutting-down" if stopping else "rejected-no-endpoints"
    return _REASONS.get(error.status, "")


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    for name in names:
        if name in headers:
            return name, headers[name]
    return names[0], None


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    name, text = _first(headers, names)
    return seconds_of(text, name)
