"""Reads what the headers of a call say: its SLO, its time limit, and its trace (the W3C
`traceparent`)."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, replace

import msgspec

from moonpool.api.errors import ApiError
from moonpool.api.http_context import HttpContext
from moonpool.api.serving_backend import ModelBackend, RequestRefused
from moonpool.types import Slo, TraceContext

_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The time limits of a call that has arrived."""

    slo: Slo
    timeout_s: float
    arrived_s: float

    @property
    def deadline_s(self) -> float:
        return self.arrived_s + self.timeout_s

    def since(self, arrived_s: float) -> TimeLimits:
        """Returns the same limits for a call that arrived at an earlier head."""
        return replace(self, arrived_s=arrived_s)

    def left_s(self, now: float) -> float:
        """Returns the time to the deadline. Raises RequestRefused if it has passed, which it may
        have while a head was replaced."""
        left_s = self.deadline_s - now
        if left_s <= 0.0:
            text = "the request's deadline passed before its body was read"
            raise RequestRefused(504, "deadline", text)
        return left_s


def limits_of(context: HttpContext, backend: ModelBackend) -> TimeLimits:
    """Returns the limits of a call that arrives now: from its headers if they state any, else from
    the SLO of its class and the server's time limit, which a header can only shorten. Raises
    ApiError."""
    named = context.headers.get(b"x-slo-class", b"").decode("utf-8", "replace")
    levels = backend.slo
    if named and not levels.has(named):
        text = "The header x-slo-class names none of the classes that this server has."
        raise ApiError(text, param="x-slo-class", code="invalid_header")
    names = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-request-timeout-ms"
    own = (seconds_of(context.headers.get(name.encode()), name) for name in names)
    ttft_s, tpot_s, timeout_s = own
    slo = levels.slo_of(named, context.tenant).with_own(ttft_s, tpot_s)
    most_s = backend.request_timeout_s
    timeout_s = most_s if timeout_s is None else min(most_s, timeout_s)
    return TimeLimits(slo, timeout_s, backend.now())


def seconds_of(raw: bytes | str | None, header: str) -> float | None:
    """Returns the seconds of a header in milliseconds, or None if the header is missing. Raises
    ApiError."""
    if raw is None:
        return None
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not 0.0 < value < 1e12:
        text = f"The header {header} must be a number of milliseconds above 0."
        raise ApiError(text, param=header, code="invalid_header")
    return value / 1e3


def tenant_of(key_tenant: str, cache_salt: str | None) -> str:
    """Joins the names of the tenant and the salt. A tenant's name has no '/', so no salt can
    imitate another tenant. No salt begins with '/' in the result (`types.paying`).

    Raises ApiError.
    """
    if cache_salt is None:
        return key_tenant
    if not 0 < len(cache_salt) <= 256:
        raise ApiError("'cache_salt' must have 1 to 256 characters.", param="cache_salt")
    escape = "." if cache_salt.startswith(("/", ".")) else ""
    return f"{key_tenant}/{escape}{cache_salt}"


def read_traceparent(header: bytes, exports: bool) -> TraceContext | None:
    """Returns the trace context of one call, or None if no one traces it.

    A malformed header counts as none, as the standard demands. `exports`: whether this server sends
    spans to a collector; it then begins a new trace for a call without the header.
    """
    parts = _HEADER.fullmatch(header)
    span_id = secrets.token_hex(8)
    if parts is None or not _is_valid(parts):
        if not exports:
            return None
        return TraceContext(trace_id=secrets.token_hex(16), span_id=span_id, exported=True)
    sampled = bool(int(parts[4], 16) & _SAMPLED)
    return TraceContext(
        trace_id=parts[2].decode(),
        # Without a span of the server, the engine's spans belong under the client's span.
        span_id=span_id if exports else parts[3].decode(),
        parent_id=parts[3].decode(),
        sampled=sampled,
        exported=exports and sampled,
    )


def _is_valid(parts: re.Match[bytes]) -> bool:
    """Version 00 has no further parts; 255 and ids of zeros are forbidden."""
    version, trace_id, parent_id, _, more = parts.groups()
    if version == b"ff" or (version == b"00" and more):
        return False
    return bool(trace_id.strip(b"0") and parent_id.strip(b"0"))


def beside(context: TraceContext) -> TraceContext:
    """Returns the context of a further answer of the same call, with a separate span."""
    if not context.exported:
        return context
    return msgspec.structs.replace(context, span_id=secrets.token_hex(8))
