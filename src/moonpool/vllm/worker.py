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
import time
from dataclasses import dataclass

from moonpool.config import VllmPlace
from moonpool.cost.fitted import FittedCost
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import PeerAddress
from moonpool.runtime.head_link import HeadLink
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
from moonpool.vllm.client import VllmClient, VllmError
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
    StepOver,
)
from moonpool.workers.messages import InstanceInfo, WantsToLeave, WorkId

log = logging.getLogger("moonpool.vllm")

STEP_S = 1e-3
"""So long after its first word a step's other words are waited for."""
LOOK_S = 2.0
"""How often a vLLM that is gone is looked for."""
MAX_UNWELL = 3
"""Beats in a row at which it does not say that it is well, until it is taken for gone."""


@dataclass(slots=True)
class _Engine:
    """The vLLM as it is from when it was found until it is gone."""

    facts: Facts
    layout: BlockLayout
    guest: GuestInstance
    incarnation: int
    cost: FittedCost | None = None


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
        self.role = role
        self.instance_id = instance_id
        self._machine = machine
        self._secret = secret
        self._place = place
        self._client = VllmClient(place.url, api_key)
        self._loop = asyncio.get_running_loop()
        self._link: HeadLink | None = None
        self._engine: _Engine | None = None
        self._asks: dict[WorkId, asyncio.Task[None]] = {}
        self._joining: asyncio.Task[None] | None = None
        self._joined = False
        self._gone = ""  # why the vLLM is taken for gone
        self._leaves_at_s: float | None = None

    def ask_to_leave(self, within_s: float) -> bool:
        """Has the head drain this instance, which ends `run`. False if there is no head to ask."""
        if not self._joined:
            return False
        self._leaves_at_s = time.monotonic() + within_s
        self._say_it_leaves()
        return True

    def _say_it_leaves(self) -> None:
        assert self._leaves_at_s is not None
        assert self._link is not None
        self._link.send(WantsToLeave(within_s=max(self._leaves_at_s - time.monotonic(), 0.0)))

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Raises WorkerError."""
        try:
            while True:
                self._engine = await self._found()
                self._gone = ""
                self._link = HeadLink(self.instance_id, self._secret, self)
                follow = [asyncio.create_task(self._beat()), asyncio.create_task(self._listen())]
                try:
                    await self._link.run(head_host, head_port, reconnect)
                finally:
                    for task in follow:
                        task.cancel()
                    await asyncio.gather(*follow, return_exceptions=True)
                    await self._drop_asks()
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
                    log.warning("waiting for vLLM: %s", said)
            await asyncio.sleep(LOOK_S)
        # What it computes with is not known: its blocks are its own, and only named here.
        layout = BlockLayout(
            model_fingerprint=f"vllm {facts.root}",
            dtype="bfloat16",
            block_tokens=facts.block_tokens,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            inner="vllm",
        )
        guest = GuestInstance(layout, facts.num_blocks, self.role, bool(self._place.events))
        settle_memory()
        return _Engine(facts, layout, guest, secrets.randbits(62))

    # Follower of the link

    def on_head(self) -> None:
        assert self._link is not None
        self._link.send(Apply(role=self.role, host=self._machine, pid=os.getpid()))

    def on_frame(self, frame: WorkFrame) -> None:
        match frame:
            case Setup():
                self._joining = asyncio.create_task(self._join(frame))
            case AttentionMoved():
                pass
            case _:
                self._post(frame)

    def on_lost(self) -> None:
        self._joined = False
        assert self._engine is not None
        assert self._link is not None
        if self._leaves_at_s is not None and time.monotonic() > self._leaves_at_s:
            self._link.stop("it leaves")
        else:
            self._perform(self._engine.guest.abort_all())

    async def _join(self, setup: Setup) -> None:
        engine, link = self._engine, self._link
        assert engine is not None
        assert link is not None
        channel, facts = link.channel, engine.facts
        problem = ""
        if setup.engine.kind != "vllm":
            problem = "the head serves with moonpool's own engine: start it with --engine vllm"
        elif not same_model(setup.model.name, facts):
            problem = (
                f"vLLM at {self._place.url} serves {facts.root}, and the head {setup.model.name}:"
                " give both the same model"
            )
        elif engine.cost is None:
            try:
                engine.cost = await measure(self._client, facts)
            except VllmError as error:
                problem = str(error)
        if problem:
            link.send(Failed(message=problem))
            link.fail(problem, "it cannot start")
            return
        if channel is None or channel is not link.channel:
            return  # the head went away meanwhile
        link.send(Joined(info=self._info(engine)))
        self._joined = True
        if self._leaves_at_s is not None:
            self._say_it_leaves()

    def _info(self, engine: _Engine) -> InstanceInfo:
        assert engine.cost is not None
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
        if self._engine is not None:
            self._perform(self._engine.guest.handle(event, self._loop.time()))

    def _perform(self, actions: list[GuestAction]) -> None:
        assert self._link is not None
        for action in actions:
            match action:
                case Tell():
                    self._link.send(action.report)
                case Ask():
                    task = asyncio.create_task(self._ask(action))
                    self._asks[action.work.work_id] = task
                case GiveUp():
                    self._drop_ask(action.work_id)
                case EndStepSoon():
                    self._loop.call_later(STEP_S, self._post, StepOver())
                case Depart():
                    self._link.stop("it leaves")

    async def _ask(self, ask: Ask) -> None:
        """One request, to its end. Whatever goes wrong ends this work alone."""
        work_id = ask.work.work_id
        engine = self._engine
        assert engine is not None
        error = "vLLM ended an answer without saying why"
        try:
            body = completion_body(ask, engine.facts.model_id, engine.layout.fingerprint)
            answer = self._client.answer(body, streamed=not ask.hands_over)
            async with contextlib.aclosing(answer):
                async for event in answer:
                    piece = read_piece(ask.work, event)
                    if piece.finish is not None:
                        self._asks.pop(work_id, None)
                    self._post(piece)
                    if piece.finish is not None:
                        return
        except (VllmError, DialectError) as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("asking vLLM at %s", self._place.url)
            error = f"an unexpected {type(failure).__name__} while vLLM was asked"
        if self._asks.pop(work_id, None) is not None:
            self._post(AskFailed(work_id, error))

    def _drop_ask(self, work_id: WorkId) -> None:
        task = self._asks.pop(work_id, None)
        if task is not None:
            task.cancel()

    async def _drop_asks(self) -> None:
        tasks = list(self._asks.values())
        for work_id in list(self._asks):
            self._drop_ask(work_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    # How it is

    async def _beat(self) -> None:
        unwell = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            assert self._engine is not None
            assert self._link is not None
            if self._joined:
                self._link.send(self._engine.guest.load())
            health = await self._client.health()
            unwell = 0 if health == "well" else unwell + 1
            if health == "gone" or unwell == MAX_UNWELL:
                self._gone = f"vLLM at {self._place.url} is gone"
                log.warning("%s; the instance leaves until it is back", self._gone)
                self._joined = False
                self._link.stop(self._gone)
                return

    async def _listen(self) -> None:
        """What it says of its cache."""
        if not self._place.events:
            return
        try:
            await EventReader(self._place.events, self._place.replay, self._post).run()
        except EventsError as error:
            assert self._link is not None
            self._link.fail(str(error), "it cannot start")
        except Exception:
            log.exception("KV events of vLLM at %s end", self._place.url)
