"""Makes two hosts on one machine from network namespaces, with a wire between them.

The wire is a thread of a process that carries packets from one TUN device to the other, with a
rate, a delay and losses, and which can be cut. So it needs no `netem` of the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

HOSTS = ("10.0.0.1", "10.0.0.2")
_TUNSETIFF, _TUN, _NO_INFO, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
QUEUE_BYTES = 1 << 20
"""The most bytes that wait at a slow wire. Like a switch, the wire drops packets beyond that."""


def missing() -> str:
    """Returns "", or why this machine cannot make hosts for a test."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    line = ["unshare", "--net", "true"]
    try:
        done = subprocess.run(line, capture_output=True, timeout=30)
    except OSError:
        return "needs unshare and ip"
    if done.returncode or not os.path.exists("/dev/net/tun"):
        return "needs network namespaces and /dev/net/tun"
    return ""


@dataclass
class Wire:
    """`rate` is in bytes per second, in each direction."""

    fds: tuple[int, int]
    names: tuple[str, str]
    rate: float = 1e9
    delay_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False
    num_lost: int = 0
    num_bytes: int = 0
    _due: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _free_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _ended: threading.Event = field(default_factory=threading.Event)

    def carry(self) -> None:
        draw, number = random.Random(1), 0
        while not self._ended.is_set():
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                _, _, side, packet = heapq.heappop(self._due)
                with contextlib.suppress(OSError):
                    os.write(self.fds[side], packet)
            wait_s = min(self._due[0][0] - now_s, 0.05) if self._due else 0.05
            for fd in select.select(self.fds, [], [], max(wait_s, 0.0))[0]:
                packet = os.read(fd, 65_536)
                side = 1 - self.fds.index(fd)
                now_s = time.monotonic()
                free_s = max(self._free_s[side], now_s)
                is_full = (free_s - now_s) * self.rate > QUEUE_BYTES
                if self.is_cut or is_full or draw.random() < self.loss:
                    self.num_lost += 1
                    continue
                self.num_bytes += len(packet)
                self._free_s[side] = free_s + len(packet) / self.rate
                number += 1
                due_s = self._free_s[side] + self.delay_s
                heapq.heappush(self._due, (due_s, number, side, packet))

    def end(self) -> None:
        self._ended.set()

    def line(self, host: int, words: Sequence[str]) -> list[str]:
        """Returns the command line that runs `words` on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _open_tun(name: str) -> int:
    """Opens a TUN device in a namespace. Only a new thread enters the namespace."""
    found: list[int] = []

    def work() -> None:
        _enter(name)
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", b"wire0", _TUN | _NO_INFO))
        found.append(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def two_hosts() -> Iterator[Wire]:
    """Yields two hosts with a wire between them. HOSTS has their addresses."""
    mark = f"{os.getpid():x}{random.randrange(1 << 16):x}"
    names = (f"moon{mark}a", f"moon{mark}b")
    fds: list[int] = []
    try:
        for name, address in zip(names, HOSTS, strict=True):
            subprocess.run(["ip", "netns", "add", name], check=True, timeout=30)
            fds.append(_open_tun(name))
            for words in (
                ["ip", "link", "set", "lo", "up"],
                ["ip", "addr", "add", f"{address}/24", "dev", "wire0"],
                ["ip", "link", "set", "wire0", "up"],
            ):
                line = ["ip", "netns", "exec", name, *words]
                subprocess.run(line, check=True, timeout=30)
        wire = Wire((fds[0], fds[1]), names)
        thread = threading.Thread(target=wire.carry, daemon=True)
        thread.start()
        try:
            yield wire
        finally:
            wire.end()
            thread.join()
    finally:
        for fd in fds:
            os.close(fd)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
