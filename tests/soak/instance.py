"""Runs one instance of a soak in a separate process: `python -m tests.soak.instance FD`.

State machine, messenger, SSD store and the code that performs the actions are the product's own;
only the engine is a fake. FD is a socket to the driver.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import BlocksChanged
from moonpool.protocol.transfer_events import LoadEnded, ReadRequested, StoreEnded
from moonpool.scheduler.actions import (
    ForgetStored,
    LoadBlocks,
    RunStep,
    SendReport,
    StoreBlocks,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.scheduler.instance_config import InstanceConfig, InstanceMemory
from moonpool.types import BlockId, BlockKey, InstanceId, Role
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.storage import io_threads
from moonpool_engine.storage import store as store_module
from moonpool_engine.storage.format import make_geometry
from moonpool_engine.storage.store import BlockStore, open_store
from moonpool_engine.transfer.arena import Arena, checksum_slice
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger, TransferLimits
from moonpool_engine.transfer.slice_copier import fastest_copier
from moonpool_engine.worker.transfers import storage_by, transfers_by
from tests.soak import orders
from tests.soak.content import LAYOUT, slice_bytes
from tests.soak.disk import FaultyDisk
from tests.soak.engine import FillingEngine, Known
from tests.soak.orders import Checked, FlipDisk, FlipFound, FlipMemory, Flipped, Joined, Plan

LEASE_S = 1.2
FULL_PAUSE_S = 0.3
HANG_S = 0.5
HANG_PAUSE_S = 0.3
SEGMENT_SLOTS = 64
TALLY_S = 0.1
VALIDATED = 64
"""After this many events, the instance asserts all invariants that hold between two events."""
COST = FittedCost(prefill=(0.001, 1e-4, 0.0, 0.0), decode=(0.001, 0.0, 0.0))
_DIE_WITH_PARENT = 1


class SoakInstance:
    def __init__(self, plan: Plan, sock: socket.socket) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sock = sock
        self._sending = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._rng = random.Random(plan.seed)
        self._disk = FaultyDisk(plan.seed)
        store_module.FULL_PAUSE_S = FULL_PAUSE_S
        io_threads.PAUSE_S = io_threads.MAX_PAUSE_S = HANG_PAUSE_S
        self._arena = Arena(LAYOUT, plan.num_blocks)
        post = self.events.put
        instance_id = InstanceId(plan.instance_id)
        self._messenger = Messenger(
            self._arena,
            LAYOUT,
            LocalPeer(instance_id, plan.secret),
            post,
            fastest_copier(self._arena, open_slices()),
            limits=TransferLimits(lease_s=LEASE_S),
        )
        self._store: BlockStore = open_store(
            Path(plan.folder),
            instance_id,
            self._arena,
            plan.num_slots,
            post,
            SEGMENT_SLOTS * make_geometry(LAYOUT).slot_bytes,
            HANG_S,
        )
        config = InstanceConfig(
            chunk_tokens=256,
            max_sequences=16,
            eviction=plan.eviction,  # type: ignore[arg-type]
            ssd_blocks=plan.num_slots,
        )
        cost = msgspec.structs.replace(COST, ssd_read_bytes_per_s=1e9)
        stored = self._store.stored
        self._instance = Instance(
            config, LAYOUT, plan.num_blocks, Role.MIXED, cost, (), InstanceMemory(stored)
        )
        self._engine = FillingEngine(self._arena, self._messenger, plan.seed, post, self.wrong)
        self._driver = self._drive()
        self._flipped = set(plan.flipped)
        self._overwriting: set[int] = set()  # slots that held a flipped bit when their write began
        self._loads: dict[str, tuple[int, ...]] = {}
        self._stores: dict[str, tuple[int, ...]] = {}
        self._num_events = 0
        address = self._messenger.start()
        self.tell(Joined(address=address, num_adopted=len(stored)))

    def tell(self, message: orders.Up) -> None:
        with self._sending:
            orders.send(self._sock, message)

    def wrong(self, message: str) -> None:
        self.tell(orders.Wrong(message=message))

    def run(self) -> None:
        told_s = time.monotonic()
        while True:
            try:
                event = self.events.get(timeout=TALLY_S)
            except queue.Empty:
                event = None
            if event is None:
                pass
            elif isinstance(event, orders.Stop):
                break
            elif isinstance(event, FlipMemory | FlipDisk | orders.FillDisk | orders.HangDisk):
                self._order(event)
            elif isinstance(event, orders.Check):
                self.tell(self._check())
            else:
                self._handle(event)
            if time.monotonic() - told_s > TALLY_S:
                told_s = time.monotonic()
                self._tally()
        self._messenger.close()
        self._store.close()
        self._arena.close()

    def _handle(self, event: WorkerEvent) -> None:
        if isinstance(event, LoadEnded):
            self._judge_load(event)
        elif isinstance(event, StoreEnded):
            self._judge_store(event)
        elif isinstance(event, ReadRequested):
            self._counts["reads"] += 1
        self._driver.post(event)
        self._num_events += 1
        if self._num_events % VALIDATED == 0:
            self._instance.validate()

    def _drive(self) -> InstanceDriver:
        store = storage_by(self._store)

        def noted(action: StoreBlocks | LoadBlocks | ForgetStored) -> None:
            self._note_storage(action)
            store[type(action)](action)

        performers: Performers = {
            **transfers_by(self._messenger, LAYOUT.num_layers),
            **dict.fromkeys(store, noted),
            RunStep: self._run_step,
            SendReport: self._report,
        }
        return InstanceDriver(self._instance, time.monotonic, performers)

    def _report(self, action: SendReport) -> None:
        if isinstance(action.report, BlocksChanged):
            self._counts["left"] += len(action.report.removed)
        self.tell(action.report)

    def _run_step(self, step: RunStep) -> None:
        requests = self._instance.requests
        known = [
            Known(
                list(requests[e.attempt_id].tokens[: e.start + len(e.new_token_ids)]),
                requests[e.attempt_id].attempt.tenant,
            )
            for e in step.entries
        ]
        self._engine.submit(step, known)

    # Flips on the disk: a read must find each flip.

    def _note_storage(self, action: StoreBlocks | LoadBlocks | ForgetStored) -> None:
        if isinstance(action, LoadBlocks):
            self._loads[action.load_id] = action.slots
        elif isinstance(action, StoreBlocks):
            self._stores[action.store_id] = action.slots
            for slot in self._flipped.intersection(action.slots):
                # Although the write failed or was killed, it may have changed this slot.
                self._flipped.discard(slot)
                self._overwriting.add(slot)
                self.tell(FlipFound(slot=slot, read=False, state="unknown"))

    def _judge_load(self, event: LoadEnded) -> None:
        slots = self._loads.pop(event.load_id)
        taken = self._flipped.intersection(slots[: event.num_blocks])
        if taken:
            self.wrong(f"load {event.load_id} took the flipped slots {sorted(taken)} for right")
        if event.num_blocks < len(slots) and slots[event.num_blocks] in self._flipped:
            read = event.corrupt_slices > 0
            if not read and not event.error:
                self.wrong(f"load {event.load_id} met a flipped slot and counted nothing")
            self.tell(FlipFound(slot=slots[event.num_blocks], read=read, state="there"))

    def _judge_store(self, event: StoreEnded) -> None:
        """Reports the flips that a store overwrites. A flip counts until its slot is written again,
        because a forgotten slot may come back after a kill."""
        for slot in self._overwriting.intersection(
            self._stores.pop(event.store_id)[: event.num_blocks]
        ):
            self._overwriting.discard(slot)
            self.tell(FlipFound(slot=slot, read=False, state="gone"))

    def _order(self, order: FlipMemory | FlipDisk | orders.FillDisk | orders.HangDisk) -> None:
        match order:
            case FlipMemory():
                self.tell(Flipped(done=self._flip_memory(order.key)))
            case FlipDisk():
                slot = self._idle_slot(order.key)
                if slot >= 0:
                    self._disk.flip(self._store.folder, self._store.geometry, slot)
                    self._flipped.add(slot)
                self.tell(Flipped(done=slot >= 0, slot=slot))
            case orders.FillDisk():
                self._disk.full = order.full
            case orders.HangDisk():
                self._disk.hang(order.seconds)

    def _idle_slot(self, key: BlockKey) -> int:
        tier, pool = self._instance.tier, self._instance.pool
        if tier is None or tier.lost or pool.find(key) is not None:
            return -1
        slot = tier.slot_of(key)
        if slot is None or slot in self._flipped or tier.slots.is_held(slot):
            return -1
        return int(slot)

    def _flip_memory(self, key: BlockKey) -> bool:
        pool, tier = self._instance.pool, self._instance.tier
        block_id = pool.find(key)
        if block_id is None or pool.is_held(block_id):
            return False
        if tier is not None and tier.slot_of(key) is not None:
            return False
        layer = self._rng.randrange(LAYOUT.num_layers)
        if not self._arena.checksums.get(block_id, layer):
            return False
        place = self._arena.slice(block_id, layer)
        place[self._rng.randrange(len(place))] ^= 1 << self._rng.randrange(8)
        return True

    # Check of the whole instance:

    def _check(self) -> Checked:
        self._instance.validate()
        pool = self._instance.pool
        wrong = []
        keys = pool.keys()
        for key in keys:
            block_id = pool.find(key)
            assert block_id is not None
            wrong += self._wrong_slices(block_id, key)
        with open("/proc/self/statm", encoding="ascii") as file:
            rss_pages = int(file.read().split()[1])
        self._tally()
        return Checked(
            load=self._instance.load(),
            wrong=tuple(wrong),
            num_checked=len(keys),
            num_attempts=len(self._instance.requests),
            num_fds=len(os.listdir("/proc/self/fd")),
            num_threads=threading.active_count(),
            rss_bytes=rss_pages * os.sysconf("SC_PAGE_SIZE"),
        )

    def _wrong_slices(self, block_id: BlockId, key: BlockKey) -> list[str]:
        """Returns wrong slices that the next reader's checksum would not detect."""
        wrong = []
        for layer in range(LAYOUT.num_layers):
            place = self._arena.slice(block_id, layer)
            if place == slice_bytes(key, layer):
                continue
            if self._arena.checksums.get(block_id, layer) in (0, checksum_slice(place)):
                wrong.append(f"block {block_id} layer {layer} is not what {key.hex()} names")
        return wrong

    def _tally(self) -> None:
        counters = dict(self._instance.counters)
        counters |= {
            f"store_{k}": v for k, v in msgspec.structs.asdict(self._store.counts()).items()
        }
        moved = self._messenger.counts()
        counters["messenger_corrupt"] = moved.corrupt_slices
        counters["messenger_failed"] = moved.failed_operations
        counters["messenger_refused"] = moved.refused_connections
        counters |= {f"received_{k}": v for k, v in moved.received_bytes.items()}
        counters |= self._counts | self._engine.counts
        self.tell(orders.Tally(counters={k: float(v) for k, v in counters.items()}))


def main() -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    plan = orders.receive_down(sock)
    assert isinstance(plan, Plan)
    instance = SoakInstance(plan, sock)

    def listen() -> None:
        while True:
            message = orders.receive_down(sock)
            instance.events.put(orders.Stop() if message is None else message)

    threading.Thread(target=listen, name="listen", daemon=True).start()
    try:
        instance.run()
    except AssertionError as error:
        instance.wrong(f"an assertion failed: {error}")
        raise
    except BrokenPipeError:
        return  # the driver has ended


if __name__ == "__main__":
    main()
