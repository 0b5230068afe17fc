"""Reads API keys: the tenant that each key names, and what its holder may see and use.

Keys belong in a file or in the environment, because a command line is visible in `ps`. A file has a
key on each line, then optionally the tenant's name, and after it the tenant's limits
(`TenantLimits`) in any order:

    # key                tenant   limits
    sk-4f1c2e...         search   share=2 priority=-1
    sha256:9f86d081...   chat     requests_per_s=5 tokens_per_s=2000 cache=0.25
    sk-operator-...      admin

A key may be written as "sha256:" and its digest (`printf %s "$KEY" | sha256sum`), so that the file
does not reveal the key.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KEYS_VARIABLE = "MOONPOOL_API_KEY"
"""API keys in the environment, separated by commas or spaces."""
ADMIN_KEY_VARIABLE = "MOONPOOL_ADMIN_KEY"
OPERATOR = "admin"
"""The tenant that sees and controls the whole cluster."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_SHARE = 1000.0
MAX_PRIORITY = 1_000_000
_HASHED = "sha256:"
MAX_FILE_BYTES = 16 << 20


class KeyFileError(ValueError):
    """Keys are malformed; the text names the line, and never the key."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of a tenant; their names are those of a key file.

    `share`: its part of an overloaded cluster's tokens, relative to other tenants, which have 1
    each by default. `cache`: its part of an instance's KVCache in memory, and of that on its SSD;
    blocks above it are evicted first. `priority`: the priority of requests without one, and the
    best that a request may ask for (the lowest value is served first). The rates are averages;
    calls and tokens for up to `rate_limits.BURST_S` seconds may arrive at the same time.
    """

    share: float = 1.0
    cache: float = 1.0
    priority: int = 0
    requests_per_s: float = math.inf
    tokens_per_s: float = math.inf  # tokens of prompts and answers


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """`tenants` maps a key to its tenant, `limits` a tenant to its limits."""

    tenants: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, TenantLimits] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """Returns the shares by tenant, for all tenants whose share is not 1."""
        found = {tenant: limits.share for tenant, limits in self.limits.items()}
        return {tenant: share for tenant, share in found.items() if share != 1.0}

    @property
    def cache_shares(self) -> dict[str, float]:
        """Returns the cache shares by tenant, for all tenants whose share is not 1."""
        found = {tenant: limits.cache for tenant, limits in self.limits.items()}
        return {tenant: share for tenant, share in found.items() if share != 1.0}

    @property
    def operators(self) -> frozenset[str]:
        """Returns the tenants that see the whole cluster. If all keys are of one tenant, that
        tenant is the operator."""
        names = frozenset(self.tenants.values())
        return names & {OPERATOR} if OPERATOR in names or len(names) > 1 else names


def read_keys(given: tuple[str, ...], path: str, environment: Mapping[str, str]) -> ApiKeys:
    """Reads the keys of configuration, file ("" means no file) and environment. Raises
    KeyFileError, including for a source that exists and has no key, because the server would be
    open to all."""
    text = _read_file(path) if path else ""
    named = environment.get(KEYS_VARIABLE, "").replace(",", " ").split()
    operator = environment.get(ADMIN_KEY_VARIABLE, "").strip()
    for name, found in ((KEYS_VARIABLE, named), (ADMIN_KEY_VARIABLE, operator)):
        if name in environment and not found:
            raise KeyFileError(f"{name} is set and has no key: set one, or unset the variable")
    try:
        keys = collect_keys((*given, *named), text, operator)
    except KeyFileError as error:
        where = path or f"{KEYS_VARIABLE} and {ADMIN_KEY_VARIABLE}"
        raise KeyFileError(f"API keys ({where}): {error}") from None
    if path and not any(line.partition("#")[0].strip() for line in text.splitlines()):
        raise KeyFileError(f"the key file {path} has no key: write one on a line, or name no file")
    return keys


def _read_file(path: str) -> str:
    """Raises KeyFileError."""
    try:
        with open(path, "rb") as file:
            found = file.read(MAX_FILE_BYTES + 1)
        text = found.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"cannot read the API keys in {path}: {error}") from None
    if len(found) > MAX_FILE_BYTES:
        raise KeyFileError(f"the key file {path} has more than {MAX_FILE_BYTES >> 20} MiB")
    return text


def collect_keys(given: tuple[str, ...], file_text: str, admin_key: str) -> ApiKeys:
    """Joins keys of the configuration, of a key file and of the operator. Raises KeyFileError."""
    tenants = {key: f"key{number}" for number, key in enumerate(given)}
    limits: dict[str, TenantLimits] = {}
    for number, line in enumerate(file_text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        tenant, found = _read_line(words, f"key{len(tenants)}", number)
        if words[0] in tenants:
            raise KeyFileError(f"line {number} repeats the key of tenant {tenants[words[0]]!r}")
        tenants[words[0]] = tenant
        if found:  # all keys of a tenant share its limits
            limits[tenant] = replace(limits.get(tenant, NO_LIMITS), **found)
    if admin_key:
        if admin_key in tenants:
            raise KeyFileError("the operator's key is also a tenant's key")
        tenants[admin_key] = OPERATOR
    for key in tenants:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise KeyFileError("a key must be ASCII text without spaces")
        if key.startswith(_HASHED) and not _DIGEST.fullmatch(key):
            raise KeyFileError("a hashed key is sha256: and 64 hexadecimal digits")
    return ApiKeys(tenants, limits)


def _read_line(words: list[str], default: str, number: int) -> tuple[str, dict[str, Any]]:
    tenant = words[1] if len(words) > 1 else default
    if not _NAME.fullmatch(tenant):
        raise KeyFileError(f"line {number}: a tenant's name has letters, digits, '.', '_' and '-'")
    found: dict[str, Any] = {}
    for place, word in enumerate(words[2:]):
        name, equals, text = word.partition("=")
        if not equals and not place:  # the share may be given without the word `share`
            name, text = "share", word
        try:
            value = _read_limit(name, text)
        except ValueError as error:
            raise KeyFileError(f"line {number}: {error}") from None
        if name in found:
            raise KeyFileError(f"line {number} has {name} twice")
        found[name] = value
    return tenant, found


def _read_limit(name: str, text: str) -> float | int:
    """Raises ValueError with a reason for people."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    match name:
        case "share" if not 0 < value <= MAX_SHARE:
            raise ValueError(f"a share is a number above 0, at most {MAX_SHARE:g}")
        case "cache" if not 0 < value <= 1:
            raise ValueError("cache is a share of each instance's KVCache, above 0 and at most 1")
        case "priority":
            if not abs(value) <= MAX_PRIORITY or value != int(value):
                raise ValueError(f"a priority is a whole number, at most {MAX_PRIORITY} either way")
            return int(value)
        case "requests_per_s" | "tokens_per_s" if not 0 < value < math.inf:
            raise ValueError(f"{name} is a number above 0")
        case "share" | "cache" | "requests_per_s" | "tokens_per_s":
            return value
    known = "share, cache, priority, requests_per_s and tokens_per_s"
    raise ValueError(f"after key and tenant come limits as NAME=NUMBER; the names are {known}")


class KeyRing:
    """Recognises keys. Keeps only the hashes of keys. The search takes the same time whichever key
    matches."""

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
    """Returns the digest of a key, or the digest that is given in place of the key."""
    if _DIGEST.fullmatch(key):
        return bytes.fromhex(key.removeprefix(_HASHED))
    return _digest(key.encode())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
