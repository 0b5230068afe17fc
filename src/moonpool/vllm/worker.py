"""The process of an instance whose engine is a server that already runs: vLLM, or another make.

The instance is in the cluster while that server is healthy. When the server is gone, the instance
leaves, so that its requests continue on other instances. When the server is back, the instance
joins again as another incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from moonpool.config.tables import VllmAddress
from moonpool.cost.fitted import FittedCost
from moonpool.discovery.membership import HoldOff
from moonpool.gc_tuning import settle_memory
from moonpool.host_pool.places import default_socket
from moonpool.link.head_link import HeadChannel, HeadLink, InstanceProcess, WorkerError
from moonpool.link.tls import PeerTls
from moonpool.plugins.workers import WorkerSettings
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.frames import HEARTBEAT_S, Apply, AttentionMoved, Joined, Setup, WorkFrame
from moonpool.protocol.messages import (
    AdaptersLoaded,
    AttemptId,
    AttemptSpec,
    CostMeasured,
    InstanceInfo,
    InstanceLoad,
)
from moonpool.protocol.model_offer import OfferedAdapter
from moonpool.protocol.versions import TAKES_OFFERS
from moonpool.scheduler.actions import ExitProcess, SendReport
from moonpool.types import InstanceId, Role
from moonpool.vllm.actions import (
    AwaitPool,
    CacheEventsReceived,
    CacheExplained,
    CancelRequest,
    EngineOutput,
    EngineStepEnded,
    ExplainCache,
    FlushStep,
    PoolReady,
    SubmitFailed,
    SubmitRequest,
    TimePassed,
    VllmAction,
    VllmEvent,
)
from moonpool.vllm.cache_watch import COUNT_S, CacheWatch
from moonpool.vllm.client import Health, RankGoneError, VllmClient, VllmError
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.dialects.find import find_dialect
from moonpool.vllm.dialects.server_dialect import ServerDialect
from moonpool.vllm.events import EventReader, EventsError
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.measure import ASSUMED_COST, MeasureProgress, describe_cost, measure, probe
from moonpool.vllm.nominal_layout import NO_ADDRESS, layout_of, with_pool
from moonpool.vllm.offer_watch import OFFER_S, OfferWatch
from moonpool.vllm.parsers import find_parsers
from moonpool.vllm.pool_watch import PoolWatch
from moonpool.vllm.served_slots import ServedSlots, open_slots
from moonpool.vllm.slot_keeper import SlotError

log = logging.getLogger("moonpool.vllm")

STEP_S = 1e-3
"""How long the other outputs of a step are awaited after its first output."""
LOOK_S = 2.0
"""How often a lost vLLM server is probed."""
WEIGHT: dict[Health, int] = {"well": 0, "unwell": 2, "silent": 2, "gone": 3}
MISSING = 404
FORWARDED_REFUSALS = (MISSING, 405, 415, 501)
"""Statuses with which a server refuses a call that it does not serve."""
POOL_S = 2.0
"""How long the pool may take to report its blocks before the instance joins without it."""
MAX_UNWELL = 6
"""The sum of weights over successive beats at which the server counts as gone: a busy engine may
be slow to respond."""


@dataclass(slots=True)
class FoundServer:
    """The server, from when it was found until it is gone. `slots`: the slots of a server that has
    any."""

    dialect: ServerDialect
    facts: VllmFacts
    incarnation: int
    cost: FittedCost | None = None
    is_measured: bool = False  # whether `cost` was measured; otherwise it is assumed
    layout: BlockLayout | None = None
    instance: VllmInstance | None = None  # the first `Setup` sets it
    slots: ServedSlots | None = None  # set by the first `Setup`, too


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
        try:
            self._client = VllmClient(place.url, api_key)
            self._reader = EventReader(place.events, place.replay) if place.events else None
        except (VllmError, EventsError) as error:
            raise WorkerError(str(error)) from None
        self._engine: FoundServer | None = None
        self._requests: dict[AttemptId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._join_lock = asyncio.Lock()
        self._gone = False
        self._count_s, self._offer_s = COUNT_S, OFFER_S
        self._watch: CacheWatch | None = None
        self._offers: OfferWatch | None = None
        self._pool: PoolWatch | None = None
        self._rates: tuple[int, float] | None = None  # (bytes of a block of the pool, SSD bytes/s)

    async def run(self, head_host: str, head_port: int) -> None:
        """Serves while the vLLM server comes and goes. Raises WorkerError."""
        hold_off = HoldOff()
        try:
            while True:
                self._engine = await self._found()
                self._gone, began_s = False, self._loop.time()
                self._link = self._open_link()
                self._spawn(self._beat())
                self._spawn(self._follow_offer(self._engine))
                try:
                    await self._link.run(head_host, head_port)
                finally:
                    self._joined = False
                    await self._end_tasks()
                if not self._gone:
                    return
                hold_s = hold_off.after_stay(self._loop.time() - began_s)
                if hold_s:
                    log.warning("vLLM at %s comes and goes: held off %g s", self._place.url, hold_s)
                    await asyncio.sleep(hold_s)
        finally:
            self._client.close()

    def _open_link(self) -> HeadLink:
        return HeadLink(self.instance_id, self._secret, self, self._tls, self._link.heads)

    async def _pause(self) -> None:
        """Time between two checks of the server's health."""
        await asyncio.sleep(HEARTBEAT_S)

    def not_ready(self) -> str:
        if self._engine is None or self._gone:
            return f"vLLM at {self._place.url} does not respond"
        return super().not_ready()

    async def _found(self) -> FoundServer:
        """Waits for the server without a limit."""
        last_error = ""
        while True:
            try:
                dialect = await find_dialect(self._client)
                facts = await self._with_parsers(await dialect.facts())
                break
            except (VllmError, DialectError) as error:
                if str(error) != last_error:
                    last_error = str(error)
                    log.warning("waiting for the server at %s: %s", self._place.url, last_error)
            await asyncio.sleep(LOOK_S)
        found = FoundServer(dialect, facts, secrets.randbits(62))
        before = self._engine
        if before is not None and replace(before.facts, num_ranks=facts.num_ranks) == facts:
            # Measured again, it would seem too slow, because requests rush to a server that is
            # back.
            found.cost, found.is_measured = before.cost, before.is_measured
        return found

    async def _with_parsers(self, facts: VllmFacts) -> VllmFacts:
        """Raises VllmError."""
        log.info("%s at %s is up; asking it for a short answer", facts.make, self._place.url)
        if self._client.rank is None and facts.num_ranks > 1:
            log.warning(
                "%s has %d data-parallel ranks, and spreads calls among them by itself: name each,"
                " as %s@0, or list it with ranks=all, so that prompts go where they are cached",
                self._place.url,
                facts.num_ranks,
                self._place.url,
            )
        if facts.assumed:
            log.info(
                "%s at %s does not tell, and moonpool assumes: %s",
                facts.make,
                self._place.url,
                facts.assumed,
            )
        found = await find_parsers(self._client, facts)
        if found:
            log.info(
                "%s at %s parses %s by itself", facts.make, self._place.url, " and ".join(found)
            )
        offer = replace(facts.offer, parses=found)
        return replace(facts, offer=offer)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_tasks(self) -> None:
        self._routes.reset()
        self._requests.clear()
        self._pool = self._rates = None
        if self._engine is not None and self._engine.slots is not None:
            self._engine.slots.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Methods by which it follows the link

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
                self._routes.note(frame)
                self._post(frame)

    def _abort_all(self) -> None:
        if self._engine is not None and self._engine.instance is not None:
            self._perform(self._engine.instance.abort_all())

    async def _join(self, setup: Setup, channel: HeadChannel | None) -> None:
        # the lock is needed because the head may be lost and found again meanwhile
        async with self._join_lock:
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

    async def _prepare(self, setup: Setup, engine: FoundServer) -> str:
        """Asks the server for one short answer, makes the state machine and begins to measure.
        Returns "", or why it failed."""
        url, facts = self._place.url, engine.facts
        if setup.engine.kind != "vllm":
            return "the head serves with Moonpool's own engine; start it with --engine vllm"
        layout = layout_of(setup.model.name, facts)
        if engine.layout not in (None, layout):
            return "the head came back with another configuration; restart this worker"
        if self.role is not Role.MIXED and facts.make != "vLLM":
            return f"{facts.make} at {url} cannot hand KVCache over: use it as a mixed instance"
        has_pool = await self._find_pool(facts)
        if engine.cost is None:
            try:
                hands_over = self.role is Role.PREFILL and not has_pool
                await probe(engine.dialect, facts, hands_over=hands_over)
            except VllmError as error:
                if await self._client.health() == "well":
                    return f"{facts.make} at {url}: {error}"
                self.leave_gone()
                return ""
            engine.cost = ASSUMED_COST
        if engine.instance is None:
            engine.layout = layout
            if facts.num_slots:
                engine.slots = ServedSlots(self._client, facts, layout.fingerprint, self._post)
            engine.instance = VllmInstance(
                layout,
                facts.num_blocks,
                self.role,
                self._reader is not None,
                facts.caches_prefixes,
                None if engine.slots is None else engine.slots.table,
                facts.offer.max_model_tokens,
            )
            if self._reader is not None:
                self._spawn(self._listen(self._reader))
            fetches = self.role is Role.DECODE
            self._watch = CacheWatch(
                engine.dialect,
                self._reader,
                facts.block_tokens,
                self._post,
                fetches,
                self._count_s,
            )
            if self._pool is not None:
                self._pool.tell()
            self._spawn(self._measure(engine))
            settle_memory()
        return ""

    async def _measure(self, engine: FoundServer) -> None:
        """Measures the server's times beside the first requests, and then watches its cache."""
        assert engine.instance is not None
        if not engine.is_measured:
            await self._profile(engine, engine.instance)
        if engine.slots is not None:
            engine.slots.table.forget_slots()  # the slots hold prompts of the measurement
            self._spawn(self._open_slots(engine, engine.slots))
        if self._watch is not None:
            await self._watch.run(lambda: self._load().cache_view)

    async def _profile(self, engine: FoundServer, instance: VllmInstance) -> None:
        progress = MeasureProgress(self._place.url)
        saying = self._spawn(progress.say())
        try:
            quiet = instance.is_idle
            engine.cost = await measure(engine.dialect, engine.facts, quiet, progress.note)
        except VllmError as error:
            log.warning("%s is served by assumed times: %s", self._place.url, error)
        else:
            if self._rates is not None and engine.layout is not None:
                engine.cost = with_pool(engine.cost, engine.layout, self._rates)
            log.info("measured %s: %s", self._place.url, describe_cost(engine.cost))
            engine.is_measured = True
            self._report_cost()
        finally:
            saying.cancel()

    async def _open_slots(self, engine: FoundServer, slots: ServedSlots) -> None:
        if not self._place.slots:
            return
        try:
            await open_slots(slots, engine.dialect, engine.facts, self._place.slots)
        except SlotError as error:
            log.warning("no slots of %s are saved: %s", self._place.url, error)
            note = f"its slots are not saved: {error}"
            self._post(CacheExplained(note))

    def _report_cost(self) -> None:
        """Reports the cost; times measured before this instance joins are part of its
        description."""
        engine = self._engine
        if not self._joined or engine is None or engine.cost is None:
            return
        if (engine.is_measured or self._rates is not None) and self._link.protocol >= TAKES_OFFERS:
            address = None if self._pool is None else self._pool.address
            self._link.send(CostMeasured(cost=engine.cost, address=address))

    def _load(self) -> InstanceLoad:
        assert self._engine is not None
        assert self._engine.instance is not None
        return self._engine.instance.load()

    def _info(self, engine: FoundServer) -> InstanceInfo:
        assert engine.cost is not None
        assert engine.layout is not None
        facts, address = engine.facts, None if self._pool is None else self._pool.address
        return InstanceInfo(
            instance_id=self.instance_id,
            role=self.role,
            incarnation=engine.incarnation,
            address=address or NO_ADDRESS,
            layout=engine.layout,
            num_blocks=facts.num_blocks,
            cost=engine.cost,
            pid=os.getpid(),
            host=self._machine,
            largest_blocks=min(
                -(-facts.offer.max_model_tokens // facts.block_tokens), facts.num_blocks
            ),
            adapters=tuple(adapter.name for adapter in facts.offer.adapters),
            context_tokens=facts.offer.max_model_tokens,
            caches_prefixes=facts.caches_prefixes or address is not None,
        )

    # Events in, actions out

    def _post(self, event: VllmEvent) -> None:
        if self._engine is not None and self._engine.instance is not None:
            self._perform(self._engine.instance.handle(event, self._loop.time()))

    def _perform(self, actions: list[VllmAction]) -> None:
        for action in actions:
            match action:
                case SendReport():
                    self._routes.report((action.report,))
                case SubmitRequest():
                    self._submit(action)
                case CancelRequest():
                    self._cancel(action.attempt_id)
                case FlushStep():
                    self._loop.call_later(STEP_S, self._post, EngineStepEnded())
                case AwaitPool():
                    self._spawn(self._await_pool(action))
                case ExplainCache():
                    if self._watch is not None:
                        self._spawn(self._watch.explain(action))
                case ExitProcess():
                    self._link.stop("it leaves")

    async def _find_pool(self, facts: VllmFacts) -> bool:
        """Whether this vLLM shares the pool of this host."""
        if self._pool is None and _is_here(self._client.url):
            model, size = facts.offer.root, facts.block_tokens
            path = default_socket()
            self._pool = PoolWatch(path, model, size, self._post, self._on_pool_rates)
            self._spawn(self._pool.run())
            await self._pool.settled(POOL_S if path.exists() else 0.0)
        return self._pool is not None and self._pool.address is not None

    async def _await_pool(self, action: AwaitPool) -> None:
        if self._pool is None:
            self._post(PoolReady(action.attempt_id, 0))
        else:
            await self._pool.perform(action)

    def _on_pool_rates(self, block_bytes: int, ssd_bytes_per_s: float) -> None:
        """The pool's blocks can be fetched and loaded: the Conductor predicts their times."""
        self._rates = block_bytes, ssd_bytes_per_s
        engine = self._engine
        if engine is not None and engine.cost is not None and engine.layout is not None:
            engine.cost = with_pool(engine.cost, engine.layout, self._rates)
            self._report_cost()

    def _submit(self, submit: SubmitRequest) -> None:
        self._requests[submit.attempt.attempt_id] = self._spawn(self._run_request(submit))

    def _cancel(self, attempt_id: AttemptId) -> None:
        task = self._requests.pop(attempt_id, None)
        if task is not None:
            task.cancel()

    async def _run_request(self, submit: SubmitRequest) -> None:
        """Runs one request to its end. An error ends only this attempt."""
        attempt_id = submit.attempt.attempt_id
        failure = SubmitFailed(attempt_id, "the server ended an output without a reason")
        try:
            async with contextlib.aclosing(self._outputs(submit)) as outputs:
                async for output in outputs:
                    if output.finish is not None:
                        self._requests.pop(attempt_id, None)
                    self._post(output)
        except (VllmError, DialectError) as error:
            failure = self._failure(submit.attempt, error)
        except Exception as error:
            log.exception("the request %s to %s failed", attempt_id, self._place.url)
            failure = SubmitFailed(
                attempt_id, f"unexpected {type(error).__name__} in the server's client"
            )
        if self._requests.pop(attempt_id, None) is not None:
            if not failure.refused:  # if the server itself refused, its client is told
                log.warning("%s: %s: %s", self._place.url, attempt_id, failure.message)
            self._post(failure)

    def _failure(self, work: AttemptSpec, error: VllmError | DialectError) -> SubmitFailed:
        if isinstance(error, RankGoneError) and not self._gone:
            self.leave_gone()
        elif error.status == MISSING and self._offers is not None:
            self._offers.look()  # the adapter may have been unloaded a moment ago
        if work.call is None:
            return SubmitFailed(work.attempt_id, str(error), error.refused)
        refused = error.refused or error.status in FORWARDED_REFUSALS
        if work.adapter and error.status == MISSING:
            refused = False  # another server may have the adapter
        return SubmitFailed(work.attempt_id, str(error), refused, error.status)

    async def _outputs(self, submit: SubmitRequest) -> AsyncGenerator[EngineOutput]:
        """Yields the outputs of a request. Reads to the end, so that the connection is reused."""
        engine = self._engine
        assert engine is not None
        assert engine.layout is not None
        fingerprint = engine.layout.fingerprint
        async with contextlib.AsyncExitStack() as stack:
            grant = None
            if engine.slots is not None:
                grant = await stack.enter_async_context(engine.slots.hold(submit.attempt))
            use = None if grant is None else grant.use
            outputs = engine.dialect.outputs(submit, engine.facts, fingerprint, use)
            await stack.enter_async_context(contextlib.aclosing(outputs))
            async for output in outputs:
                if grant is not None:
                    grant.note(submit.attempt, output)
                yield output

    # Methods about the server's health

    async def _beat(self) -> None:
        unwell = 0
        while True:
            await self._pause()
            if self._joined and self._engine is not None and self._engine.instance is not None:
                self._link.send(self._engine.instance.load())
                self._post(TimePassed())
            health = await self._client.health()
            unwell = 0 if health == "well" else unwell + WEIGHT[health]
            if unwell >= MAX_UNWELL:
                self.leave_gone()
                return

    async def _follow_offer(self, engine: FoundServer) -> None:
        """Leaves a server that has another model now, and joins again with that model."""
        on_adapters = partial(self._on_adapters, engine)
        self._offers = OfferWatch(engine.dialect, engine.facts.offer, on_adapters)
        await self._offers.run(self._offer_s)
        log.warning("%s serves another model than before", self._place.url)
        self.leave_gone()

    def _on_adapters(self, engine: FoundServer, adapters: tuple[OfferedAdapter, ...]) -> None:
        named = ", ".join(one.name for one in adapters) or "none"
        log.info("LoRA adapters of %s: %s", self._place.url, named)
        offer = replace(engine.facts.offer, adapters=adapters)
        engine.facts = replace(engine.facts, offer=offer)
        if self._joined and self._link.protocol >= TAKES_OFFERS:
            self._link.send(AdaptersLoaded(adapters))

    def leave_gone(self) -> None:
        """Leaves the cluster, because the server is gone."""
        log.warning("%s is gone; the instance leaves until it is back", self._place.url)
        self._gone, self._joined = True, False
        self._link.stop("its server is gone")

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
    """Makes a worker of the kind "vllm" (`moonpool.plugins.workers`). Raises WorkerError."""
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


def _is_here(url: str) -> bool:
    """Whether the server is on this machine, so that it may use this machine's pool."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", socket.gethostname()) or host.startswith("127.") or host == "::1"
