"""Describes an instance as a peer of others."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.link.tls import PeerTls
from moonpool.types import InstanceId


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """This instance as its peers know it: its name, the cluster's secret, the address at which it
    listens, and the certificates of connections between machines (None: they are not encrypted).
    Without `use_shared_memory`, peers on this host connect by TCP as well."""

    instance_id: InstanceId
    secret: bytes
    listen_host: str = "127.0.0.1"
    tls: PeerTls | None = None
    use_shared_memory: bool = True
