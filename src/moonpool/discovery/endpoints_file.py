"""Reads a file in llm-d's `endpoints.yaml` form (YAML, of which JSON is a part).

    endpoints:
      - name: vllm-0
        address: 10.0.0.1
        port: "8000"
        labels: {llm-d.ai/role: prefill, moonpool.dev/kv-events-port: "5557"}

llm-d needs name, IPv4 address and port. Here the address may be a host name or IPv6, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from moonpool.discovery.listed_server import (
    ROLES,
    ListedServer,
    SourceError,
    port_of,
    ranks_of,
    servers_at,
)

MAX_FILE_BYTES = 1 << 20
"""llm-d's limit, too."""
ROLE = "llm-d.ai/role"
RANKS = "moonpool.dev/data-parallel-size"
EVENTS, REPLAY = "moonpool.dev/kv-events-port", "moonpool.dev/kv-replay-port"


def read_endpoints(path: str) -> tuple[list[ListedServer], list[str]]:
    """Reads the file as it is now. Returns the servers, and why others are left out. Raises
    SourceError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise SourceError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return parse_endpoints(data)
    except SourceError as error:
        raise SourceError(f"{path}: {error}") from None


def parse_endpoints(data: bytes) -> tuple[list[ListedServer], list[str]]:
    """As `read_endpoints`. A wrong entry leaves out no other."""
    try:
        found = yaml.safe_load(data)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise SourceError(f"bad YAML{where}") from None
    except (ValueError, RecursionError):  # a date that is none, or lists within lists
        raise SourceError("bad YAML") from None
    entries = found.get("endpoints") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise SourceError("no list `endpoints:`")
    servers: dict[str, ListedServer] = {}
    problems: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            own = _servers(entry)
            again = next((server.name for server in own if server.name in servers), None)
            if again is not None:
                raise SourceError(f"a second {again!r}")
        except SourceError as error:
            problems.append(f"entry {number}: {error}")
        else:
            servers |= {server.name: server for server in own}
    return list(servers.values()), problems


def _servers(entry: Any) -> list[ListedServer]:
    """One for each data-parallel rank; none of a kind that computes no text, such as an encoder.
    Raises SourceError."""
    if not isinstance(entry, dict):
        raise SourceError("not a mapping with name, address and port")
    name, address = (entry.get(key) for key in ("name", "address"))
    if not isinstance(name, str) or not isinstance(address, str) or not name:
        raise SourceError("name and address must be texts")
    labels = entry.get("labels") or {}
    if not isinstance(labels, dict):
        raise SourceError("labels must be a mapping")
    return labelled_servers(name, address, port_of(entry.get("port"), "port"), labels)


def labelled_servers(
    name: str, address: str, port: int, labels: Mapping[str, Any]
) -> list[ListedServer]:
    """The servers at an address, as these labels say. Raises SourceError."""
    label = str(labels.get(ROLE, ""))
    if label == "encode":
        return []
    if label not in ROLES:
        raise SourceError(
            f"the label {ROLE} is {label[:40]!r}: use {', '.join(filter(None, ROLES))}"
        )
    events, replay = (port_of(labels[key], key) if key in labels else 0 for key in (EVENTS, REPLAY))
    if replay and not events:
        raise SourceError(f"{REPLAY} needs {EVENTS}")
    ranks = ranks_of(labels.get(RANKS, 1), RANKS)
    return servers_at(address, port, ROLES[label], events, replay, name, ranks)
