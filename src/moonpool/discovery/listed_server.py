"""A server that a source lists, and the sources by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from moonpool.types import Role

ROLES = {
    "": Role.MIXED,
    "both": Role.MIXED,
    "mixed": Role.MIXED,
    "prefill-decode": Role.MIXED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
}
"""Roles by the value of the label `llm-d.ai/role`."""
MAX_RANKS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_LABELS = re.compile(r"[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*(,[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*)*")
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}", re.ASCII)


class SourceError(ValueError):
    """A source cannot be read; one line. What it listed last stays valid."""


@dataclass(frozen=True, slots=True)
class ListedServer:
    """A vLLM server. `place`: as `--vllm` takes it. Equal servers are the same."""

    name: str
    role: Role
    place: str


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
    role: Role
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
    """Reads what `--vllm-endpoints` was given. Raises SourceError."""
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
        ranks = ranks_of(asked.get("ranks", ["1"])[0], "ranks")
    except (ValueError, KeyError):
        raise SourceError(f"{text!r} is no source: use {form}") from None
    name, is_srv = split.hostname or "", split.scheme == "srv"
    if not known or not _HOST.fullmatch(name) or (port is None) is not is_srv or split.path:
        raise SourceError(f"{text!r} is no source: use {form}")
    if replay and not events:
        raise SourceError(f"{text!r} has a port of replay, and none of events")
    return DnsSource(name, port, role, events, replay, ranks)


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


def server_at(
    host: str, port: int, role: Role, events: int = 0, replay: int = 0, name: str = ""
) -> ListedServer:
    """Makes a server. Raises SourceError for a name or address that can be none."""
    own = name or f"{role.value}-{host.replace(':', '-')}-{port}"
    if not _NAME.fullmatch(own):
        raise SourceError(f"{own[:80]!r} is no name: use letters, digits, '.', '_' and '-'")
    if not _HOST.fullmatch(host):
        raise SourceError(f"{own}: {host[:80]!r} is no address")
    at = f"[{host}]" if ":" in host else host
    ports = [number for number in (events, replay) if number]
    place = ",".join([f"http://{at}:{port}", *(f"tcp://{at}:{number}" for number in ports)])
    return ListedServer(own, role, place)


def servers_at(
    host: str,
    port: int,
    role: Role,
    events: int = 0,
    replay: int = 0,
    name: str = "",
    ranks: int = 1,
) -> list[ListedServer]:
    """Makes a server for each data-parallel rank of one at this address. vLLM's rank N has the Nth
    port after that of the first for its events. Raises SourceError."""
    first = server_at(host, port, role, events, replay, name)
    if ranks == 1:
        return [first]
    found = []
    for rank in range(ranks):
        its_events, its_replay = (base and base + rank for base in (events, replay))
        own = server_at(host, port, role, its_events, its_replay, f"{first.name}.{rank}")
        url, *others = own.place.split(",")
        found.append(ListedServer(own.name, role, ",".join([f"{url}@{rank}", *others])))
    return found


def ranks_of(value: object, what: str) -> int:
    """Reads a number of data-parallel ranks. Raises SourceError."""
    text = str(value)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_RANKS:
        raise SourceError(f"{what}: {text[:40]!r} is no number of ranks, 1 to {MAX_RANKS}")
    return int(text)


def _port(value: object, least: int = 1) -> int:
    number = int(str(value))
    if not least <= number <= 65535:
        raise ValueError("out of range")
    return number


def port_of(value: object, what: str) -> int:
    """Reads a port. Raises SourceError."""
    try:
        return _port(value)
    except ValueError:
        raise SourceError(f"{what}: {str(value)[:40]!r} is no port") from None
