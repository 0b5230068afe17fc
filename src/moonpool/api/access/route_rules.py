"""Rules of who may call which route: the one table that the router, the OpenAPI document and
SECURITY.md follow. A route without a rule here cannot be added to the application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moonpool.protocol.model_offer import POOLING_PATHS

Callers = Literal["everybody", "tenants", "the operator"]
"""`tenants`: callers with a key, if the server has keys. `the operator`: callers with the
operator's key."""
Pages = Literal["all", "own", "none"]
"""Which web pages may call a route. `own`: pages that the server sends itself, and pages of origins
that it allows. On a server with keys, every page needs a key, and no other rule applies."""
CALL_BODY = -1
"""The largest body is `api.max_body_bytes`."""
SMALL_BODY = 64 << 10


@dataclass(frozen=True, slots=True)
class RouteRule:
    """`is_local`: only for clients on the server's own machine (see `local_client`). `body_bytes`:
    the largest body that the route reads."""

    path: str
    callers: Callers
    is_local: bool = False
    pages: Pages = "own"
    body_bytes: int = 0

    @property
    def words(self) -> tuple[str, str, str, str]:
        """Returns who may call, from where, from which web pages, and with how large a body."""
        where = "the server's machine" if self.is_local else "anywhere"
        body = f"{self.body_bytes >> 10} KiB" if self.body_bytes else "none"
        if self.body_bytes == CALL_BODY:
            body = "`api.max_body_bytes`"
        return self.callers, where, self.pages, body


def _open(path: str) -> RouteRule:
    return RouteRule(path, "everybody", pages="all")


def _steering(path: str, body_bytes: int = 0) -> RouteRule:
    return RouteRule(path, "the operator", True, "none", body_bytes)


RULES = {
    rule.path: rule
    for rule in (
        RouteRule("/v1/chat/completions", "tenants", body_bytes=CALL_BODY),
        RouteRule("/v1/completions", "tenants", body_bytes=CALL_BODY),
        *(RouteRule(path, "tenants", body_bytes=CALL_BODY) for path in POOLING_PATHS),
        RouteRule("/v1/responses", "tenants", body_bytes=CALL_BODY),
        RouteRule("/v1/responses/input_tokens", "tenants", body_bytes=CALL_BODY),
        RouteRule("/v1/messages", "tenants", body_bytes=CALL_BODY),
        RouteRule("/v1/messages/count_tokens", "tenants", body_bytes=CALL_BODY),
        RouteRule("/tokenize", "tenants", body_bytes=CALL_BODY),
        RouteRule("/detokenize", "tenants", body_bytes=CALL_BODY),
        RouteRule("/tokenizer_info", "tenants"),
        RouteRule("/v1/models", "tenants"),
        RouteRule("/v1/models/{model_id:path}", "tenants"),
        RouteRule("/server_info", "tenants"),
        RouteRule("/explain/{request_id}", "tenants"),
        RouteRule("/cluster", "tenants"),
        RouteRule("/cluster/events", "tenants"),
        RouteRule("/cluster/hot", "the operator"),
        RouteRule("/cluster/event_log", "the operator"),
        RouteRule("/beliefs", "the operator"),
        _steering("/reset_prefix_cache"),
        _steering("/cluster/drain", SMALL_BODY),
        _steering("/cluster/upgrade", SMALL_BODY),
        _open("/"),
        _open("/docs"),
        _open("/openapi.json"),
        _open("/version"),
        _open("/load"),
        _open("/metrics"),
        _open("/health"),
        _open("/ping"),
        _open("/live"),
        _open("/ready"),
    )
}


class NoRuleError(Exception):
    """A route has no rule, or a rule has no route."""


def rule_of(path: str) -> RouteRule:
    """Raises NoRuleError."""
    if path not in RULES:
        raise NoRuleError(f"the route {path} has no line in RULES, which says who may call it")
    return RULES[path]
