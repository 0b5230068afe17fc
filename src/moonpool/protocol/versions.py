"""The versions of protocol and block format that this release speaks, and how two parts agree.

A release speaks the newest version (N) and the previous one (N - 1), so that a cluster can be
upgraded process by process. Each side of a connection states its versions in the first bytes of its
nonce (`link.auth`): all versions authenticate the nonce and none reads its remaining bytes, so the
form of the greeting never changes. Both sides then use the newest version that both of them speak.
Fields and messages of a version are sent only if that version was agreed on.

    protocol 10   states no versions
    protocol 11   states them; Joined has the worker's release; there are standbys
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_STATED = struct.Struct("<4s4H")
_MARK = b"\xa7mpv"
STATED_BYTES = _STATED.size


class VersionError(ValueError):
    """Two parts share no version; one line says which ones each speaks, and what to do."""


class VersionRange(NamedTuple):
    """A range that includes all versions from `oldest` to `newest`."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def includes(self, version: int) -> bool:
        return self.oldest <= version <= self.newest


class Versions(NamedTuple):
    """The versions that one part of moonpool speaks. `blocks`: versions of the bytes of a block, in
    frames, memory files and on SSD."""

    protocol: VersionRange
    blocks: VersionRange


class Agreed(NamedTuple):
    """The versions that both ends of a connection use."""

    protocol: int
    blocks: int


NEWEST_PROTOCOL = 11
STATES_RELEASE = 11
"""The first protocol in which a worker states its release when it joins."""
TAKES_OFFERS = 11
"""The first protocol in which a vLLM server's worker states its model when it applies."""
KNOWS_STANDBYS = 11
"""The first protocol version that has Leadership."""
BLOCK_FORMATS = VersionRange(1, 1)
OWN = Versions(VersionRange(NEWEST_PROTOCOL - 1, NEWEST_PROTOCOL), BLOCK_FORMATS)
UNSTATED = Versions(VersionRange(10, 10), VersionRange(1, 1))
"""The versions of a part that states none."""


def state_versions(versions: Versions) -> bytes:
    """Returns the first STATED_BYTES of a nonce."""
    return _STATED.pack(_MARK, *versions.protocol, *versions.blocks)


def read_versions(nonce: bytes) -> Versions:
    """Returns what the sender of the nonce speaks."""
    mark, *numbers = _STATED.unpack_from(nonce)
    if mark != _MARK:
        return UNSTATED
    return Versions(VersionRange(*numbers[:2]), VersionRange(*numbers[2:]))


def agree(ours: Versions, theirs: Versions, our_name: str, their_name: str) -> Agreed:
    """Returns the newest versions that both speak. Raises VersionError, which names both."""
    found = []
    for what, our, their in zip(("protocol", "block format"), ours, theirs, strict=True):
        newest = min(our.newest, their.newest)
        if newest < max(our.oldest, their.oldest):
            older = our_name if our.newest < their.newest else their_name
            raise VersionError(
                f"{our_name} speaks {what} {our}, {their_name} {their}: upgrade {older}, one"
                " release at a time"
            )
        found.append(newest)
    return Agreed(*found)
