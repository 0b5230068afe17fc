"""The sources of endpoints by their texts, as commands take them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from moonpool.discovery.endpoint import ROLES, EndpointError, SourceError, read_ranks
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
    """A name whose records are the servers. `port` is None for SRV records, which have one each.
    `events`, `replay`: ports of KV events and their replay; 0: none. `ranks`: data-parallel ranks
    of each server."""

    name: str
    port: int | None
    role: Role = Role.MIXED
    events: int = 0
    replay: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class PodSource:
    """The ready pods of a Kubernetes cluster that have these labels. `namespace` "": that of this
    pod. `api`: address of the API; "": that of the cluster in which this is a pod."""

    namespace: str
    selector: str
    port: int
    api: str = ""


Source = FileSource | DnsSource | PodSource


def parse_source(text: str) -> Source:
    """Reads what `--vllm-endpoints` of `serve` or `epp` was given. Raises SourceError."""
    if text.startswith("kube://"):
        return _pod_source(text)
    if not text.startswith(("dns://", "srv://")):
        if not text or "://" in text:
            raise SourceError(f"{text!r} is no source: use a file, dns://, srv:// or kube://")
        return FileSource(text)
    form = "dns://NAME:PORT or srv://NAME, then optionally ?role=prefill&events=5557&replay=5558"
    try:
        split = urlsplit(text)
        asked = parse_qs(split.query, strict_parsing=bool(split.query))
        port = split.port
        known = set(asked) <= {"role", "events", "replay", "ranks"}
        role = ROLES[asked.get("role", [""])[0]]
        events, replay = (_port(asked.get(key, ["0"])[0], 0) for key in ("events", "replay"))
        ranks = read_ranks(asked.get("ranks", ["1"])[0], "ranks")
    except (ValueError, KeyError):
        raise SourceError(f"{text!r} is no source: use {form}") from None
    name, is_srv = split.hostname or "", split.scheme == "srv"
    if not known or not _DNS_NAME.fullmatch(name) or (port is None) is not is_srv or split.path:
        raise SourceError(f"{text!r} is no source: use {form}")
    if replay and not events:
        raise SourceError(f"{text!r} has a port of replay, and none of events")
    return DnsSource(name, port, role, events, replay, ranks)


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


def _pod_source(text: str) -> PodSource:
    """Raises SourceError."""
    try:
        split = urlsplit(text)
        asked = parse_qs(split.query, strict_parsing=True)
        port = _port(asked.pop("port")[0])
        api = asked.pop("api", [""])[0]
        selector = split.path.removeprefix("/")
        is_right = not asked and _LABELS.fullmatch(selector) is not None
        is_right &= not api or urlsplit(api).scheme in ("http", "https")
    except (ValueError, KeyError):
        is_right = False
    if not is_right:
        form = "kube://NAMESPACE/LABEL=VALUE,LABEL=VALUE?port=8000, then optionally &api=URL"
        raise SourceError(f"{text!r} is no source: use {form}")
    return PodSource(split.netloc, selector, port, api)


def _port(value: str, least: int = 1) -> int:
    number = int(value)
    if not least <= number <= 65535:
        raise EndpointError("out of range")
    return number
