"""The salts that clients choose for their prompts. Calls go to the servers unchanged, so the events
of a server's cache contain these salts, and not those that the head of a cluster makes."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from moonpool.types import paying
from moonpool.vllm.actions import CacheEventsReceived
from moonpool.vllm.block_names import ExternalBlocksStored, ForeignEvent, salt_of

_NAME_BYTES = 16


def salted_tenant(payer: str, cache_salt: str | None) -> str:
    """Returns the tenant of a call: its payer, and the salt that its prompt's blocks have."""
    if not cache_salt:
        return paying(payer)
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return paying(payer, hashlib.blake2b(salt, digest_size=_NAME_BYTES).hexdigest())


def with_roots(received: CacheEventsReceived, layout_fingerprint: bytes) -> CacheEventsReceived:
    """Returns the events with the salts that name the blocks of such tenants (`salt_of`)."""
    events = tuple(_with_root(event, layout_fingerprint) for event in received.events)
    return CacheEventsReceived(events, received.lost)


def _with_root(event: ForeignEvent, layout_fingerprint: bytes) -> ForeignEvent:
    if not isinstance(event, ExternalBlocksStored) or event.parent is not None:
        return event
    tenant = salted_tenant("", event.salt)
    return replace(event, salt=salt_of(layout_fingerprint, tenant, event.adapter))
