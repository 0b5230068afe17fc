"""One instance of a run: the real state machine, a fake engine, arena and messenger around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.kvcache.blocks import BlockPool
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.partitions import PartitionedPool
from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import BlockId, InstanceId, Role, Token
from moonpool.workers.actions import (
    AbortStream,
    ArenaBack,
    ArenaLost,
    CancelStream,
    Depart,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    LookUpBlocks,
    OpenStream,
    RunStep,
    SendBlocks,
    StepEnded,
    StepEntry,
    StepFailed,
    StepsEnded,
    StopRepeating,
    StoreBlocks,
    Tell,
    WorkerAction,
    WorkerEvent,
)
from moonpool.workers.instance import Instance
from moonpool.workers.messages import (
    BlocksChanged,
    InstanceInfo,
    Report,
    WantsToLeave,
    WorkId,
)
from tests.sim.clock import Link
from tests.sim.disk import DiskDriver
from tests.sim.messenger import Arrivals, FetchOperation, StreamOperation, receive_ended
from tests.sim.shared_store import SharedStoreDriver
from tests.sim.truth import Content

if TYPE_CHECKING:
    from tests.sim.world import World


SPOILED: Content = (-1, -1)


class Life:
    """One incarnation of an instance; what it had is gone when it dies."""

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
        )
        self.arena: dict[tuple[BlockId, int], Content] = {}
        self.reads: dict[str, FetchOperation] = {}
        self.sends: dict[str, StreamOperation] = {}
        self.receives: dict[str, Arrivals] = {}
        self.early_streams: dict[str, StreamOperation] = {}
        self._stages_free_s = [0.0] * world.options.num_stages
        self._num_steps = 0
        self._last_step = 0
        self._spoiled: dict[WorkId, tuple[int, int]] = {}  # by which step, from which token
        self.leaves_within_s: float | None = None
        self._num_losses = 0
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
        """Connects to the head, and says who it is."""
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
        """The connection to the head breaks; the process lives on, and connects again."""
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
        """Its process was told to end. It says so again to a head that knows nothing of it."""
        self.leaves_within_s = within_s
        self._report(WantsToLeave(within_s=within_s))

    def _cut(self) -> None:
        self._to_head.cut = self._from_head.cut = True
        self.world.on_link_cut(self, self._from_head)
        self.joined = False

    def _report(self, report: Report) -> None:
        if isinstance(report, BlocksChanged) and self.world.chance("lost_event_rate"):
            return
        self._to_head.carry(lambda: self.world.on_report(self, report))

    # Events and actions

    def post(self, event: WorkerEvent) -> None:
        if not self.alive:
            return
        self.world.note(self.instance_id, event)
        actions = self.instance.handle(event, self.clock.now)
        self.instance.validate()
        self._perform(actions)

    def later(self, callback: Callable[[], None]) -> None:
        """Some time later, if this life lasts."""
        self.clock.soon(self.world.options.slow_delay_s, lambda: self.alive and callback())

    def _perform(self, actions: list[WorkerAction]) -> None:
        for action in actions:
            self.world.note(self.instance_id, action)
            match action:
                case Tell():
                    self._report(action.report)
                case RunStep():
                    self._run_step(action)
                case StopRepeating():
                    pass  # a driver may be that lazy
                case FetchBlocks():
                    source, fetch_id = action.source, action.fetch_id
                    FetchOperation(
                        self, fetch_id, source, action.keys, action.block_ids, action.timeout_s
                    )
                case GrantRead():
                    # The reader may have given up while the blocks came from the disk.
                    if action.read_id in self.reads:
                        self.reads[action.read_id].on_granted(action.block_ids)
                case OpenStream():
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
                case Depart():
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
        assert self._held(block_id), "read of a block that nobody holds"
        return self.arena[(block_id, layer)]

    def write(self, block_id: BlockId, layer: int, content: Content) -> None:
        if not self.alive:
            return
        assert self._held(block_id), "write to a block that nobody holds"
        assert self.instance.pool.key_of(block_id) is None, "write to a sealed block"
        self.arena[(block_id, layer)] = content

    def _held(self, block_id: BlockId) -> bool:
        pool: BlockPool = self.instance.pool
        if isinstance(pool, PartitionedPool):
            pool, block_id = pool._own(block_id)
        return pool._num_holds[block_id] > 0

    # The engine

    def _run_step(self, step: RunStep) -> None:
        under_way = self.world.instance_config.max_steps_in_flight
        assert self._num_steps < under_way, "more steps at a time than there may be"
        self._num_steps += 1
        self._last_step += 1
        number = self._last_step
        repeats = self.clock.rng.randint(1, step.max_repeats)
        drawn = [self._draw(entry, repeats) for entry in step.entries]
        repeats = min((len(tokens) for tokens in drawn if tokens), default=1)
        # What the engine was given must not change under its hands.
        entries = [
            (e, tuple(e.block_ids), (*e.new_token_ids, *tokens[: repeats - 1]))
            for e, tokens in zip(step.entries, drawn, strict=True)
        ]
        failed = self.world.chance("step_failure_rate")
        if failed:
            for entry in step.entries:
                self._spoiled.setdefault(entry.work_id, (number, entry.start))
        began_s = time_s = self.clock.now
        stages = len(self._stages_free_s)
        for layer in range(self.num_layers):
            stage = layer * stages // self.num_layers
            time_s = max(time_s, self._stages_free_s[stage])
            time_s += 0.0005 + self.clock.delay_s(self.world.options.slow_delay_s)
            self._stages_free_s[stage] = time_s
            self.clock.at(time_s, lambda layer=layer: self._run_layer(entries, layer, number))
            if failed and self.clock.rng.random() < 0.5:
                break
        time_s = max(time_s, self._stages_free_s[-1])  # in the order in which they began
        self._stages_free_s[-1] = ends_s = time_s
        time_s -= began_s
        event: StepEnded | StepsEnded | StepFailed
        arenas = self.world.options.arenas
        if arenas and self.world.chance("arena_loss_rate"):
            event = self._lose_arena(self.clock.rng.randrange(len(arenas)), ends_s)
        elif failed:
            event = StepFailed("the engine failed")
        elif step.max_repeats > 1:
            event = StepsEnded([tuple(map(Token, tokens[:repeats])) for tokens in drawn], time_s)
        else:
            event = StepEnded(tuple(Token(t[0]) if t else None for t in drawn), time_s)
        self.clock.at(ends_s, lambda: self._end_step(event))

    def _lose_arena(self, arena: int, when_s: float) -> StepFailed:
        """A step finds out; the instance hears of the loss before or after, and then that the
        arena is there again."""
        rng = self.clock.rng
        lost_s = when_s + rng.choice((-0.0001, 0.001))
        self.clock.at(lost_s, lambda: self.post(ArenaLost(arena, "the arena is gone")))
        back_s = lost_s + rng.choice((0.001, 0.1, 2.0)) * rng.random()
        self.clock.at(back_s, lambda: self.post(ArenaBack(arena)))
        return StepFailed("an arena is gone", lost_arena=arena)

    def _end_step(self, event: StepEnded | StepsEnded | StepFailed) -> None:
        self._num_steps -= 1
        self.post(event)

    def _draw(self, entry: StepEntry, repeats: int) -> tuple[int, ...]:
        """Checks the entry's tokens against the truth; the tokens that follow, if wanted."""
        truth = self.world.truth_of(entry.work_id)
        end = entry.start + len(entry.new_token_ids)
        assert len(entry.new_token_ids) > 0
        assert truth.tokens[entry.start : end] == tuple(entry.new_token_ids)
        if entry.draw is None:
            return ()
        assert entry.draw == truth.request.sampling
        assert truth.tokens[truth.request.num_prompt_tokens : end] == tuple(entry.generated)
        assert end < len(truth.tokens), "computes on after the answer's end"
        return truth.tokens[end : end + repeats]

    def _run_layer(
        self,
        entries: list[tuple[StepEntry, tuple[BlockId, ...], tuple[int, ...]]],
        layer: int,
        number: int,
    ) -> None:
        if not self.alive:
            return
        size = self.layout.block_tokens
        for entry, block_ids, new_token_ids in entries:
            truth = self.world.truth_of(entry.work_id)
            start, end = entry.start, entry.start + len(new_token_ids)
            for index in range(self.layout.blocks_for(start)):
                right = truth.slice_content(layer, index, start, size)
                # After a step that failed, later ones that were under way compute on nonsense.
                failed, first = self._spoiled.get(entry.work_id, (number, 0))
                if failed < number and index >= first // size:
                    self.write(block_ids[index], layer, SPOILED)
                    continue
                found = self.read(block_ids[index], layer)
                assert found == right, f"{entry.work_id}: block {index} is not what it should be"
            for index in range(start // size, self.layout.blocks_for(end)):
                right = truth.slice_content(layer, index, end, size)
                self.write(block_ids[index], layer, right)
            for index, block_id in entry.sends:
                assert block_ids[index] == block_id
                if entry.work_id in self.sends:
                    self.sends[entry.work_id].put((index, layer, block_id))
