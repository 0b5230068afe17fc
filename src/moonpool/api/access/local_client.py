"""Tells a local user's own request from one that a proxy on this machine has passed on.

The connections of users and of a proxy both come from a loopback address, and a proxy need not send
a header that says it is one. The process at the other end differs: a network peer cannot speak
through a user's command. So a process counts as local if it runs as the server's own user, waits
for no connections, has accepted none, and has none to another machine. The kernel has this
information (`/proc`).
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

Address = tuple[str, int | None]
_LISTENS = "0A"
_UNIX_LISTENS = 0x10000  # __SO_ACCEPTCON
_MAX_TABLE_BYTES = 16 << 20
"""Larger tables are not read, so a machine with more sockets gets no answer."""


@dataclass(frozen=True, slots=True)
class _Socket:
    """One line of a table of the kernel."""

    local: str  # address and port as the kernel writes them, in hexadecimal
    remote: str
    state: str
    uid: int
    inode: str


def why_not_local(client: Address | None, server: Address | None) -> str:
    """Returns why the client of a connection to `server` is not considered a local user, as the end
    of a sentence, or "" if the client is one. Takes milliseconds."""
    if client is None or server is None or client[1] is None or server[1] is None:
        return "its connection is unknown"
    try:
        streams = [*_table("tcp"), *_table("tcp6")]
        own, other = set(_digits(client)), set(_digits(server))
        found = next((s for s in streams if s.local in own and s.remote in other), None)
        if found is None:
            return "the process that sends it is unknown"
        if found.uid != os.geteuid():
            return "another user than the server's has sent it: send it as that user"
        holders = [each for each in _processes() if found.inode in each[1]]
        if not holders:
            return "the process that sends it cannot be seen"
        for pid, inodes in holders:
            if pid != os.getpid() and (why := _why_reachable(inodes, streams)):
                return f"the process {pid}, which sends it, {why}"
    except (OSError, ValueError) as error:
        return f"the kernel does not tell who sends it ({error})"
    return ""


def _why_reachable(inodes: set[str], streams: list[_Socket]) -> str:
    ports = {_port(s.local) for s in streams if s.state == _LISTENS}
    for stream in streams:
        if stream.inode not in inodes:
            continue
        if stream.state == _LISTENS:
            return "waits for connections itself"
        if _port(stream.local) in ports:
            return "has accepted a connection itself"
        if not _is_loopback(stream.remote):
            return "has a connection to another machine"
    if any(s.inode in inodes and not _is_loopback(s.remote) for s in _datagrams()):
        return "speaks with other machines"
    if any(inode in inodes for inode in _listening_unix()):
        return "waits for connections itself"
    return ""


def _table(name: str) -> Iterator[_Socket]:
    for line in _lines(f"/proc/self/net/{name}"):
        words = line.split()
        yield _Socket(words[1], words[2], words[3], int(words[7]), words[9])


def _datagrams() -> Iterator[_Socket]:
    yield from _table("udp")
    yield from _table("udp6")


def _listening_unix() -> Iterator[str]:
    for line in _lines("/proc/self/net/unix"):
        words = line.split()
        if int(words[3], 16) & _UNIX_LISTENS:
            yield words[6]


def _lines(path: str) -> list[str]:
    """Returns the lines after the heading, or none if the kernel has no such table."""
    try:
        with open(path, encoding="ascii", errors="replace") as table:
            text = table.read(_MAX_TABLE_BYTES)
    except FileNotFoundError:
        return []
    if len(text) == _MAX_TABLE_BYTES:
        raise ValueError("it has too many sockets")
    return text.splitlines()[1:]


def _processes() -> Iterator[tuple[int, set[str]]]:
    """Yields the processes that this user may see, with the inodes of their sockets."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            inodes = _sockets_of(name)
            if inodes:
                yield int(name), inodes


def _sockets_of(pid: str) -> set[str]:
    folder = f"/proc/{pid}/fd"
    inodes = set()
    with contextlib.suppress(OSError):  # the process belongs to another user, or has ended
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):  # the descriptor has just been closed
                target = os.readlink(f"{folder}/{fd}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


def _digits(address: Address) -> Iterator[str]:
    """Yields an address as the tables write it: of IPv4, and of IPv4 within IPv6."""
    host, port = address
    found = ip_address(host)
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    forms = [found.packed]
    if isinstance(found, IPv4Address):
        forms.append(b"\0" * 10 + b"\xff\xff" + found.packed)
    for packed in forms:
        words = struct.unpack(f"={len(packed) // 4}I", packed)
        yield "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _port(digits: str) -> str:
    return digits.rpartition(":")[2]


def _is_loopback(digits: str) -> bool:
    text = digits.rpartition(":")[0]
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    found = ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)
