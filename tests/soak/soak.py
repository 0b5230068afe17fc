"""Runs the loop of a soak, its faults, and the invariants at its checkpoints."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moonpool.head.audit import audit_cluster
from moonpool.protocol.messages import InstanceLoad, TierLoad
from moonpool_engine.storage.folder import instance_folder
from moonpool_engine.storage.index import read_index
from moonpool_engine.storage.verify import verify_folder
from tests.soak import orders
from tests.soak.cluster import Cluster, Member, SoakError
from tests.soak.content import LAYOUT
from tests.soak.drills import Drills
from tests.soak.instance import HANG_S
from tests.soak.traffic import Traffic

NUM_BLOCKS = 320
NUM_SLOTS = 640
IN_FLIGHT = 5
"""The number of requests under way per instance."""
CHECKPOINTS = 10
MORE_CHECKPOINTS = 30
"""The largest number of further operations while a figure is lacking."""
KILLS = 12
FILLS = 8
HANGS = 6
SLOW_SPELLS = 8
WIRE_SPELLS = 20
FLIPS = 60
SLOW_S = 0.03
FAULT_S = 1.0
FAULTS_OPERATIONS = 50_000
"""At least the numbers of faults above occur in each run of this many operations."""
IDLE_S = 120.0
SPARE_FDS = 48
SPARE_BYTES = 48 << 20
WIRE_FLIP_RATE = 0.05
"""The share of chunks that are flipped while this fault lasts."""
_MOVED = ("fetched_bytes", "received_bytes")
_COUNTED = ("put", "get", "left", "stored_blocks", "loaded_blocks")


class Soak:
    def __init__(
        self, folder: Path, operations: int, instances: int, seed: int, echo: Callable[[str], None]
    ) -> None:
        self.operations = operations
        self._echo = echo
        self._rng = random.Random(seed)
        self.traffic = Traffic(self._rng.getrandbits(32))
        self.cluster = Cluster(
            folder,
            instances,
            NUM_BLOCKS,
            NUM_SLOTS,
            self._rng.getrandbits(32),
            self.traffic.on_message,
            self.traffic.on_death,
        )
        self.traffic.cluster = self.cluster
        self.drills = Drills(self.cluster, self.traffic)
        self._folder = folder
        self._sizes: dict[tuple[str, int], orders.Checked] = {}
        self._own_fds = 0
        self._over_s: list[tuple[float, Callable[[], None]]] = []
        self.faults = self._draw_faults()

    def done(self) -> int:
        """Returns the number of block operations so far."""
        total = 0.0
        for member in self.cluster.members:
            total += sum(member.total(name) for name in _COUNTED)
            total += sum(member.total(name) for name in _MOVED) / LAYOUT.block_bytes
        return int(total)

    def run(self, lacking: Callable[[dict[str, Any]], list[str]] = lambda _: []) -> dict[str, Any]:
        """Runs all operations, then more while figures are `lacking`.

        The number of loads and of possible drills depends on the machine's speed, so a run does not
        end before the counts that a test needs are reached.
        """
        began_s = time.monotonic()
        drilled = 0
        for number in range(1, CHECKPOINTS + MORE_CHECKPOINTS + 1):
            if number > CHECKPOINTS and not lacking(self.figures(0.0)):
                break
            self.work_until(number * self.operations // CHECKPOINTS, drilled)
            self.checkpoint()
            before = self.done()
            self.drills.run()
            drilled += self.done() - before
            seconds = time.monotonic() - began_s
            self._echo(f"{self.done():>9,} block operations, {seconds:.0f} s: all is well")
        self.checkpoint()
        self.cluster.close()
        self.verify_folders()
        return self.figures(time.monotonic() - began_s)

    def figures(self, wall_s: float) -> dict[str, Any]:
        members = self.cluster.members
        names = sorted({name for m in members for name in (*m.before, *m.counters)})
        seen = self.traffic.seen + self.cluster.seen
        seen["wire flips"] = sum(m.relay.flips for m in members)
        seen["lease renewals"] = sum(m.relay.renewals for m in members)
        return {
            "operations": self.done(),
            "wall_s": round(wall_s, 1),
            "seen": dict(sorted(seen.items())),
            "counters": {name: int(sum(m.total(name) for m in members)) for name in names},
        }

    def work_until(self, operations: int, drilled: int) -> None:
        """Runs traffic until the next stop; the operations of drills do not count."""
        last, last_s = -1, time.monotonic()
        while (done := self.done() - drilled) < operations:
            if done > last:
                last, last_s = done, time.monotonic()
            elif time.monotonic() - last_s > 60.0:
                raise SoakError("nothing has moved for a minute")
            self._do_faults(done)
            if len(self.traffic.attempts) < IN_FLIGHT * len(self.cluster.members):
                self.traffic.begin_any()
                self.traffic.tick()
                self.cluster.pump(0.0)
            else:
                self.cluster.pump(0.01)

    # Faults:

    def _draw_faults(self) -> list[tuple[int, str]]:
        """Draws the faults as (operation, kind). The next fault is the last entry."""
        often = max(1, self.operations // FAULTS_OPERATIONS)
        kinds = ["kill"] * KILLS + ["fill"] * FILLS + ["slow"] * SLOW_SPELLS + ["flip"] * FLIPS
        kinds += ["wire"] * WIRE_SPELLS + ["hang"] * HANGS
        return sorted(
            ((self._rng.randrange(self.operations), kind) for kind in kinds * often), reverse=True
        )

    def _do_faults(self, done: int) -> None:
        now_s = time.monotonic()
        for at_s, end in [one for one in self._over_s if one[0] <= now_s]:
            self._over_s.remove((at_s, end))
            end()
        while self.faults and self.faults[-1][0] <= done:
            _, kind = self.faults.pop()
            up = self.cluster.up
            if up:
                self._fault(kind, self._rng.choice(up))

    def _fault(self, kind: str, member: Member) -> None:
        self.cluster.seen[f"fault {kind}"] += 1
        match kind:
            case "kill":
                self.cluster.kill(member)
            case "fill":
                life = member.life
                self.cluster.send(member, orders.FillDisk(full=True))
                self._later(lambda: life == member.life and self._empty(member))
            case "hang":
                self.cluster.send(member, orders.HangDisk(seconds=2 * HANG_S))
            case "slow":
                member.relay.slow_s = SLOW_S
                self._later(lambda: setattr(member.relay, "slow_s", 0.0))
            case "wire":
                member.relay.flip_rate = WIRE_FLIP_RATE
                self._later(lambda: setattr(member.relay, "flip_rate", 0.0))
            case "flip":
                keys = sorted(member.on_ssd)
                if keys:
                    self.drills.flip_disk(member, self._rng.choice(keys))

    def _later(self, end: Callable[[], object]) -> None:
        self._over_s.append((time.monotonic() + FAULT_S * (0.5 + self._rng.random()), end))

    def _empty(self, member: Member) -> None:
        self.cluster.send(member, orders.FillDisk(full=False))

    # Checkpoints:

    def checkpoint(self) -> None:
        self._wait_for_all()
        for _, end in self._over_s:
            end()
        self._over_s.clear()
        self.traffic.drain()
        checks = {member: self._idle(member) for member in self.cluster.members}
        problems = audit_cluster(
            {"instances": [_described(m.name, c.load) for m, c in checks.items()]}
        )
        for member, checked in checks.items():
            problems += [f"{member.name}: {text}" for text in checked.wrong[:3]]
            problems += self._grown(member, checked)
        if problems:
            raise SoakError("; ".join(problems))
        self.cluster.seen["blocks compared with the truth"] += sum(
            c.num_checked for c in checks.values()
        )

    def _wait_for_all(self) -> None:
        self.cluster.wait(
            lambda: all(m.up for m in self.cluster.members), IDLE_S, "killed instances to be back"
        )

    def _idle(self, member: Member) -> orders.Checked:
        """Waits until the instance is idle and returns its state. Remaining owners are an error."""
        end_s = time.monotonic() + IDLE_S
        while True:
            checked = self.cluster.ask(member, orders.Check())
            assert isinstance(checked, orders.Checked)
            ssd = checked.load.ssd
            owners = checked.load.owners | ({} if ssd is None else ssd.owners)
            if not owners and not checked.num_attempts:
                return checked
            if time.monotonic() > end_s:
                raise SoakError(f"{member.name}: nothing runs, but blocks are held by {owners}")
            self.cluster.pump(0.05)

    def _grown(self, member: Member, checked: orders.Checked) -> list[str]:
        """Asserts that the memory of a process does not grow after its second checkpoint. Before
        that, it may grow."""
        key = (member.name, member.life)
        first = self._sizes.setdefault(key, checked)
        problems = []
        if checked.num_fds > first.num_fds + SPARE_FDS:
            problems.append(f"{member.name}: {checked.num_fds} descriptors, {first.num_fds} before")
        if checked.rss_bytes > first.rss_bytes + SPARE_BYTES:
            mib = (checked.rss_bytes >> 20, first.rss_bytes >> 20)
            problems.append(f"{member.name}: {mib[0]} MiB of memory, {mib[1]} before")
        return problems

    # The end:

    def verify_folders(self) -> None:
        """Checks the folders: all blocks are correct except for flips that no read has found."""
        seen = self.cluster.seen
        for member in self.cluster.members:
            folder = instance_folder(self._folder, member.name)
            found = read_index(folder)
            assert found is not None
            held = found[0]
            # A block that was flipped in memory may have been computed again before it was written.
            doubtful = {slot for slot, (key, _) in held.items() if key in member.tainted}
            doubtful |= member.doubtful
            left = set(member.flipped).intersection(held) - doubtful
            verified = verify_folder(folder)
            bad = set(verified.bad_slots) - doubtful
            # flips that were found, but are not in the list
            more = verified.bad_blocks - len(verified.bad_slots)
            if bad - left or len(left - bad) > more:
                raise SoakError(
                    f"{folder}: bad blocks in {sorted(bad)}, but flips that were not read yet in"
                    f" {sorted(left)}"
                )
            seen["flips found by verify"] += len(left)
            seen["blocks verified on the disks"] += verified.blocks


def _described(name: str, load: InstanceLoad) -> dict[str, Any]:
    """Returns the load in the form that `/cluster` shows."""
    pool = TierLoad(
        blocks=load.num_blocks,
        held=load.held_blocks,
        available=load.free_blocks,
        cached=load.cached_blocks,
        owners=load.owners,
    )
    return {
        "instance_id": name,
        "pool": _tier(pool),
        "ssd": None if load.ssd is None else _tier(load.ssd),
        "running": load.num_running,
        "waiting": load.num_waiting,
    }


def _tier(tier: TierLoad) -> dict[str, Any]:
    return {
        "blocks": tier.blocks,
        "held": tier.held,
        "available": tier.available,
        "cached": tier.cached,
        "owners": tier.owners,
    }
