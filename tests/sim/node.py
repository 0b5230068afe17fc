"""One instance of a run: the real state machine with a fake engine, arena and messenger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.attention_offload.pools.partitions import PartitionedPool
from moonpool.kvcache.block_pool import BlockPool
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import BlocksChanged, InstanceInfo, LeaveRequested, Report
from moonpool.protocol.transfer_events import PeerAddress
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
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance
from moonpool.types import BlockId, InstanceId, Role
from tests.sim.clock import Link
from tests.sim.disk import DiskDriver
from tests.sim.engine import FakeEngine
from tests.sim.loads import LoadOperation
from tests.sim.messenger import Arrivals, FetchOperation, StreamOperation, receive_ended
from tests.sim.shared_store import SharedStoreDriver
from tests.sim.truth import Content

if TYPE_CHECKING:
    from tests.sim.world import World


class Life:
    """One incarnation of an instance; its memory is lost when it dies."""

    def __init__(self, world: World, instance_id: InstanceId, role: Role, number: int) -> None:
        self.world = world
        self.clock = world.clock
        self.instance_id = instance_id
        self.role = role
        self.number = number
        self.alive = True
        self.joined = False
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
            self.disk.index(),
            world.options.arenas,
            segment_blocks=world.options.segment_blocks,
        )
        self.arena: dict[tuple[BlockId, int], Content] = {}
        self.reads: dict[str, FetchOperation] = {}
        self.fetches: dict[str, FetchOperation] = {}
        self.loads: dict[str, LoadOperation] = {}
        self.sends: dict[str, StreamOperation] = {}
        self.receives: dict[str, Arrivals] = {}
        self.early_streams: dict[str, StreamOperation] = {}
        self.leaves_within_s: float | None = None
        self.engine = FakeEngine(self)
        self._num_losses = 0
        self._events: deque[WorkerEvent] = deque()
        self._performing = False
        self._to_head = Link(self.clock, world.options.slow_delay_s)
        self._from_head = Link(self.clock, world.options.slow_delay_s)

    @property
    def num_layers(self) -> int:
        return self.world.options.num_layers

    @property
    def layout(self) -> BlockLayout:
        return self.world.layout

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(
            instance_id=self.instance_id,
            host_id="here",
            unix_name="",
            tcp_host="127.0.0.1",
            tcp_port=self.number,
        )

    # The head

    def join(self) -> None:
        """Connects to the head and sends its description."""
        if not self.alive:
            return
        self._to_head.cut = self._from_head.cut = True
        self._to_head = Link(self.clock, self.world.options.slow_delay_s)
        self._from_head = Link(self.clock, self.world.options.slow_delay_s)
        down, info = self._from_head, self.info()
        self._to_head.carry(lambda: self.world.on_joined(self, info, down))
        if self.leaves_within_s is not None:
            self.want_to_leave(self.leaves_within_s)

    def join_at_once(self) -> None:
        self.world.on_joined(self, self.info(), self._from_head)

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

    def lose_head(self) -> None:
        """Breaks the connection to the head; the process survives and connects again."""
        if not self.alive:
            return
        self._cut()
        self._perform(self.instance.abort_all())
        self.instance.validate()
        self._num_losses += 1
        latest = self._num_losses
        self.clock.after(
            self.clock.rng.random(), lambda: latest == self._num_losses and self.join()
        )

    def die(self) -> None:
        self.alive = False
        self._cut()
        self.world.on_died(self)

    def want_to_leave(self, within_s: float) -> None:
        """The process received a signal to end. It repeats its report to a new head."""
        self.leaves_within_s = within_s
        self._report(LeaveRequested(within_s=within_s))

    def _cut(self) -> None:
        self._to_head.cut = self._from_head.cut = True
        self.world.on_link_cut(self, self._from_head)
        self.joined = False

    def _report(self, report: Report) -> None:
        if isinstance(report, BlocksChanged) and self.world.chance("lost_event_rate"):
            self.world.promises.on_lost_event(self.instance_id, report)
            return
        self._to_head.carry(lambda: self.world.on_report(self, report))

    # Events and actions

    def post(self, event: WorkerEvent) -> None:
        """Handles an event and performs what follows. What comes of an action at once is handled
        after all actions before it, as a driver does: else reports would overtake each other."""
        self._events.append(event)
        if self._performing:
            return
        self._performing = True
        while self._events:
            event = self._events.popleft()
            if not self.alive:
                continue
            self.world.note(self.instance_id, event)
            actions = self.instance.handle(event, self.clock.now)
            self.instance.validate()
            self._perform(actions)
        self._performing = False

    def later(self, callback: Callable[[], None]) -> None:
        """Runs the callback some time later, if the instance is still alive."""
        self.clock.soon(self.world.options.slow_delay_s, lambda: self.alive and callback())

    def _perform(self, actions: list[WorkerAction]) -> None:
        for action in actions:
            self.world.note(self.instance_id, action)
            match action:
                case SendReport():
                    self._report(action.report)
                case RunStep():
                    self.engine.run(action)
                case StopRepeating():
                    pass  # a driver may ignore this action
                case FetchBlocks():
                    source, fetch_id = action.source, action.fetch_id
                    self.fetches[fetch_id] = FetchOperation(
                        self, fetch_id, source, action.keys, action.block_ids, action.timeout_s
                    )
                case GrantRead():
                    # The reader may have timed out during the load from the disk.
                    if action.read_id in self.reads:
                        self.reads[action.read_id].on_granted(action.block_ids)
                case StartStream():
                    StreamOperation(self, action.stream_id, action.target, action.timeout_s)
                case SendBlocks():
                    for index, block_id in action.blocks:
                        self._send(action.stream_id, index, block_id)
                case FinishStream():
                    if action.stream_id in self.sends:
                        self.sends[action.stream_id].put(None)
                case AbortStream():
                    if action.stream_id in self.sends:
                        self.sends[action.stream_id].abort()
                case ExpectStream():
                    self._expect(action)
                case StoreBlocks():
                    self.disk.store(action)
                case LoadBlocks():
                    self.disk.load(action)
                case LookUpBlocks():
                    self.disk.look_up(action)
                case ForgetStored():
                    self.disk.forget(action)
                case ExitProcess():
                    self.die()
                case CancelStream():
                    stream_id = action.stream_id
                    self.later(lambda s=stream_id: self.end_receive(s, "cancelled"))

    def _send(self, stream_id: str, index: int, block_id: BlockId) -> None:
        if stream_id in self.sends:
            layers = range(self.num_layers)
            self.sends[stream_id].put(*((index, layer, block_id) for layer in layers))

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

    # The arena

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
        pool: BlockPool = self.instance.pool
        if isinstance(pool, PartitionedPool):
            pool, block_id = pool._own(block_id)
        return pool._num_holds[block_id] > 0
