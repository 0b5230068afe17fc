"""Parses the sources of endpoints from the texts that commands take."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from msgspec.structs import replace

from moonpool.discovery.endpoint import (
    ROLES,
    Endpoint,
    EndpointError,
    SourceError,
    endpoint_at,
    read_ranks,
)
from moonpool.types import Role

_LABELS = re.compile(r"[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*(,[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*)*")
_DNS_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._:-]{0,251}[A-Za-z0-9])?\.?", re.ASCII)
_SHORT = re.compile(r"(?:(?P<role>[a-z-]+)=)?(?P<name>[^:=]+)(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file in llm-d's `endpoints.yaml` form."""

    path: str


@dataclass(frozen=True, slots=True)
class DnsSource:
    """A name whose records are the servers. `port` is None for SRV records, each of which has a
    port. `events`, `replay`: ports of KV events and their replay; 0 means that there are none.
    `ranks`: number of data-parallel ranks of each server; 0 means that each server is asked."""

    name: str
    port: int | None
    role: Role = Role.MIXED
    events: int = 0
    replay: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class PodSource:
    """The ready pods of a Kubernetes cluster that have these labels. An empty `namespace` means
    that of this pod. `api`: address of the API; "" means the cluster in which this process runs as
    a pod."""

    namespace: str
    selector: str
    port: int
    api: str = ""


@dataclass(frozen=True, slots=True)
class RayActorSource:
    """The actors of a Ray cluster that are alive and have such a name, in which * stands for any
    text. An empty `namespace` means all namespaces. `port`: the port for names that do not end with
    one (as vllm-0:8001 does), or None if all names do. `api`: address of Ray's dashboard; if it is
    "", it is found as Ray's own programs find it. Others: as in `DnsSource`."""

    namespace: str
    name: str
    port: int | None = None
    role: Role = Role.MIXED
    events: int = 0
    replay: int = 0
    ranks: int = 1
    api: str = ""


@dataclass(frozen=True, slots=True)
class RayServeSource:
    """The replicas of an application of Ray Serve that have ports of their own. Others: as in
    `RayActorSource`."""

    application: str
    role: Role = Role.MIXED
    events: int = 0
    replay: int = 0
    ranks: int = 1
    api: str = ""


def server_of(
    source: DnsSource | RayActorSource | RayServeSource, name: str, host: str, port: object
) -> Endpoint:
    """Returns one server of a source. Raises EndpointError as `endpoint_at`."""
    return replace(
        endpoint_at(name, host, port, source.role),
        events_port=source.events,
        replay_port=source.replay,
        num_ranks=source.ranks,
    )


Source = FileSource | DnsSource | PodSource | RayActorSource | RayServeSource

_FORMS = {
    "dns": "dns://NAME:PORT",
    "srv": "srv://NAME",
    "kube": "kube://NAMESPACE/LABEL=VALUE,LABEL=VALUE?port=8000, then optionally &api=URL",
    "ray": "ray://NAMESPACE/ACTOR?port=8000, then optionally &api=http://HOST:8265 (the dashboard)",
    "ray-serve": "ray-serve://APPLICATION, then optionally ?api=http://HOST:8265 (the dashboard)",
}
"""By scheme."""


def parse_source(text: str) -> Source:
    """Reads what `--vllm-endpoints` of `serve` or `epp` was given. Raises SourceError."""
    scheme, mark, _ = text.partition("://")
    if not mark and text:
        return FileSource(text)
    if scheme not in _FORMS:
        schemes = ", ".join(f"{each}://" for each in _FORMS)
        raise SourceError(f"{text!r} is no source: use a file, {schemes}")
    try:
        split, asked = _split(text)
        source = _SOURCES[scheme](split, asked)
        is_right = not asked  # whether each option was used
    except EndpointError as error:
        raise SourceError(f"{text!r} is no source: {error}") from None
    except (ValueError, KeyError):
        is_right = False
    if not is_right:
        options = "" if scheme == "kube" else "; options are role, events, replay and ranks"
        raise SourceError(f"{text!r} is no source: use {_FORMS[scheme]}{options}")
    return source


def read_dns_name(text: str) -> DnsSource:
    """Reads NAME:PORT, or the name of a service such as _vllm._tcp.NAME, with ROLE= before it where
    all its endpoints have a role. Raises SourceError."""
    found = _SHORT.fullmatch(text)
    if found is None or not _DNS_NAME.fullmatch(found["name"]):
        raise SourceError(f"{text!r} must be NAME:PORT or _SERVICE._tcp.NAME")
    role, name, port = found["role"] or "", found["name"], found["port"]
    if role not in ROLES:
        known = ", ".join(filter(None, ROLES))
        raise SourceError(f"{text!r}: the role {role!r} is none of {known}")
    is_port = port is not None and 0 < int(port) <= 65535
    if is_port is name.startswith("_") or (port is not None and not is_port):
        raise SourceError(f"{text!r} must be NAME:PORT or _SERVICE._tcp.NAME")
    return DnsSource(name, int(port) if is_port else None, ROLES[role])


def _split(text: str) -> tuple[SplitResult, dict[str, str]]:
    """The parts of a source's text, and its options. Raises ValueError."""
    split = urlsplit(text)
    asked = parse_qs(split.query, strict_parsing=bool(split.query))
    if split.fragment or any(len(values) > 1 for values in asked.values()):
        raise ValueError("more than a source")
    return split, {key: values[0] for key, values in asked.items()}


def _dns_source(split: SplitResult, asked: dict[str, str]) -> DnsSource:
    """Takes the options that it knows out of `asked`, as the functions below also do. Raises
    ValueError and KeyError."""
    name, port = split.hostname or "", split.port
    if not _DNS_NAME.fullmatch(name) or (port is None) is not (split.scheme == "srv") or split.path:
        raise ValueError("no name")
    return DnsSource(name, port, **_of_each_server(asked))


def _pod_source(split: SplitResult, asked: dict[str, str]) -> PodSource:
    selector = split.path.removeprefix("/")
    if not _LABELS.fullmatch(selector):
        raise ValueError("no labels")
    return PodSource(split.netloc, selector, _port(asked.pop("port")), _api(asked))


def _actor_source(split: SplitResult, asked: dict[str, str]) -> RayActorSource:
    name, namespace = unquote(split.path.removeprefix("/")), unquote(split.netloc)
    if not name or ":" in split.netloc:  # the address of a Ray client has this form
        raise ValueError("no actor")
    port = _port(asked.pop("port")) if "port" in asked else None
    return RayActorSource(namespace, name, port, **_of_each_server(asked), api=_api(asked))


def _serve_source(split: SplitResult, asked: dict[str, str]) -> RayServeSource:
    if not split.netloc or split.path:
        raise ValueError("no application")
    return RayServeSource(unquote(split.netloc), **_of_each_server(asked), api=_api(asked))


_SOURCES: Mapping[str, Callable[[SplitResult, dict[str, str]], Source]] = {
    "dns": _dns_source,
    "srv": _dns_source,
    "kube": _pod_source,
    "ray": _actor_source,
    "ray-serve": _serve_source,
}
"""By scheme."""


def _of_each_server(asked: dict[str, str]) -> dict[str, Any]:
    """The options that say what each server of a source is. Raises EndpointError."""
    ports = {key: _port(asked.pop(key, "0"), 0) for key in ("events", "replay")}
    if ports["replay"] and not ports["events"]:
        raise EndpointError("it has a port of replay, and none of events")
    role = asked.pop("role", "")
    if role not in ROLES:
        raise EndpointError(f"the role {role[:40]!r} is none of {', '.join(filter(None, ROLES))}")
    ranks = read_ranks(asked.pop("ranks", "1"), "ranks")
    return {"role": ROLES[role], "ranks": ranks, **ports}


def _api(asked: dict[str, str]) -> str:
    """Returns the address of an API, or "" if none is named. Raises ValueError."""
    url = asked.pop("api", "")
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ValueError("no address")
    return url


def _port(value: str, least: int = 1) -> int:
    number = int(value)
    if not least <= number <= 65535:
        raise ValueError("out of range")
    return number
