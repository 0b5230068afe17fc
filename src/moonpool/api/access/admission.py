"""Admits a request to its route, or refuses it: keys, the operator, this machine, web pages.

A browser lets any page send requests to a server on the same machine. A page whose host name
changes to the server's address (DNS rebinding) can also read the answers. An API key stops both
attacks. Without keys, the names in `Host` and `Origin` are checked instead.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from ipaddress import ip_address

from moonpool.api.access.local_client import why_not_local
from moonpool.api.access.route_rules import CALL_BODY, RouteRule
from moonpool.api.errors import ApiError
from moonpool.api.http_context import HttpContext
from moonpool.api.keys import KeyRing
from moonpool.api.serving_backend import ApiOptions
from moonpool.api.turns import FairTurns

_SINGLE = frozenset(
    {
        b"authorization",
        b"x-api-key",
        b"content-type",
        b"content-encoding",
        b"origin",
        b"last-event-id",
        b"x-request-id",
        b"x-request-timeout-ms",
        b"x-resume-tokens",
        b"x-slo-class",
        b"x-slo-ttft-ms",
        b"x-slo-tpot-ms",
    }
)
"""Headers on which a decision depends. A request with two lines of one header is refused, because a
proxy may have read the other line. The parser checks Content-Length, the connection checks Host; of
several traceparents none is used, as the W3C text requires."""
_TRACEPARENT = b"traceparent"
_LOCAL_NAMES = frozenset({"localhost", "localhost."})
_HOSTS_FILE = "/etc/hosts"
_PRIVATE_ENDS = (".localhost", ".local", ".internal", ".lan", ".home.arpa", ".test")
"""Ends of host names that nobody can register, so no foreign page has such a name."""
_FORWARDING = frozenset(
    {b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip"}
)
_FORWARDING_STARTS = (b"x-forwarded-", b"x-original-", b"x-envoy-", b"x-proxy")
_FETCH_START = b"sec-fetch-"
"""Headers that only a browser sends."""


class CallerCheck:
    """Checks requests of one server."""

    def __init__(self, options: ApiOptions) -> None:
        self._options = options
        self._keys = KeyRing(options.api_keys)
        self._looks = FairTurns("requests wait to be told from a proxy's", "too_many_requests")
        self._is_shared = len(set(options.api_keys.values())) > 1

    async def admit(self, context: HttpContext, rule: RouteRule) -> None:
        """Finds out which tenant sent the request. Raises ApiError (400, 401, 403, 415, 503), and
        RequestRefused if too many requests already wait for the check whether they come through a
        proxy."""
        if context.kept is not None:  # the head that received the call has checked it already
            context.tenant = context.kept.opening.tenant
            context.is_operator = context.kept.opening.is_operator
            self._own(context)
            return
        _check_single(context)
        most = self._options.max_body_bytes
        context.max_body_bytes = most if rule.body_bytes == CALL_BODY else rule.body_bytes
        if rule.callers == "everybody":
            return
        if self._keys:
            context.tenant = self._tenant(context)
            context.is_operator = context.tenant in self._options.operators
        self._own(context)
        if rule.callers == "the operator" and not context.is_operator:
            text = "This endpoint needs the operator's key, because it shows or steers all tenants."
            raise ApiError(text, status=403, code="admin_key_required")
        if rule.is_local:
            await self._check_local(context)
        if rule.pages == "none":
            _check_from_no_page(context)
        elif not self._keys:
            self._check_page(context)

    def _own(self, context: HttpContext) -> None:
        """Finds out to whose share of the buffers the request belongs. Raises ApiError (503)."""
        context.belong_to(context.tenant if self._is_shared else "")

    def _tenant(self, context: HttpContext) -> str:
        """Returns the tenant of the request's key."""
        scheme, _, given = context.headers.get(b"authorization", b"").partition(b" ")
        other = context.headers.get(b"x-api-key")  # Anthropic's clients send the key in this header
        if not scheme:
            scheme, given = b"bearer", other or b""
        elif other is not None and other.strip() != given.strip():
            text = "The headers Authorization and X-Api-Key have different keys. Send one of them."
            raise ApiError(text, code="invalid_header")
        found = self._keys.tenant_of(given.strip()) if scheme.lower() == b"bearer" else None
        if found is None:
            raise ApiError(
                "The API key is missing or invalid. Send the header 'Authorization: Bearer KEY'.",
                status=401,
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return found

    # This machine

    async def _check_local(self, context: HttpContext) -> None:
        """With keys, the operator's key is the proof, and the address check prevents its use from
        other machines. Without keys, the process at the other end of the connection is the
        proof."""
        name = next(filter(_is_forwarding, context.headers), None)
        why = f"a proxy has forwarded it ({name.decode('latin-1')})" if name else ""
        client = context.client
        if not why and not (client and _is_loopback(client[0])):
            why = "it comes from another machine"
        if not why and not self._keys:
            async with self._looks.turn(context.party):
                why = await asyncio.to_thread(why_not_local, context.client, context.server)
        if why:
            text = f"This endpoint is open to the server's own machine only, and {why}."
            hint = " Give the server keys (--api-key-file), and send the operator's."
            hint = "" if self._keys or name else hint
            raise ApiError(text + hint, status=403, code="not_local")

    # Web pages

    @cached_property
    def _own_names(self) -> frozenset[str]:
        names = {socket.gethostname(), *_names_in_file(), *self._options.allowed_hosts}
        return frozenset(name.lower() for name in names)

    def _check_page(self, context: HttpContext) -> None:
        """Raises ApiError for what a foreign web page may have sent to a server without keys."""
        host = _text(context, b"host")
        if _is_on_this_machine(context) and not self._is_known(host):
            raise _foreign(
                f"This server has no keys and does not know the host {host[:100]!r}, which a web"
                " page may have made up. Use the server's address, name the host by --allowed-host,"
                " or give the server keys."
            )
        allowed = self._options.allowed_origins
        origin = _text(context, b"origin")
        if "*" in allowed or origin in allowed:
            return
        site, mode = _text(context, b"sec-fetch-site"), _text(context, b"sec-fetch-mode")
        is_foreign = (
            origin.partition("://")[2].lower() != host.lower()
            if origin
            else (site in ("cross-site", "same-site") and mode != "navigate")
        )
        if is_foreign:
            raise _foreign(
                "A web page of another origin has sent this request. Allow its origin by"
                " --allowed-origin, or give the server keys."
            )

    def _is_known(self, host: str) -> bool:
        """Whether no other website can have this host name: it is an address, a name that nobody
        can register, or the server's own name."""
        name = _name_of(host).lower().rstrip(".")
        return _is_address_or_private(name) or name in self._own_names


def _check_single(context: HttpContext) -> None:
    if len(context.headers) == len(context.scope["headers"]):
        return
    counts = Counter(name for name, _ in context.scope["headers"])
    twice = next((name.decode() for name in counts if counts[name] > 1 and name in _SINGLE), "")
    if twice:
        text = f"The header {twice} came more than once. Send it once."
        raise ApiError(text, param=twice, code="invalid_header")
    if counts[_TRACEPARENT] > 1:
        del context.headers[_TRACEPARENT]


def _check_from_no_page(context: HttpContext) -> None:
    """Raises `ApiError` for a request that a web page in a local browser might have sent."""
    host = _text(context, b"host")
    names_other = bool(host) and not _is_local_name(_name_of(host))
    if names_other or any(map(_is_of_page, context.headers)):
        raise _foreign("This endpoint takes no requests of web pages or for another host's name.")
    content_type = context.headers.get(b"content-type", b"").split(b";", 1)[0].strip().lower()
    has_body = context.headers.get(b"content-length", b"0") != b"0"
    has_body = has_body or b"transfer-encoding" in context.headers
    if content_type != b"application/json" and (content_type or has_body):
        text = "The Content-Type of the request must be application/json."
        raise ApiError(text, status=415, code="unsupported_media_type")


def _is_of_page(name: bytes) -> bool:
    return name == b"origin" or name.startswith(_FETCH_START)


def _names_in_file() -> Iterator[str]:
    """Yields the names that this machine resolves by itself, so that no page can change them."""
    with suppress(OSError, UnicodeDecodeError), open(_HOSTS_FILE, encoding="utf-8") as file:
        for line in file:
            address, *names = line.partition("#")[0].split() or ("",)
            if address not in ("", "0.0.0.0", "::"):  # noqa: S104 - names that are blocked
                yield from names


def _foreign(text: str) -> ApiError:
    return ApiError(text, status=403, code="foreign_origin")


def _text(context: HttpContext, name: bytes) -> str:
    return context.headers.get(name, b"").decode("latin-1").strip()


def _is_forwarding(name: bytes) -> bool:
    return name in _FORWARDING or name.startswith(_FORWARDING_STARTS)


def _name_of(host: str) -> str:
    """Returns the name of a Host header, without a port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.strip("[]")


def _is_local_name(name: str) -> bool:
    return name.lower() in _LOCAL_NAMES or _is_loopback(name)


@lru_cache(1024)
def _is_address_or_private(name: str) -> bool:
    if "." not in name or name.endswith(_PRIVATE_ENDS):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


@lru_cache(1024)
def _is_loopback(text: str) -> bool:
    try:
        found = ip_address(text)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def _is_on_this_machine(context: HttpContext) -> bool:
    client, server = context.client, context.server
    if client is None:
        return True
    return _is_loopback(client[0]) or (server is not None and client[0] == server[0])
