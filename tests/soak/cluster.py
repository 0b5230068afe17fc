"""Runs the processes of a soak: starts and kills them, reads their messages, tracks their
blocks."""

from __future__ import annotations

import contextlib
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from moonpool.protocol.messages import BlocksChanged, BlocksSnapshot, Resync
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockKey
from tests.soak import orders
from tests.soak.relay import Relay

ROOT = Path(__file__).parents[2]
EVICTIONS = ("lru", "predictive", "lfu", "length-aware")
START_S = 120.0
_BUFFER_BYTES = 1 << 20


class SoakError(AssertionError):
    """Is raised if an invariant is violated. The text names the invariant in one line."""


class Member:
    """One instance over all of its incarnations."""

    def __init__(self, number: int, folder: Path, num_blocks: int, num_slots: int) -> None:
        self.number = number
        self.name = f"soak-{number}"
        self.folder = folder
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.eviction = EVICTIONS[number % len(EVICTIONS)]
        self.relay = Relay(number)
        self.process: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket | None = None
        # the address of this incarnation, once it has joined
        self.address: PeerAddress | None = None
        self.life = 0
        self.in_dram: set[BlockKey] = set()
        self.on_ssd: set[BlockKey] = set()  # blocks on the SSD that are not in DRAM
        self.flipped: dict[int, BlockKey] = {}  # slots with a flip that no read has found yet
        self.doubtful: set[int] = set()  # the same slots, unless a failed write replaced them
        self.tainted: set[BlockKey] = set()  # flipped in memory, and possibly written to the SSD
        self.counters: dict[str, float] = {}  # counters of this incarnation
        self.before: Counter[str] = Counter()  # sum of the counters of earlier incarnations
        self.answers: list[orders.Flipped | orders.Checked] = []

    @property
    def up(self) -> bool:
        return self.address is not None

    def holds(self, key: BlockKey) -> bool:
        return key in self.in_dram or key in self.on_ssd

    def reach(self, keys: list[BlockKey]) -> int:
        """Returns the length of the longest run of `keys` that the instance should hold."""
        for index, key in enumerate(keys):
            if not self.holds(key):
                return index
        return len(keys)

    def way(self, relayed: bool) -> PeerAddress:
        """Returns the transport to the instance: shared memory, or TCP through its relay if it has
        one."""
        assert self.address is not None
        if not relayed:
            return self.address
        port = self.relay.port
        return msgspec.structs.replace(self.address, host_id="", unix_name="", tcp_port=port)

    def total(self, name: str) -> float:
        return self.before[name] + self.counters.get(name, 0.0)

    def start(self, secret: bytes, seed: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        command = [sys.executable, "-m", "tests.soak.instance", str(theirs.fileno())]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], stdout=log, stderr=log
            )
        theirs.close()
        self.sock = ours
        self.life += 1
        orders.send(
            ours,
            orders.Plan(
                instance_id=self.name,
                secret=secret,
                folder=str(self.folder),
                num_blocks=self.num_blocks,
                num_slots=self.num_slots,
                eviction=self.eviction,
                seed=seed,
                flipped=tuple(self.flipped),
            ),
        )

    def log_tail(self) -> str:
        lines = (self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])


class Cluster:
    """Holds all instances. `on_message` gets messages about attempts; `on_death` gets each kill."""

    def __init__(
        self,
        folder: Path,
        num_instances: int,
        num_blocks: int,
        num_slots: int,
        seed: int,
        on_message: Callable[[Member, orders.Up], None],
        on_death: Callable[[Member], None],
    ) -> None:
        self.members = [Member(i, folder, num_blocks, num_slots) for i in range(num_instances)]
        self.seen: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._secret = self._rng.randbytes(16)
        self._on_message = on_message
        self._on_death = on_death
        self._selector = selectors.DefaultSelector()
        for member in self.members:
            self._start(member)
        self.wait(lambda: all(m.up for m in self.members), START_S, "the instances to start")

    @property
    def up(self) -> list[Member]:
        return [member for member in self.members if member.up]

    def send(self, member: Member, message: orders.Down) -> None:
        """Sends a message; a message to an instance that has just died is lost, as on a wire."""
        if member.sock is not None:
            try:
                orders.send(member.sock, message)
            except (BrokenPipeError, ConnectionResetError):
                return

    def kill(self, member: Member) -> None:
        assert member.process is not None
        member.process.send_signal(signal.SIGKILL)
        self.seen["kills"] += 1
        self._bury(member)
        self._start(member)

    def wait(self, until: Callable[[], bool], timeout_s: float, what: str) -> None:
        end_s = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > end_s:
                raise SoakError(f"waited {timeout_s:.0f} s for {what}, which did not come")
            self.pump(0.05)

    def pump(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            member: Member = key.data
            if member.sock is not key.fileobj:
                continue  # a message from another instance caused this instance to be killed
            try:
                message = orders.receive_up(member.sock)
            except ConnectionResetError:
                message = None
            if message is None:
                raise SoakError(f"{member.name} died by itself:\n{member.log_tail()}")
            self._take(member, message)

    def ask(
        self, member: Member, order: orders.Down, timeout_s: float = 120.0
    ) -> orders.Flipped | orders.Checked:
        member.answers.clear()
        self.send(member, order)
        self.wait(lambda: bool(member.answers), timeout_s, f"{member.name} to answer")
        return member.answers.pop()

    def close(self) -> None:
        """Ends all instances; their folders stay."""
        for member in self.members:
            if member.sock is not None:
                self._selector.unregister(member.sock)
                member.sock.close()
                member.sock = None
        for member in self.members:
            member.relay.close()
            if member.process is not None:
                try:
                    member.process.wait(60.0)
                except subprocess.TimeoutExpired:
                    member.process.kill()
                    member.process.wait()

    def _start(self, member: Member) -> None:
        member.start(self._secret, self._rng.getrandbits(32))
        assert member.sock is not None
        self._selector.register(member.sock, selectors.EVENT_READ, member)

    def _bury(self, member: Member) -> None:
        assert member.process is not None and member.sock is not None
        member.process.wait()
        self._selector.unregister(member.sock)
        self._hear_out(member)
        member.sock.close()
        member.sock = member.address = None
        member.before.update(member.counters)
        member.counters = {}
        member.in_dram.clear()
        member.on_ssd.clear()
        self._on_death(member)

    def _hear_out(self, member: Member) -> None:
        """Reads the messages that the instance sent before it died."""
        assert member.sock is not None
        with contextlib.suppress(ConnectionResetError):
            while (message := orders.receive_up(member.sock)) is not None:
                self._take(member, message)

    def _take(self, member: Member, message: orders.Up) -> None:
        match message:
            case orders.Wrong():
                raise SoakError(f"{member.name}: {message.message}")
            case orders.Joined():
                member.address = message.address
                member.relay.target_port = message.address.tcp_port
                if member.life > 1:
                    self.seen["adopted blocks"] += message.num_adopted
                self.send(member, Resync())
            case orders.Tally():
                member.counters = message.counters
            case orders.Flipped() | orders.Checked():
                member.answers.append(message)
            case orders.FlipFound():
                self.seen["disk flips found"] += message.read
                if message.state != "there":
                    member.flipped.pop(message.slot, None)
                    member.doubtful.add(message.slot)
                if message.state == "gone":
                    member.doubtful.discard(message.slot)
                    self.seen["disk flips overwritten"] += 1
            case BlocksSnapshot():
                member.in_dram, member.on_ssd = set(message.keys), set(message.demoted)
            case BlocksChanged():
                member.in_dram.difference_update(message.removed, message.demoted)
                member.on_ssd.difference_update(message.removed, message.stored)
                member.in_dram.update(message.stored)
                member.on_ssd.update(message.demoted)
            case _:
                self._on_message(member, message)
