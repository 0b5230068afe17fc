"""API keys: where they come from, whom they name, and what their holders may see.

Keys belong in a file or in the environment: a command line shows in `ps`. A file has a key on each
line, then optionally the tenant's name and its share:

    # key                tenant   share
    sk-4f1c2e...         search   2
    sk-90ab77...         chat
    sk-operator-...      admin
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ADMIN = "admin"
"""The tenant that sees and steers the whole cluster."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_SHARE = 1000.0


class KeyFileError(ValueError):
    """Keys are malformed; the text names the line, and never the key."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """`tenants` maps a key to its tenant, `shares` a tenant to its weight."""

    tenants: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def admins(self) -> frozenset[str]:
        """The tenants that see the whole cluster. With one key, its holder is the operator."""
        names = frozenset(self.tenants.values())
        return names & {ADMIN} if ADMIN in names or len(names) > 1 else names


NO_KEYS = ApiKeys()


def collect_keys(given: tuple[str, ...], file_text: str, admin_key: str) -> ApiKeys:
    """Joins keys of the configuration, of a key file and of the operator. Raises KeyFileError."""
    tenants = {key: f"key{number}" for number, key in enumerate(given)}
    shares: dict[str, float] = {}
    for number, line in enumerate(file_text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        tenant, share = _read_line(words, f"key{len(tenants)}", number)
        if words[0] in tenants:
            raise KeyFileError(f"line {number} repeats the key of tenant {tenants[words[0]]!r}")
        tenants[words[0]] = tenant
        if share is not None:
            shares[tenant] = share
    if admin_key:
        if admin_key in tenants:
            raise KeyFileError("the operator's key is also a tenant's key")
        tenants[admin_key] = ADMIN
    for key in tenants:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise KeyFileError("a key must be ASCII text without spaces")
    return ApiKeys(tenants, shares)


def _read_line(words: list[str], default: str, number: int) -> tuple[str, float | None]:
    if len(words) > 3:
        raise KeyFileError(f"line {number} must have a key, a tenant and a share, not more")
    tenant = words[1] if len(words) > 1 else default
    if not _NAME.fullmatch(tenant):
        raise KeyFileError(f"line {number}: a tenant's name has letters, digits, '.', '_' and '-'")
    if len(words) < 3:
        return tenant, None
    try:
        share = float(words[2])
    except ValueError:
        share = 0.0
    if not 0 < share <= MAX_SHARE:
        raise KeyFileError(f"line {number}: a share is a number above 0, at most {MAX_SHARE:g}")
    return tenant, share


class KeyRing:
    """Recognises keys. It keeps their hashes only, and takes the same time whichever matches."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._tenants = [(_digest(key.encode()), tenant) for key, tenant in tenants.items()]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, key: bytes) -> str | None:
        """Returns the tenant of a key, or None if it is unknown."""
        given, found = _digest(key), None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
