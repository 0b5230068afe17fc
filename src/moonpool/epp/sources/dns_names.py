"""Endpoints from DNS: the addresses of a name (A and AAAA) with one port, or a service (SRV).

Names are looked up again when their records expire, every 2 to 10 seconds. A resolver may leave out
some of many records, so an endpoint is gone when two lookups in a row lack it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver

from moonpool.discovery.listed_server import SourceError
from moonpool.epp.endpoint import ROLE_LABEL, ROLES, Endpoint, Listing, read_endpoint
from moonpool.log_limit import limited_logger
from moonpool.types import Struct

log = limited_logger("moonpool.epp")

LEAST_S, MOST_S = 2.0, 10.0
LOOKUP_S = 5.0
_NAME = re.compile(
    r"(?:(?P<role>[a-z-]+)=)?(?P<name>[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,250}[A-Za-z0-9])?\.?)"
    r"(?::(?P<port>\d{1,5}))?"
)


class DnsName(Struct, frozen=True):
    """`port` 0: the name is that of a service, whose SRV records have the ports."""

    name: str
    port: int
    role: str


class _LookupError(Exception):
    """The lookup of a name that may exist has failed; one line says why."""


def read_dns_name(text: str) -> DnsName:
    """Reads NAME:PORT, or the name of a service such as _vllm._tcp.NAME, with ROLE= before it where
    all its endpoints have a role. Raises SourceError."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise SourceError(f"{text!r} must be NAME:PORT or _SERVICE._tcp.NAME")
    role, name, port = found["role"] or "", found["name"], int(found["port"] or 0)
    if role not in ROLES:
        raise SourceError(
            f"{text!r}: the role {role!r} is none of {', '.join(filter(None, ROLES))}"
        )
    if bool(port) == name.startswith("_") or port > 65535:
        raise SourceError(f"{text!r} must be NAME:PORT or _SERVICE._tcp.NAME")
    return DnsName(name=name, port=port, role=role)


class DnsNames:
    def __init__(
        self, names: Sequence[DnsName], resolver: dns.asyncresolver.Resolver | None = None
    ) -> None:
        """`resolver`: the machine's own unless given."""
        self._names = names
        self._resolver = resolver
        self._said: dict[DnsName, str] = {}

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """As `EndpointSource.follow`."""
        if self._resolver is None:
            try:
                self._resolver = dns.asyncresolver.Resolver()
            except dns.exception.DNSException as error:
                raise SourceError(f"DNS is not set up on this machine: {error}") from None
        known: dict[DnsName, dict[str, Endpoint]] = {}
        missed: set[str] = set()
        before: Listing | None = None
        while True:
            pause_s = MOST_S
            for name in self._names:
                try:
                    found, ttl_s = await self._look_up(name, self._resolver)
                except _LookupError as error:
                    self._say(name, f"{name.name}: {error}; its endpoints stay as they were")
                    continue
                self._say(name, "")
                once = {
                    key: endpoint
                    for key, endpoint in known.get(name, {}).items()
                    if key not in found and key not in missed
                }
                missed.difference_update(known.get(name, {}))
                missed.update(once)
                known[name] = found | once
                pause_s = min(pause_s, ttl_s)
            endpoints = {key: one for each in known.values() for key, one in each.items()}
            listing = Listing(endpoints=tuple(endpoints.values()))
            if listing != before:
                before = listing
                update(listing)
            await asyncio.sleep(max(LEAST_S, pause_s))

    async def _look_up(
        self, name: DnsName, resolver: dns.asyncresolver.Resolver
    ) -> tuple[dict[str, Endpoint], float]:
        """Returns the endpoints by name, and for how long they hold. Raises _LookupError."""
        if name.port:
            hosts, ttl_s = await self._addresses(name.name, resolver)
            return _endpoints(name, [(host, name.port) for host in hosts]), ttl_s
        records, ttl_s = await self._ask(name.name, "SRV", resolver)
        found: list[tuple[str, int]] = []
        for record in records:
            hosts, _ = await self._addresses(record.target.to_text(), resolver)
            found += [(host, record.port) for host in hosts]
        return _endpoints(name, found), ttl_s

    async def _addresses(
        self, name: str, resolver: dns.asyncresolver.Resolver
    ) -> tuple[list[str], float]:
        four, ttl_s = await self._ask(name, "A", resolver)
        six, other_ttl_s = await self._ask(name, "AAAA", resolver)
        hosts = [record.address for record in (*four, *six)]
        return hosts, min(ttl_s, other_ttl_s)

    async def _ask(
        self, name: str, kind: str, resolver: dns.asyncresolver.Resolver
    ) -> tuple[list[Any], float]:
        """Returns no record of a name that has none. Raises _LookupError."""
        try:
            answer = await resolver.resolve(
                name, kind, raise_on_no_answer=False, lifetime=LOOKUP_S, search=True
            )
        except dns.resolver.NXDOMAIN:
            return [], MOST_S
        except dns.exception.DNSException as error:
            raise _LookupError(" ".join(str(error).split())[:200]) from None
        if answer.rrset is None:
            return [], MOST_S
        return list(answer), float(answer.rrset.ttl)

    def _say(self, name: DnsName, text: str) -> None:
        if text and text != self._said.get(name):
            log.warning("%s", text)
        self._said[name] = text


def _endpoints(name: DnsName, places: Sequence[tuple[str, int]]) -> dict[str, Endpoint]:
    found: dict[str, Endpoint] = {}
    for host, port in places:
        key = f"{host.replace(':', '-')}.{port}"
        endpoint = read_endpoint(key, host, port, {ROLE_LABEL: name.role})
        if endpoint is not None:
            found[key] = endpoint
    return found
