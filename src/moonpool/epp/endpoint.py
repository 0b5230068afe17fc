"""The endpoints among which the picker chooses, as a source lists them."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address

import msgspec

from moonpool.config.tables import VllmAddress
from moonpool.types import Role, Struct

ROLE_LABEL = "llm-d.ai/role"
EVENTS_LABEL = "moonpool.ai/kv-events-port"
REPLAY_LABEL = "moonpool.ai/kv-replay-port"
ROLES = {
    "prefill": Role.PREFILL,
    "encode-prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "": Role.MIXED,
    "both": Role.MIXED,
    "prefill-decode": Role.MIXED,
    "encode-prefill-decode": Role.MIXED,
}
"""Roles by the value of `ROLE_LABEL`. Other values, such as "encode", are not for this picker."""


class Endpoint(Struct, frozen=True):
    """One server. `name` is unique among the endpoints of a picker. Ports are 0 where there are no
    KV events."""

    name: str
    host: str  # an IP address
    port: int
    role: Role = Role.MIXED
    events_port: int = 0
    replay_port: int = 0

    @property
    def address(self) -> str:
        """Host and port, as the gateway takes them."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def place(self) -> VllmAddress:
        host = bracketed(self.host)
        return VllmAddress(
            url=f"http://{host}:{self.port}",
            events=f"tcp://{host}:{self.events_port}" if self.events_port else "",
            replay=f"tcp://{host}:{self.replay_port}" if self.replay_port else "",
        )


class Listing(Struct, frozen=True):
    """What a source knows: its endpoints, and the priority of each objective by name."""

    endpoints: tuple[Endpoint, ...] = ()
    objectives: dict[str, int] = msgspec.field(default_factory=dict)
    fails_open: bool | None = None  # None: it does not say


class EndpointError(ValueError):
    """An endpoint cannot be used; one line says why."""


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def read_endpoint(
    name: str, host: str, port: str | int, labels: Mapping[str, str]
) -> Endpoint | None:
    """Returns the endpoint; None if its role is not for this picker. Raises EndpointError."""
    role = ROLES.get(labels.get(ROLE_LABEL, ""))
    if role is None:
        return None
    try:
        address = ip_address(host)
    except ValueError:
        raise EndpointError(f"{name}: its address {host!r} is no IP address") from None
    if isinstance(address, IPv6Address) and address.scope_id:
        raise EndpointError(f"{name}: its address {host!r} has a zone")
    return Endpoint(
        name=name,
        host=str(address),
        port=_port(name, "port", port),
        role=role,
        events_port=_port(name, EVENTS_LABEL, labels.get(EVENTS_LABEL, 0), least=0),
        replay_port=_port(name, REPLAY_LABEL, labels.get(REPLAY_LABEL, 0), least=0),
    )


def _port(name: str, what: str, given: str | int, least: int = 1) -> int:
    text = str(given)
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= 65535:
        raise EndpointError(f"{name}: its {what} {text[:20]!r} is no port")
    return int(text)
