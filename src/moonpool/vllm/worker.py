"""An instance whose engine is a vLLM that runs already: this process is between it and the head.

Joins as long as the vLLM is well. When that is gone the instance leaves, so that its requests go on
elsewhere, and joins anew, as another incarnation, when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any

from moonpool.config import VllmPlace
from moonpool.cost.fitted import FittedCost
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import PeerAddress
from moonpool.runtime.head_link import HeadChannel, HeadLink, WorkerError
from moonpool.runtime.leaving import Leaving
from moonpool.runtime.protocol import (
    HEARTBEAT_S,
    Apply,
    AttentionMoved,
    Failed,
    Joined,
    Setup,
    WorkFrame,
)
from moonpool.runtime.settle import settle_memory
from moonpool.types import InstanceId, Role
from moonpool.vllm.client import Health, VllmClient, VllmError
from moonpool.vllm.dialect import DialectError, Facts, completion_body, read_piece, same_model
from moonpool.vllm.events import EventReader, EventsError
from moonpool.vllm.measure import measure
from moonpool.workers.actions import Depart, Tell
from moonpool.workers.guest import (
    Ask,
    AskFailed,
    EndStepSoon,
    GiveUp,
    GuestAction,
    GuestEvent,
    GuestInstance,
    NamesTold,
    Piece,
    StepOver,
)
from moonpool.workers.messages import InstanceInfo, WorkId

log = logging.getLogger("moonpool.vllm")

STEP_S = 1e-3
"""So long after its first word a step's other words are waited for."""
LOOK_S = 2.0
"""How often a vLLM that is gone is looked for."""
WEIGHT: dict[Health, int] = {"well": 0, "unwell": 2, "gone": 3}
MAX_UNWELL = 6
"""Of weights, beat after beat, until it is taken for gone: an engine may be slow to answer."""


@dataclass(slots=True)
class _Engine:
    """The vLLM as it is from when it was found until it is gone."""

    facts: Facts
    incarnation: int
    cost: FittedCost | None = None
    layout: BlockLayout | None = None
    guest: GuestInstance | None = None  # once a head has said what it serves


class VllmWorker:
    """`run` serves until the head says stop."""

    def __init__(
        self,
        role: Role,
        instance_id: InstanceId,
        machine: str,
        secret: bytes,
        place: VllmPlace,
        api_key: str = "",
    ) -> None:
        """Raises WorkerError."""
        self.role = role
        self.instance_id = instance_id
        self._machine = machine
        self._secret = secret
        self._place = place
        self._client = VllmClient(place.url, api_key)
        try:
            self._reader = EventReader(place.events, place.replay) if place.events else None
        except EventsError as error:
            raise WorkerError(str(error)) from None
        self._loop = asyncio.get_running_loop()
        self._link = HeadLink(instance_id, secret, self)
        self._engine: _Engine | None = None
        self._asks: dict[WorkId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._join_lock = asyncio.Lock()
        self._joined = False
        self._gone = False
        self._leaving = Leaving()

    def ask_to_leave(self, within_s: float) -> bool:
        """Has the head drain this instance, which ends `run`. False if there is no head to ask."""
        if not self._joined:
            return False
        self._leaving.begin(within_s, self._link)
        return True

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Raises WorkerError."""
        try:
            while True:
                self._engine = await self._found()
                self._gone = False
                self._link = HeadLink(self.instance_id, self._secret, self)
                self._spawn(self._beat())
                try:
                    await self._link.run(head_host, head_port, reconnect)
                finally:
                    self._joined = False
                    await self._end_tasks()
                if not self._gone:
                    return
        finally:
            await self._client.close()

    async def _found(self) -> _Engine:
        """Waits for it, however long that takes."""
        said = ""
        while True:
            try:
                facts = await self._client.facts()
                break
            except VllmError as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("waiting for vLLM at %s: %s", self._place.url, said)
            await asyncio.sleep(LOOK_S)
        found = _Engine(facts, secrets.randbits(62))
        before = self._engine
        if before is not None and before.facts == facts:
            found.cost = before.cost  # it would be measured while others hurry to it
        return found

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_tasks(self) -> None:
        self._asks.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Follower of the link

    def on_head(self) -> None:
        self._link.send(Apply(role=self.role, host=self._machine, pid=os.getpid()))

    def on_frame(self, frame: WorkFrame) -> None:
        match frame:
            case Setup():
                self._spawn(self._join(frame, self._link.channel))
            case AttentionMoved():
                pass
            case _:
                self._post(frame)

    def on_lost(self) -> None:
        self._joined = False
        if self._leaving.overdue:
            self._link.stop("it leaves")
        elif self._engine is not None and self._engine.guest is not None:
            self._perform(self._engine.guest.abort_all())

    async def _join(self, setup: Setup, channel: HeadChannel | None) -> None:
        async with self._join_lock:  # the head may be lost and found again while we measure
            engine = self._engine
            if engine is None or self._link.stopping:
                return
            try:
                problem = await self._prepare(setup, engine)
            except Exception as error:
                log.exception("the instance could not be brought up")
                problem = f"an unexpected {type(error).__name__}: {error}"
        if problem:
            self._link.send(Failed(message=problem))
            self._link.fail(problem, "it cannot start")
        elif channel is not None and channel is self._link.channel and not self._link.stopping:
            self._link.send(Joined(info=self._info(engine)))
            self._joined = True
            self._leaving.tell(self._link)

    async def _prepare(self, setup: Setup, engine: _Engine) -> str:
        """Makes the instance what it will be; or says in one line why that cannot be."""
        url, facts = self._place.url, engine.facts
        if setup.engine.kind != "vllm":
            return "the head serves with moonpool's own engine: start it with --engine vllm"
        if not same_model(setup.model.name, facts):
            return (
                f"vLLM at {url} serves {facts.root}, and the head {setup.model.name}: give both the"
                " same model"
            )
        layout = _layout(setup.model.name, facts)
        if engine.layout not in (None, layout):
            return "the head came back with another configuration; start this worker anew"
        if engine.cost is None:
            try:
                engine.cost = await measure(self._client, facts)
            except VllmError as error:
                if await self._client.health() == "well":
                    return f"vLLM at {url}: {error}"
                self._leave_gone()
                return ""
        if engine.guest is None:
            engine.layout = layout
            engine.guest = GuestInstance(
                layout, facts.num_blocks, self.role, self._reader is not None, facts.caches_prefixes
            )
            if self._reader is not None:
                self._spawn(self._listen(self._reader))
            settle_memory()
        return ""

    def _info(self, engine: _Engine) -> InstanceInfo:
        assert engine.cost is not None
        assert engine.layout is not None
        facts = engine.facts
        return InstanceInfo(
            instance_id=self.instance_id,
            role=self.role,
            incarnation=engine.incarnation,
            address=PeerAddress(
                instance_id=self.instance_id, host_id="", unix_name="", tcp_host="", tcp_port=0
            ),
            layout=engine.layout,
            num_blocks=facts.num_blocks,
            cost=engine.cost,
            pid=os.getpid(),
            host=self._machine,
            largest_blocks=min(facts.max_model_tokens // facts.block_tokens, facts.num_blocks),
        )

    # Events in, actions out

    def _post(self, event: GuestEvent) -> None:
        if self._engine is not None and self._engine.guest is not None:
            self._perform(self._engine.guest.handle(event, self._loop.time()))

    def _perform(self, actions: list[GuestAction]) -> None:
        for action in actions:
            match action:
                case Tell():
                    self._link.send(action.report)
                case Ask():
                    self._asks[action.work.work_id] = self._spawn(self._ask(action))
                case GiveUp():
                    task = self._asks.pop(action.work_id, None)
                    if task is not None:
                        task.cancel()
                case EndStepSoon():
                    self._loop.call_later(STEP_S, self._post, StepOver())
                case Depart():
                    self._link.stop("it leaves")

    async def _ask(self, ask: Ask) -> None:
        """One request, to its end. Whatever goes wrong ends this work alone."""
        work_id = ask.work.work_id
        failure = AskFailed(work_id, "its vLLM ended an answer without saying why")
        try:
            async with contextlib.aclosing(self._pieces(ask)) as pieces:
                async for piece in pieces:
                    if piece.finish is not None:
                        self._asks.pop(work_id, None)
                    self._post(piece)
        except (VllmError, DialectError) as error:
            failure = AskFailed(work_id, str(error), error.refused)
        except Exception as error:
            log.exception("asking vLLM at %s", self._place.url)
            failure = AskFailed(work_id, f"an unexpected {type(error).__name__} at its vLLM")
        if self._asks.pop(work_id, None) is not None:
            log.warning("vLLM at %s: %s", self._place.url, failure.message)
            self._post(failure)

    async def _pieces(self, ask: Ask) -> AsyncGenerator[Piece]:
        """To the end of the answer's last line, so that the connection can serve the next."""
        engine = self._engine
        assert engine is not None
        assert engine.layout is not None
        body = completion_body(ask, engine.facts.model_id, engine.layout.fingerprint)
        answer = self._client.answer(body, streamed=not ask.hands_over)
        async with contextlib.aclosing(answer):
            async for event in answer:
                yield read_piece(ask.work, event)

    # How it is

    async def _beat(self) -> None:
        unwell = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._joined and self._engine is not None and self._engine.guest is not None:
                self._link.send(self._engine.guest.load())
            health = await self._client.health()
            unwell = 0 if health == "well" else unwell + WEIGHT[health]
            if unwell >= MAX_UNWELL:
                self._leave_gone()
                return

    def _leave_gone(self) -> None:
        log.warning("vLLM at %s is gone; the instance leaves until it is back", self._place.url)
        self._gone, self._joined = True, False
        self._link.stop("its vLLM is gone")

    async def _listen(self, reader: EventReader) -> None:
        """What it says of its cache."""
        while True:
            try:
                await reader.run(self._post)
            except Exception as error:
                log.warning("KV events of vLLM at %s: %s", self._place.url, error)
            self._post(NamesTold((), anew=True))
            await asyncio.sleep(LOOK_S)


def _layout(model: str, facts: Facts) -> BlockLayout:
    """What it computes with is not known: its blocks are its own, and only named here."""
    return BlockLayout(
        model_fingerprint=f"vllm {model}",
        dtype="bfloat16",
        block_tokens=facts.block_tokens,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        inner="vllm",
    )
