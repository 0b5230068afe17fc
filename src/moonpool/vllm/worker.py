"""The process of an instance whose engine is a vLLM server that already runs.

The instance is joined while that server is healthy. When the server is gone, the instance leaves,
so that its requests continue on other instances. When the server is back, the instance joins again
as another incarnation.
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

import msgspec

from moonpool.config.tables import VllmAddress
from moonpool.cost.fitted import FittedCost
from moonpool.discovery.membership import HOLD_OFFS_S, STEADY_S
from moonpool.gc_tuning import settle_memory
from moonpool.link.head_link import HeadChannel, HeadLink, InstanceProcess, WorkerError
from moonpool.link.tls import PeerTls
from moonpool.plugins.workers import WorkerSettings
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.frames import HEARTBEAT_S, Apply, AttentionMoved, Joined, Setup, WorkFrame
from moonpool.protocol.messages import (
    AttemptId,
    AttemptSpec,
    CostMeasured,
    InstanceInfo,
    InstanceLoad,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.protocol.versions import TAKES_OFFERS
from moonpool.scheduler.actions import ExitProcess, SendReport
from moonpool.types import InstanceId, Role
from moonpool.vllm.cache_watch import CacheWatch
from moonpool.vllm.client import Health, VllmClient, VllmError
from moonpool.vllm.dialect import DialectError, completion_body, is_streamed, read_output
from moonpool.vllm.events import EventReader, EventsError
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.forwarded import end_of, forwarded_body, read_part
from moonpool.vllm.instance import (
    CacheEventsReceived,
    CancelRequest,
    EngineOutput,
    EngineStepEnded,
    ExplainCache,
    FlushStep,
    SubmitFailed,
    SubmitRequest,
    TimePassed,
    VllmAction,
    VllmEvent,
    VllmInstance,
)
from moonpool.vllm.measure import ASSUMED_COST, describe_cost, measure, probe
from moonpool.vllm.parsers import find_parsers

log = logging.getLogger("moonpool.vllm")

STEP_S = 1e-3
"""How long after its first output the other outputs of a step are awaited."""
LOOK_S = 2.0
"""How often a lost vLLM server is probed."""
WEIGHT: dict[Health, int] = {"well": 0, "unwell": 2, "gone": 3}
SAY_S = 5.0
"""How often progress is logged."""
FORWARDED_REFUSALS = (404, 405, 415, 501)
"""Statuses with which a server refuses a call that it does not serve."""
MAX_UNWELL = 6
"""The sum of weights over successive beats at which the server counts as gone: a busy engine may
be slow to respond."""


@dataclass(slots=True)
class _Engine:
    """The vLLM server, from when it was found until it is gone."""

    facts: VllmFacts
    incarnation: int
    cost: FittedCost | None = None
    is_measured: bool = False  # else `cost` is assumed
    layout: BlockLayout | None = None
    instance: VllmInstance | None = None  # set by the first `Setup`


class _Progress:
    """Says every few seconds what is measured."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._what = ""

    def note(self, what: str) -> None:
        self._what = what

    async def say(self) -> None:
        """Runs until cancelled."""
        seconds = 0.0
        while True:
            await asyncio.sleep(SAY_S)
            seconds += SAY_S
            log.info(
                "measuring vLLM at %s for %.0f s, now %s; meanwhile it serves by assumed times",
                self._url,
                seconds,
                self._what,
            )


class VllmWorker(InstanceProcess):
    """`run` serves until the head stops this worker."""

    def __init__(
        self,
        role: Role,
        instance_id: InstanceId,
        machine: str,
        secret: bytes,
        place: VllmAddress,
        api_key: str = "",
        tls: PeerTls | None = None,
    ) -> None:
        """Raises WorkerError."""
        super().__init__(role, instance_id, machine, secret, tls)
        self._place = place
        self._client = VllmClient(place.url, api_key)
        try:
            self._reader = EventReader(place.events, place.replay) if place.events else None
        except EventsError as error:
            raise WorkerError(str(error)) from None
        self._engine: _Engine | None = None
        self._requests: dict[AttemptId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._join_lock = asyncio.Lock()
        self._gone = False
        self._watch: CacheWatch | None = None

    async def run(self, head_host: str, head_port: int) -> None:
        """Serves while the vLLM server comes and goes. Raises WorkerError."""
        num_short = 0
        try:
            while True:
                self._engine = await self._found()
                self._gone, began_s = False, self._loop.time()
                self._link = HeadLink(
                    self.instance_id, self._secret, self, self._tls, self._link.heads
                )
                self._spawn(self._beat())
                try:
                    await self._link.run(head_host, head_port)
                finally:
                    self._joined = False
                    await self._end_tasks()
                if not self._gone:
                    return
                if self._loop.time() - began_s > STEADY_S:
                    num_short = 0
                hold_s = HOLD_OFFS_S[min(num_short, len(HOLD_OFFS_S) - 1)]
                num_short += 1
                if hold_s:
                    log.warning("vLLM at %s comes and goes: held off %g s", self._place.url, hold_s)
                    await asyncio.sleep(hold_s)
        finally:
            await self._client.close()

    def not_ready(self) -> str:
        if self._engine is None or self._gone:
            return f"vLLM at {self._place.url} does not respond"
        return super().not_ready()

    async def _found(self) -> _Engine:
        """Waits for the server without a limit."""
        last_error = ""
        while True:
            try:
                facts = await self._client.facts()
                facts = await self._with_parsers(facts)
                break
            except VllmError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("waiting for vLLM at %s: %s", self._place.url, last_error)
            await asyncio.sleep(LOOK_S)
        found = _Engine(facts, secrets.randbits(62))
        before = self._engine
        if before is not None and before.facts == facts:
            # Measured again it would be too slow: requests rush to it.
            found.cost, found.is_measured = before.cost, before.is_measured
        return found

    async def _with_parsers(self, facts: VllmFacts) -> VllmFacts:
        """Raises VllmError."""
        log.info("vLLM at %s is up; asking it for a short answer", self._place.url)
        found = await find_parsers(self._client, facts)
        if found:
            log.info("vLLM at %s parses %s by itself", self._place.url, " and ".join(found))
        offer = msgspec.structs.replace(facts.offer, parses=found)
        return msgspec.structs.replace(facts, offer=offer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_tasks(self) -> None:
        self._requests.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The link's follower

    def on_head(self) -> None:
        offer = None
        if self._engine is not None and self._link.protocol >= TAKES_OFFERS:
            offer = self._engine.facts.offer
        self._link.send(Apply(role=self.role, host=self._machine, pid=os.getpid(), offer=offer))

    def on_frame(self, frame: WorkFrame) -> None:
        match frame:
            case Setup():
                self._spawn(self._join(frame, self._link.channel))
            case AttentionMoved():
                pass
            case _:
                self._post(frame)

    def _abort_all(self) -> None:
        if self._engine is not None and self._engine.instance is not None:
            self._perform(self._engine.instance.abort_all())

    async def _join(self, setup: Setup, channel: HeadChannel | None) -> None:
        async with self._join_lock:  # the head may be lost and found again while we measure
            engine = self._engine
            if engine is None or self._link.stopping:
                return
            try:
                problem = await self._prepare(setup, engine)
            except Exception as error:
                log.exception("the instance failed to start")
                problem = f"unexpected {type(error).__name__}: {error}; its log has the details"
        if problem:
            self._fail(problem)
        elif not self._link.stopping:
            self._join_over(channel, Joined(info=self._info(engine)))

    async def _prepare(self, setup: Setup, engine: _Engine) -> str:
        """Measures the server and makes the state machine. Returns "", or why it failed."""
        url, facts = self._place.url, engine.facts
        if setup.engine.kind != "vllm":
            return "the head serves with Moonpool's own engine; start it with --engine vllm"
        layout = _layout(setup.model.name, facts)
        if engine.layout not in (None, layout):
            return "the head came back with another configuration; restart this worker"
        if engine.cost is None:
            try:
                await probe(self._client, facts, hands_over=self.role is Role.PREFILL)
            except VllmError as error:
                if await self._client.health() == "well":
                    return f"vLLM at {url}: {error}"
                self._leave_gone()
                return ""
            engine.cost = ASSUMED_COST
        if engine.instance is None:
            engine.layout = layout
            engine.instance = VllmInstance(
                layout, facts.num_blocks, self.role, self._reader is not None, facts.caches_prefixes
            )
            if self._reader is not None:
                self._spawn(self._listen(self._reader))
            fetches = self.role is Role.DECODE
            self._watch = CacheWatch(
                self._client, self._reader, facts.block_tokens, self._post, fetches
            )
            self._spawn(self._measure(engine))
            settle_memory()
        return ""

    async def _measure(self, engine: _Engine) -> None:
        """Measures the server's times beside the first requests, and then watches its cache."""
        assert engine.instance is not None
        if not engine.is_measured:
            progress = _Progress(self._place.url)
            saying = self._spawn(progress.say())
            try:
                quiet = engine.instance.is_idle
                engine.cost = await measure(self._client, engine.facts, quiet, progress.note)
            except VllmError as error:
                log.warning("vLLM at %s is served by assumed times: %s", self._place.url, error)
            else:
                log.info("measured vLLM at %s: %s", self._place.url, describe_cost(engine.cost))
                engine.is_measured = True
                self._report_cost()
            finally:
                saying.cancel()
        if self._watch is not None:
            await self._watch.run(lambda: self._load().cache_view)

    def _report_cost(self) -> None:
        """What is measured before this instance joins is in its description."""
        engine = self._engine
        if not self._joined or engine is None or engine.cost is None:
            return
        if engine.is_measured and self._link.protocol >= TAKES_OFFERS:
            self._link.send(CostMeasured(cost=engine.cost))

    def _load(self) -> InstanceLoad:
        assert self._engine is not None
        assert self._engine.instance is not None
        return self._engine.instance.load()

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
            largest_blocks=min(
                -(-facts.offer.max_model_tokens // facts.block_tokens), facts.num_blocks
            ),
            adapters=tuple(adapter.name for adapter in facts.offer.adapters),
        )

    # Events in, actions out

    def _post(self, event: VllmEvent) -> None:
        if self._engine is not None and self._engine.instance is not None:
            self._perform(self._engine.instance.handle(event, self._loop.time()))

    def _perform(self, actions: list[VllmAction]) -> None:
        for action in actions:
            match action:
                case SendReport():
                    self._link.send(action.report)
                case SubmitRequest():
                    self._requests[action.work.attempt_id] = self._spawn(self._run_request(action))
                case CancelRequest():
                    task = self._requests.pop(action.attempt_id, None)
                    if task is not None:
                        task.cancel()
                case FlushStep():
                    self._loop.call_later(STEP_S, self._post, EngineStepEnded())
                case ExplainCache():
                    if self._watch is not None:
                        self._spawn(self._watch.explain(action))
                case ExitProcess():
                    self._link.stop("it leaves")

    async def _run_request(self, submit: SubmitRequest) -> None:
        """Runs one request to its end. An error ends only this attempt."""
        attempt_id = submit.work.attempt_id
        failure = SubmitFailed(attempt_id, "the vLLM server ended an output without a reason")
        try:
            async with contextlib.aclosing(self._outputs(submit)) as outputs:
                async for output in outputs:
                    if output.finish is not None:
                        self._requests.pop(attempt_id, None)
                    self._post(output)
        except (VllmError, DialectError) as error:
            failure = self._failure(submit.work, error)
        except Exception as error:
            log.exception("the request %s to vLLM at %s failed", attempt_id, self._place.url)
            failure = SubmitFailed(
                attempt_id, f"unexpected {type(error).__name__} in the vLLM client"
            )
        if self._requests.pop(attempt_id, None) is not None:
            if not failure.refused:  # else its client is told
                log.warning("vLLM at %s: %s: %s", self._place.url, attempt_id, failure.message)
            self._post(failure)

    def _failure(self, work: AttemptSpec, error: VllmError | DialectError) -> SubmitFailed:
        if work.call is None:
            return SubmitFailed(work.attempt_id, str(error), error.refused)
        refused = error.refused or error.status in FORWARDED_REFUSALS
        return SubmitFailed(work.attempt_id, str(error), refused, error.status)

    async def _outputs(self, submit: SubmitRequest) -> AsyncGenerator[EngineOutput]:
        """Yields the outputs of a request. Reads to the end, so that the connection is reused."""
        engine = self._engine
        assert engine is not None
        assert engine.layout is not None
        work, model_id = submit.work, engine.facts.model_id
        if work.call is not None:
            body = forwarded_body(work, model_id, engine.layout.fingerprint)
            parts = self._client.forward(work.call.path, body, work.traceparent)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    yield read_part(work, part)
            yield end_of(work)
            return
        body = completion_body(submit, model_id, engine.layout.fingerprint)
        answer = self._client.answer(body, is_streamed(submit), work.traceparent)
        async with contextlib.aclosing(answer):
            async for event in answer:
                yield read_output(submit.work, event)

    # The server's health

    async def _beat(self) -> None:
        unwell = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._joined and self._engine is not None and self._engine.instance is not None:
                self._link.send(self._engine.instance.load())
                self._post(TimePassed())
            health = await self._client.health()
            unwell = 0 if health == "well" else unwell + WEIGHT[health]
            if unwell >= MAX_UNWELL:
                self._leave_gone()
                return

    def _leave_gone(self) -> None:
        log.warning("vLLM at %s is gone; the instance leaves until it is back", self._place.url)
        self._gone, self._joined = True, False
        self._link.stop("its vLLM server is gone")

    async def _listen(self, reader: EventReader) -> None:
        """Passes the server's cache events on, and reconnects when they end."""
        while True:
            try:
                await reader.run(self._post)
            except Exception as error:
                log.warning(
                    "no KV events from vLLM at %s: %s; trying again", self._place.url, error
                )
            self._post(CacheEventsReceived((), lost=True))
            await asyncio.sleep(LOOK_S)


def make_worker(settings: WorkerSettings) -> VllmWorker:
    """Of the kind "vllm" (`moonpool.plugins.workers`). Raises WorkerError."""
    assert settings.role is not None and settings.vllm is not None
    return VllmWorker(
        settings.role,
        settings.name,
        settings.machine,
        settings.secret,
        settings.vllm,
        settings.vllm_key,
        settings.tls,
    )


def _layout(model: str, facts: VllmFacts) -> BlockLayout:
    """Returns a nominal layout: the blocks stay in vLLM, and only their keys are used here."""
    return BlockLayout(
        model_fingerprint=f"vllm {model}",
        dtype="bfloat16",
        block_tokens=facts.block_tokens,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        inner="vllm",
    )
