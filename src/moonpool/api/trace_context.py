"""The W3C `traceparent` header: read from a request, and the place of our own span under it."""

from __future__ import annotations

import re
import secrets

import msgspec

from moonpool.types import TraceContext

_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


def read_traceparent(header: bytes, exports: bool) -> TraceContext | None:
    """Returns the context of one call; None if nobody traces it.

    A malformed header counts as none, as the standard demands. `exports`: this server sends spans
    to a collector; it then begins a trace of its own for a call without the header.
    """
    parts = _HEADER.fullmatch(header)
    span_id = secrets.token_hex(8)
    if parts is None or not _is_valid(parts):
        return (
            TraceContext(trace_id=secrets.token_hex(16), span_id=span_id, exported=True)
            if (exports)
            else None
        )
    sampled = bool(int(parts[4], 16) & _SAMPLED)
    return TraceContext(
        trace_id=parts[2].decode(),
        # Without a span of our own, the engine's spans belong under the client's.
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
    """Returns the context of a further answer of the same call: a span of its own."""
    if not context.exported:
        return context
    return msgspec.structs.replace(context, span_id=secrets.token_hex(8))
