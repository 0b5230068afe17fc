"""Runs one instance of a run: the real state machine with a fake engine, arena and messenger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import InstanceInfo
from moonpool.scheduler.actions import (
    AbortStream,
    CancelStream,
    ExitProcess,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    LookUpBlocks,
    RunStep,
    SendBlocks,
    SendReport,
    StartStream,
    StopRepeating,
    StoreBlocks,
    WorkerAction,
)
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.scheduler.instance_config import InstanceMemory
from moonpool.scheduler.request_state import PendingTransfer
from moonpool.types import BlockId, BlockKey, InstanceId, Role
from tests.sim.disk import DiskDriver
from tests.sim.engine import FakeEngine
from tests.sim.loads import LoadOperation
from tests.sim.member import Member
from tests.sim.messenger import Arrivals, FetchOperation, StreamOperation, receive_ended
from tests.sim.shared_store import SharedStoreDriver
from tests.sim.truth import Content

if TYPE_CHECKING:
    from tests.sim.world import World


class Life(Member):
    """One incarnation of an instance with moonpool's engine. Its memory is lost when it dies."""

    def __init__(self, world: World, instance_id: InstanceId, role: Role, number: int) -> None:
        super().__init__(world, instance_id, role, number)
        self.disk: DiskDriver | SharedStoreDriver
        if world.options.store_shared:
            self.disk = SharedStoreDriver(self, world.shared_blocks)
        else:
            self.disk = DiskDriver(self, world.disk_of(instance_id))
        self.instance = Instance(
            world.instance_config,
            world.layout,
            sum(world.options.arenas) or world.options.num_blocks,
            role,
            world.cost,
            (world.eos,),
            InstanceMemory(
                self.disk.index(),
                world.options.arenas,
                segment_blocks=world.options.segment_blocks,
            ),
        )
        self.arena: dict[tuple[BlockId, int], Content] = {}
        self.reads: dict[str, FetchOperation] = {}
        self.fetches: dict[str, FetchOperation] = {}
        self.loads: dict[str, LoadOperation] = {}
        self.sends: dict[str, StreamOperation] = {}
        self.receives: dict[str, Arrivals] = {}
        self.early_streams: dict[str, StreamOperation] = {}
        self.engine = FakeEngine(self)
        self.driver = InstanceDriver(self.instance, lambda: self.clock.now, self._performers())
        self.num_damaged = 0  # number of slices that faults of the run damaged on their way

    @property
    def num_layers(self) -> int:
        return self.world.options.num_layers

    @property
    def layout(self) -> BlockLayout:
        return self.world.layout

    # The head:

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            instance_id=self.instance_id,
            role=self.instance.role,
            incarnation=self.number,
            address=self.address,
            layout=self.layout,
            num_blocks=self.instance.num_blocks,
            cost=self.world.cost,
            pid=self.number,
            host="here",
            chunk_tokens=self.world.options.chunk_tokens,
            num_stages=self.world.options.num_stages,
        )

    def validate(self) -> None:
        self.instance.validate()

    def lose_disk(self) -> None:
        self.disk.lose()

    def attempts(self) -> list[str]:
        requests = self.instance.requests.items()
        return [name for name, r in requests if PendingTransfer.FETCH not in r.pending]

    def keys_in_dram(self) -> set[BlockKey]:
        return set(self.instance.pool.keys())

    def keys_below(self) -> set[BlockKey]:
        tier = self.instance.tier
        return set() if tier is None else set(tier.slots.keys()) - self.keys_in_dram()

    # Actions:

    def _perform(self, actions: list[WorkerAction]) -> None:
        for action in actions:
            self.world.note(self.instance_id, action)
            self.driver.perform((action,))

    def _performers(self) -> Performers:
        return {
            SendReport: lambda a: self._report(a.report),
            RunStep: self.engine.run,
            StopRepeating: lambda a: None,  # a driver may ignore this action
            FetchBlocks: self._fetch,
            GrantRead: self._grant,
            StartStream: lambda a: StreamOperation(self, a.stream_id, a.target, a.timeout_s),
            SendBlocks: self._send,
            FinishStream: self._finish,
            AbortStream: self._abort,
            ExpectStream: self._expect,
            CancelStream: lambda a: self.later(lambda: self.end_receive(a.stream_id, "cancelled")),
            StoreBlocks: self.disk.store,
            LoadBlocks: self.disk.load,
            LookUpBlocks: self.disk.look_up,
            ForgetStored: self.disk.forget,
            ExitProcess: lambda a: self.die(),
        }

    def _fetch(self, action: FetchBlocks) -> None:
        self.fetches[action.fetch_id] = FetchOperation(
            self, action.fetch_id, action.source, action.keys, action.block_ids, action.timeout_s
        )

    def _grant(self, action: GrantRead) -> None:
        # The reader may have timed out during the load from the disk.
        if action.read_id in self.reads:
            self.reads[action.read_id].on_granted(action.block_ids)

    def _send(self, action: SendBlocks) -> None:
        if action.stream_id in self.sends:
            for index, block_id in action.blocks:
                slices = ((index, layer, block_id) for layer in range(self.num_layers))
                self.sends[action.stream_id].put(*slices)

    def _finish(self, action: FinishStream) -> None:
        if action.stream_id in self.sends:
            self.sends[action.stream_id].put(None)

    def _abort(self, action: AbortStream) -> None:
        if action.stream_id in self.sends:
            self.sends[action.stream_id].abort()

    def _expect(self, action: ExpectStream) -> None:
        stream_id = action.stream_id
        arrivals = Arrivals(self, tuple(action.block_ids), action.first_index)
        self.receives[stream_id] = arrivals
        early = self.early_streams.pop(stream_id, None)
        if early is not None:
            early.on_expected(arrivals)
        self.clock.after(
            action.timeout_s, lambda: self.alive and self.end_receive(stream_id, "timed out")
        )

    def end_receive(self, stream_id: str, error: str) -> None:
        arrivals = self.receives.pop(stream_id, None)
        if arrivals is not None:
            self.post(receive_ended(stream_id, arrivals, error))

    # The arena:

    def read(self, block_id: BlockId, layer: int) -> Content:
        assert self._held(block_id), "read of a block without a hold"
        return self.arena[(block_id, layer)]

    def write(self, block_id: BlockId, layer: int, content: Content) -> None:
        if not self.alive:
            return
        assert self._held(block_id), "write to a block without a hold"
        assert self.instance.pool.key_of(block_id) is None, "write to a cached block"
        self.arena[(block_id, layer)] = content

    def _held(self, block_id: BlockId) -> bool:
        return self.instance.pool.is_held(block_id)
