"""A server as a source lists it, by the labels that llm-d and moonpool know."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from moonpool.config.vllm import split_rank
from moonpool.types import Role, Struct

ROLES = {
    "": Role.MIXED,
    "both": Role.MIXED,
    "mixed": Role.MIXED,
    "prefill-decode": Role.MIXED,
    "encode-prefill-decode": Role.MIXED,
    "prefill": Role.PREFILL,
    "encode-prefill": Role.PREFILL,
    "decode": Role.DECODE,
}
"""Roles by the value of `ROLE_LABEL`."""
ENCODER = "encode"
"""The role of a server that computes no text."""
ROLE_LABEL = "llm-d.ai/role"
PREFIX, OLDER_PREFIX = "moonpool.dev/", "moonpool.ai/"
EVENTS_LABEL, REPLAY_LABEL = f"{PREFIX}kv-events-port", f"{PREFIX}kv-replay-port"
RANKS_LABEL = f"{PREFIX}data-parallel-size"
OLDER_LABELS = f"labels that begin with {OLDER_PREFIX} are deprecated: write {PREFIX} instead"
MAX_RANKS = 64
ALL_RANKS = "all"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}", re.ASCII)


class SourceError(ValueError):
    """A source cannot be read; one line. What the source listed last remains valid."""


class EndpointError(ValueError):
    """One endpoint cannot be used; one line gives the reason. Other endpoints of its source can be
    used."""


class Endpoint(Struct, frozen=True):
    """One server. `name` is unique within a source. Ports are 0 without KV events. `num_ranks`:
    number of its data-parallel ranks, each of which is an instance (see `ranks`); 0 means as many
    as the server says. `rank`: the number of this rank, or None if there are no others."""

    name: str
    host: str  # an IP address or host name
    port: int
    role: Role = Role.MIXED
    events_port: int = 0
    replay_port: int = 0
    num_ranks: int = 1
    rank: int | None = None

    @property
    def address(self) -> str:
        """Returns host and port, in a gateway's notation."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def place(self) -> str:
        """The address in the form that `--vllm` takes."""
        at = "" if self.rank is None else f"@{self.rank}"
        ports = [number for number in (self.events_port, self.replay_port) if number]
        host = bracketed(self.host)
        return ",".join([f"http://{self.address}{at}", *(f"tcp://{host}:{n}" for n in ports)])

    @property
    def has_ip(self) -> bool:
        try:
            ip_address(self.host)
        except ValueError:
            return False
        return True

    def ranks(self, found: int = 1) -> tuple[Endpoint, ...]:
        """Returns one endpoint for each of its data-parallel ranks: rank N of vLLM uses the Nth
        port after the first rank's for its events. `found`: the number of ranks that the server
        states."""
        if self.num_ranks == 1:
            return (self,)
        return tuple(
            replace(
                self,
                name=f"{self.name}.{rank}",
                events_port=self.events_port and self.events_port + rank,
                replay_port=self.replay_port and self.replay_port + rank,
                num_ranks=1,
                rank=rank,
            )
            for rank in range(self.num_ranks or found)
        )


class Listing(Struct, frozen=True):
    """What a source knows: its endpoints, and the priority of each objective by name. `is_whole`:
    whether all parts of the source have been read once."""

    endpoints: tuple[Endpoint, ...] = ()
    objectives: dict[str, int] = msgspec.field(default_factory=dict)
    fails_open: bool | None = None  # None means that the source does not tell it
    is_whole: bool = True


class Notice:
    """A warning that is logged when its text changes."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said = ""

    def say(self, text: str) -> None:
        if text and text != self._said:
            self._log.warning("%s", text)
        self._said = text


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def endpoint_at(name: str, host: str, port: object, role: Role = Role.MIXED) -> Endpoint:
    """Raises EndpointError for a name, an address or a port that can be none."""
    if not _NAME.fullmatch(name):
        raise EndpointError(f"{name[:80]!r} is no name: use letters, digits, '.', '_' and '-'")
    return Endpoint(name=name, host=_host(name, host), port=_port(name, "port", port), role=role)


def labelled_endpoint(
    name: str, host: str, port: object, labels: Mapping[str, Any]
) -> Endpoint | None:
    """The server at an address, as its labels say, or None if it computes no text. Raises
    EndpointError."""
    found, role = endpoint_at(name, host, port), str(labels.get(ROLE_LABEL, ""))
    if role == ENCODER:
        return None
    if role not in ROLES:
        known = ", ".join(filter(None, ROLES))
        raise EndpointError(f"{name}: the label {ROLE_LABEL} is {role[:40]!r}: use {known}")
    events, replay = (
        _port(name, f"label {key}", _label(labels, key, 0), least=0)
        for key in (EVENTS_LABEL, REPLAY_LABEL)
    )
    if replay and not events:
        raise EndpointError(f"{name}: the label {REPLAY_LABEL} needs {EVENTS_LABEL}")
    ranks = f"{name}: the label {RANKS_LABEL}"
    return replace(
        found,
        role=ROLES[role],
        events_port=events,
        replay_port=replay,
        num_ranks=read_ranks(_label(labels, RANKS_LABEL, 1), ranks),
    )


def has_older_labels(labels: Mapping[str, Any]) -> bool:
    return any(isinstance(key, str) and key.startswith(OLDER_PREFIX) for key in labels)


def endpoint_of(name: str, role: Role, place: str) -> Endpoint:
    """The endpoint whose `place` this is."""
    url, *others = place.split(",")
    base, rank = split_rank(url)
    web = urlsplit(base)
    ports = [urlsplit(each).port or 0 for each in others]
    return Endpoint(
        name=name,
        host=web.hostname or "",
        port=web.port or 80,
        role=role,
        events_port=ports[0] if ports else 0,
        replay_port=ports[1] if len(ports) > 1 else 0,
        rank=rank,
    )


def read_ranks(value: object, what: str) -> int:
    """Reads a number of data-parallel ranks; 0 means that the server is asked. Raises
    EndpointError."""
    text = str(value)
    if text == ALL_RANKS:
        return 0
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_RANKS:
        most = f"use 1 to {MAX_RANKS}, or {ALL_RANKS}"
        raise EndpointError(f"{what} is {text[:40]!r}, no number of ranks: {most}")
    return int(text)


def _label(labels: Mapping[str, Any], key: str, otherwise: object) -> object:
    """Returns the label, or the label with its former name."""
    older = OLDER_PREFIX + key.removeprefix(PREFIX)
    return labels.get(key, labels.get(older, otherwise))


def _host(name: str, host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        if not _HOST.fullmatch(host):
            raise EndpointError(f"{name}: {host[:80]!r} is no address") from None
        return host.lower()
    if isinstance(address, IPv6Address) and address.scope_id:
        raise EndpointError(f"{name}: its address {host[:80]!r} has a zone")
    return str(address)


def _port(name: str, what: str, given: object, least: int = 1) -> int:
    text = str(given)
    if not text.isascii() or not text.isdigit() or not least <= int(text[:9]) <= 65535:
        raise EndpointError(f"{name}: its {what} {text[:20]!r} is no port")
    return int(text)
