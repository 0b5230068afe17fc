"""Runs an instance whose engine is a vLLM server: the real state machine and message formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from moonpool.protocol.messages import AttemptId, InstanceInfo
from moonpool.scheduler.actions import ExitProcess, SendReport
from moonpool.types import BlockKey, InstanceId, Role
from moonpool.vllm import dialect
from moonpool.vllm.actions import (
    CacheEventsReceived,
    CancelRequest,
    EngineStepEnded,
    FlushStep,
    SubmitFailed,
    SubmitRequest,
    VllmAction,
)
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.events import read_batch
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.measure import FAR_BYTES_PER_S
from moonpool.vllm.worker import STEP_S
from tests.sim.clock import Link
from tests.sim.member import Member
from tests.sim.vllm_server import Served

if TYPE_CHECKING:
    from tests.sim.world import World


class VllmLife(Member):
    """One incarnation of the adapter process beside a server. The server outlives the adapter."""

    instance: VllmInstance

    def __init__(self, world: World, instance_id: InstanceId, role: Role, number: int) -> None:
        super().__init__(world, instance_id, role, number)
        self.server = world.vllm_server_of(instance_id)
        facts = self.facts = self.server.facts()
        self.instance = VllmInstance(
            world.layout,
            facts.num_blocks,
            role,
            world.options.publishes_events,
            facts.caches_prefixes,
            context_tokens=facts.offer.max_model_tokens,
        )
        self.knows_all = not self.server.num_batches  # whether events have named all cached blocks
        self._submitted: dict[AttemptId, Served] = {}
        self._next_batch: int | None = None
        self._batches = Link(self.clock, world.options.slow_delay_s)
        if world.options.publishes_events:
            self.server.life = self

    def info(self) -> InstanceInfo:
        facts, cost = self.facts, self.world.cost
        return InstanceInfo(
            instance_id=self.instance_id,
            role=self.role,
            incarnation=self.number,
            address=self.address,
            layout=self.world.layout,
            num_blocks=facts.num_blocks,
            cost=msgspec.structs.replace(
                cost,
                shared_memory_bytes_per_s=FAR_BYTES_PER_S,
                network_bytes_per_s=FAR_BYTES_PER_S,
            ),
            pid=self.number,
            host="here",
            context_tokens=facts.offer.max_model_tokens,
        )

    def validate(self) -> None:
        """Asserts that the server owns all blocks and that its gauges are plausible."""
        load = self.instance.load()
        assert load.num_waiting >= 0 and load.num_running >= 0 and load.free_blocks >= 0

    def lose_disk(self) -> None:
        pass

    def attempts(self) -> list[str]:
        return [*self.instance.attempt_ids, *self.server.attempts()]

    def keys_in_dram(self) -> set[BlockKey]:
        return set(self.instance.cached_keys)

    def keys_below(self) -> set[BlockKey]:
        return set()

    def die(self) -> None:
        self._batches.cut = True
        self.server.leave(self)
        if self.server.life is self:
            self.server.life = None
        super().die()

    def lose_server(self) -> None:
        """Ends the server; the adapter notices and leaves until the server is back."""
        self.server.crash()
        self.clock.after(self.clock.rng.random() * 0.5, lambda: self.alive and self.die())

    # Actions:

    def _perform(self, actions: list[VllmAction]) -> None:
        for action in actions:
            self.world.note(self.instance_id, action)
            match action:
                case SendReport():
                    self._report(action.report)
                case SubmitRequest():
                    self._submit(action)
                case CancelRequest():
                    served = self._submitted.pop(action.attempt_id, None)
                    if served is not None:
                        self.server.cancel(served)
                case FlushStep():
                    self.clock.after(STEP_S, lambda: self.alive and self.post(EngineStepEnded()))
                case ExitProcess():
                    self.die()

    def _submit(self, submit: SubmitRequest) -> None:
        attempt_id = submit.attempt.attempt_id
        try:
            body = dialect.completion_body(
                submit,
                self.facts.model_id,
                self.facts.offer.max_model_tokens,
                self.world.layout.fingerprint,
            )
        except DialectError as error:
            failed = SubmitFailed(attempt_id, str(error), error.refused)
            self.later(lambda: self.post(failed))
            return
        self._submitted[attempt_id] = self.server.submit(self, submit.attempt, body)

    # Messages of the server:

    def on_answer(self, served: Served, payload: bytes) -> None:
        attempt_id = served.work.attempt_id
        if not self.alive or self._submitted.get(attempt_id) is not served:
            return
        try:
            output = dialect.read_output(served.work, payload)
        except DialectError as error:
            self.on_error(served, str(error), error.refused)
            return
        if output.finish is not None:
            del self._submitted[attempt_id]
        self.post(output)

    def on_error(self, served: Served, message: str, refused: bool = False) -> None:
        attempt_id = served.work.attempt_id
        if self.alive and self._submitted.get(attempt_id) is served:
            del self._submitted[attempt_id]
            self.post(SubmitFailed(attempt_id, message, refused))

    def hear(self, generation: int, number: int, payload: bytes) -> None:
        """Receives a batch of KV events. If a batch number is missing, the earlier events do not
        count."""

        def arrives() -> None:
            if generation != self.server.generation:
                return
            due, self._next_batch = self._next_batch, number + 1
            if due is not None and number != due:
                self.knows_all = False
                self.world.seen["lost KV events"] += 1
                self.post(CacheEventsReceived((), lost=True))
            elif due is None and number:
                self.knows_all = False
            self.post(CacheEventsReceived(read_batch(payload)))

        self._batches.carry(arrives)

    # The end:

    def check_end(self) -> None:
        """Asserts that the announced blocks are those of the server."""
        self.server.check_end()
        assert self.instance.is_idle(), f"{self.instance_id} still holds attempts"
        load = self.instance.load()
        assert not load.num_waiting and not self._submitted and load.cache_view is not None
        if load.cache_view.source != "events":  # the events of this server are only assumptions
            return
        shared = [t for t in self.world.truths.values() if t.request.use_cache]
        public = {key for truth in shared for key in truth.named_contents(self.world.layout)}
        announced = self.keys_in_dram() & public
        there = set(self.server.kept)
        if self._next_batch != (self.server.num_batches or None):
            return  # the last batch was lost, and no later batch shows that
        assert announced <= there, f"{self.instance_id} announces blocks that vLLM does not have"
        if self.knows_all:
            assert announced == there, f"{self.instance_id} does not announce blocks of vLLM"
