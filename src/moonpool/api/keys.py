"""API keys: where they come from, whom they name, and what their holders may see.

Keys belong in a file or in the environment: a command line shows in `ps`. A file has a key on each
line, then optionally the tenant's name and its share:

    # key                tenant   share
    sk-4f1c2e...         search   2
    sha256:9f86d081...   chat
    sk-operator-...      admin

A key may stand as "sha256:" and its digest (`printf %s "$KEY" | sha256sum`), so that the file does
not give it away.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEYS_VARIABLE = "MOONPOOL_API_KEY"
"""API keys in the environment, separated by commas or spaces."""
ADMIN_KEY_VARIABLE = "MOONPOOL_ADMIN_KEY"
ADMIN = "admin"
"""The tenant that sees and steers the whole cluster."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_SHARE = 1000.0
_HASHED = "sha256:"


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


def read_keys(given: tuple[str, ...], path: str, environment: Mapping[str, str]) -> ApiKeys:
    """Reads the keys of configuration, file ("": none) and environment. Raises KeyFileError."""
    try:
        text = Path(path).read_text(encoding="utf-8") if path else ""
        named = environment.get(KEYS_VARIABLE, "").replace(",", " ").split()
        operator = environment.get(ADMIN_KEY_VARIABLE, "").strip()
        return collect_keys((*given, *named), text, operator)
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"cannot read the API keys in {path}: {error}") from None
    except KeyFileError as error:
        where = path or f"{KEYS_VARIABLE} and {ADMIN_KEY_VARIABLE}"
        raise KeyFileError(f"API keys ({where}): {error}") from None


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
        if key.startswith(_HASHED) and not _DIGEST.fullmatch(key):
            raise KeyFileError("a hashed key is sha256: and 64 hexadecimal digits")
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
        self._tenants = [(_kept_digest(key), tenant) for key, tenant in tenants.items()]

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant_of(self, key: bytes) -> str | None:
        """Returns the tenant of a key, or None if it is unknown."""
        given, found = _digest(key), None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def _kept_digest(key: str) -> bytes:
    """The digest of a key, or the one that stands in its place."""
    if _DIGEST.fullmatch(key):
        return bytes.fromhex(key.removeprefix(_HASHED))
    return _digest(key.encode())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
