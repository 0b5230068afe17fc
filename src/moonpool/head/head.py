"""The head: performs the Conductor's decisions over control connections to the workers.

The head owns the sockets, the clock and the response streams; it makes no decision. It is also the
`ServingBackend` of the HTTP layer.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from logging import INFO, WARNING
from secrets import token_hex
from typing import Any

import msgspec

from moonpool.api.models.metrics_text import metrics_text
from moonpool.api.serving_backend import Output
from moonpool.conductor.actions import (
    Announce,
    CacheDropRequested,
    ConductorAction,
    ConductorEvent,
    Deliver,
    DrainRequested,
    InstanceCrashed,
    InstanceForgotten,
    InstanceJoined,
    InstanceLost,
    InstancesExpected,
    InstancesLaunched,
    InstancesWanted,
    Refuse,
    Relaunch,
    Reported,
    RequestCancelled,
    RequestEnded,
    RequestFinished,
    Send,
    Tick,
)
from moonpool.config.tables import Config, ConfigError
from moonpool.head.answers import (
    STOPPING_RETRY_S,
    AnsweringFronts,
    Answers,
    ResponseStream,
    stopping,
)
from moonpool.head.attention_links import AttentionLinks
from moonpool.head.cluster_error import ClusterError
from moonpool.head.explain import describe_head, describe_record, describe_server, describe_slo
from moonpool.head.models.model_loading import ApiModel
from moonpool.head.models.served_model import HeadSettings, ServedModel
from moonpool.head.models.served_models import (
    NO_OFFER,
    NO_SERVER,
    ServedModels,
    VllmSetups,
    describe_models,
    describe_models_to_tenant,
)
from moonpool.head.succession import NoSuccession, Succession
from moonpool.head.takeover.standby_links import StandbyLinks, setup_of
from moonpool.head.watch.ended_requests import EndedRequests
from moonpool.head.watch.live_view import LiveView
from moonpool.head.watch.request_log import RequestLogger
from moonpool.head.watch.trace_export import open_exporter
from moonpool.head.webhook import WantedWebhook
from moonpool.head.worker_link import WorkerLink
from moonpool.link.idle_backoff import IdleBackoff
from moonpool.link.silence import ListeningClock
from moonpool.link.tls import HANDSHAKE_S as TLS_HANDSHAKE_S
from moonpool.link.tls import PeerTls
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import SILENCE_S, Apply, ApplyStandby, Joined, Setup, Stop
from moonpool.protocol.messages import AdaptersLoaded, ForwardedCall, InstanceInfo, Report
from moonpool.protocol.model_offer import ModelOffer
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.refusal import Refusal
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Role

log = limited_logger("moonpool.head")

TICK_S = 0.1
IDLE_TICKS, QUIET_TICKS = 5, 20
"""Time between two turns of `tick_forever` soon after the last request, and later, in multiples of
TICK_S (see `IdleBackoff`). It stays below the time after which the loop counts as hung."""
MAX_FAILURES = 64
MAX_HALF_OPEN = 128
"""Most connections of workers that have not proved the secret. One more ends the oldest of them."""
LAST_LOOKS, LAST_LOOK_S = 100, 0.01
"""Time for a stop to reach the workers."""


class ClusterHead:
    """One cluster's head. Call `start`, then serve; `stop` ends the workers."""

    def __init__(
        self,
        config: Config,
        loaded: ApiModel | None,
        secret: bytes,
        now: Callable[[], float] = time.monotonic,
        tenant_shares: Mapping[str, float] | None = None,
        tenant_caches: Mapping[str, float] | None = None,
    ) -> None:
        """`loaded`: the model that the configuration names, or None if vLLM servers bring their
        models."""
        self.config = config
        self.now = now
        self._began_s = now()
        settings = HeadSettings(config, token_hex(4), tenant_shares or {}, tenant_caches or {})
        self.request_timeout_s = config.api.request_timeout_s
        self._launched: tuple[InstanceId, ...] = ()
        self.served = ServedModels(self, settings)
        self._vllm_setups = VllmSetups(self.served, self.setup, self.on_start_failed)
        self._traces = open_exporter(config.telemetry.otlp_traces_endpoint)
        self._live = LiveView(self.served.conductors, self._post, now)
        logger, traces = RequestLogger(config.telemetry.log_requests), self._traces
        observers = (logger, *self._live.observers, *(() if traces is None else (traces,)))
        self._answers = Answers(EndedRequests(observers, now))
        self.work = self._answers.work
        if loaded is not None:
            self.served.add(config.model.name, loaded)
        self.start_failures: asyncio.Queue[str] = asyncio.Queue(MAX_FAILURES)
        self._joined = asyncio.Event()
        self._secret = secret
        self._webhook = WantedWebhook(config.conductor.autoscale_webhook)
        self.open_links: set[WorkerLink] = set()
        self._links: dict[InstanceId, WorkerLink] = {}
        self._inherited: set[InstanceId] = set()  # instances that an earlier head had
        self._attention = AttentionLinks(config.cluster.attention_each, self._links, self.setup)
        self._half_open: dict[WorkerLink, None] = {}  # oldest first
        self._clock = ListeningClock(now())
        self._ticks = IdleBackoff(TICK_S, IDLE_TICKS * TICK_S, QUIET_TICKS * TICK_S)
        self.standbys = StandbyLinks()
        self._server: asyncio.Server | None = None
        self._stopping = self._is_starting = False
        self._leaving = self._views_end = False
        self.on_silent: Callable[[InstanceId], None] = _do_nothing
        self.on_instances: Callable[
            [dict[InstanceId, Role], dict[InstanceId, ModelOffer]], None
        ] = _do_nothing
        """Called with the instances that are up or should soon be, whenever they change."""
        self.num_restarts = self.num_upgrades = 0
        """Number of earlier heads of this cluster: heads that died, and heads that handed over."""
        self.succession: Succession = NoSuccession()
        self.fronts: AnsweringFronts | None = None
        self.on_tick: Callable[[], None] = _do_nothing

    async def start(self, listener: socket.socket | None, tls: PeerTls | None = None) -> None:
        """Accepts workers; with `tls`, accepts only encrypted connections. `listener`: the
        listening socket, or None if the instances are in this process."""
        if listener is not None:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: WorkerLink(self, self._secret).channel,
                sock=listener,
                ssl=None if tls is None else tls.server,
                ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_S,
            )
        self.ticker = asyncio.create_task(self.tick_forever())

    async def expect(
        self, roles: Mapping[InstanceId, Role], offers: Mapping[InstanceId, ModelOffer]
    ) -> None:
        """Notes an earlier head's instances, for which requests wait. Call this before `start`."""
        self._inherited.update(roles)
        unread: set[InstanceId] = set()
        for instance_id, offer in offers.items():
            try:
                await self.served.expect_offer(instance_id, offer)
            except (ClusterError, ConfigError) as error:  # logged again when the server comes back
                unread.add(instance_id)
                log.error("%s: %s", instance_id, error)
        for model in self.served:
            known = {name: role for name, role in roles.items() if name not in unread}
            own = {name: role for name, role in known.items() if self.served.of(name) is model}
            if own:
                self._post(InstancesExpected(own), model)
            for name in own:
                self.served.note_present(name)

    def note_crash(self, instance_id: InstanceId) -> None:
        self._post(InstanceCrashed(instance_id))

    def note_launched(self, instance_ids: Iterable[InstanceId]) -> None:
        """Notes that the supervisor has launched these instances."""
        self._launched = tuple(instance_ids)
        self._post(InstancesLaunched(self._launched))

    async def stop(self) -> None:
        """Tells every worker to end, unless `network.keep_workers` is set, and disconnects."""
        self._stopping = True
        self.ticker.cancel()
        self._webhook.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        if self._server is not None:
            self._server.close()
        for link in list(self.open_links):
            if not self.config.network.keep_workers:
                link.channel.send(Stop())
            link.channel.close()
        for _ in range(LAST_LOOKS):
            if self.open_links:
                await asyncio.sleep(LAST_LOOK_S)

    async def wait_for_instances(self, count: int) -> None:
        """Returns when `count` instances have joined, and logs how many have."""
        self._is_starting = True
        while (num_up := self.served.num_instances) < count:
            log.info("%d of %d instances are up", num_up, count)
            self._joined.clear()
            await self._joined.wait()
        self._is_starting = False
        log.info("%d of %d instances are up", num_up, count)

    # Its models

    def models(self) -> Sequence[ServedModel]:
        return self.served.all

    def on_new_model(self, model: ServedModel) -> None:
        model.conductor.watch(self.work)
        if self._launched:
            self._post(InstancesLaunched(self._launched), model)

    def on_moved(self, instance_id: InstanceId, former: ServedModel) -> None:
        self._post(InstanceForgotten(instance_id), former)

    async def submit(
        self,
        model: ServedModel,
        request: Request,
        delivered: tuple[int, ...] | None = None,
        call: ForwardedCall | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Like `ModelBackend.submit`. Raises RequestRefused, including if the head is stopping."""
        answer = self.begin(model, request, delivered, call)
        try:
            while True:
                yield (output := await answer.next_output())
                if output.finish_reason is not None:
                    return
        finally:
            self.close(model, request.request_id)

    def begin(
        self,
        model: ServedModel,
        request: Request,
        delivered: tuple[int, ...] | None = None,
        call: ForwardedCall | None = None,
        on_refused: Callable[[Refuse], None] | None = None,
        answer: ResponseStream | None = None,
    ) -> ResponseStream:
        """Lets the Conductor decide on a request, and returns its answer, which must be closed.
        `on_refused`: called if the request is refused, perhaps before this returns. `answer`: the
        stream of a front's call. Raises RequestRefused for a head that is stopping."""
        if self._leaving:
            model.note_refused("server_stopping")
            raise stopping()
        answer = self._answers.open(request.request_id, call, answer)
        answer.on_refused = on_refused
        try:
            self._post(model.arrival(request, delivered), model)
        except BaseException:
            self.close(model, request.request_id)
            raise
        return answer

    def close(self, model: ServedModel, request_id: RequestId) -> None:
        """Notes that no client waits for the answer any more, which cancels an unfinished one."""
        if not self._answers.close(request_id):
            self._post(RequestCancelled(request_id), model)

    def abort(self, request_id: RequestId, reason: str, model: ServedModel | None = None) -> None:
        if not self._answers.judge(request_id, reason):
            self._post(RequestCancelled(request_id, reason), model)

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int, model: ServedModel
    ) -> dict[str, float] | None:
        answer = self._answers.find(request_id)
        if answer is None:
            return None
        if not self._answers.judge(request_id, reason.value, num_tokens):
            self._post(RequestFinished(request_id, reason, num_tokens), model)
        return answer.timings_s

    def unsettled(self, model: ServedModel) -> list[RequestRecord]:
        return self._answers.ended.unsettled(model.observer)

    # Frontend

    def explain(self, request_id: str) -> dict[str, Any] | None:
        name = RequestId(request_id)
        under_way = (model.conductor.requests.get(name) for model in self.served)
        found = self._answers.ended.find(request_id) or next(filter(None, under_way), None)
        return None if found is None else describe_record(found.record, found.explanation.lines())

    def cluster(self, tenant: str | None = None) -> dict[str, Any]:
        if tenant is not None:
            return describe_models_to_tenant(self.served.all, tenant)
        described = describe_models(self.served.all, self.now())
        described["slo"] = describe_slo(self.config.slo.usual)
        described["lack"] = self.served.lack or None
        for instance in described["instances"]:
            link = self._links[instance["instance_id"]]
            instance["release"] = link.release or None
            instance["protocol"] = link.channel.protocol
        described["head"] = self._describe()
        described["fronts"] = [] if self.fronts is None else self.fronts.describe()
        described["standbys"] = self.standbys.describe(self._clock.listened_s)
        described["attention_own_tokens"] = self.config.attention.own_tokens
        described["attention"] = self._attention.describe()
        return described

    def _describe(self) -> dict[str, Any]:
        up_s, error = self.now() - self._began_s, self.succession.upgrade_error
        return describe_head(up_s, self.num_restarts, self.num_upgrades, error, self.standbys.epoch)

    def live_view(self, tenant: str | None = None) -> dict[str, Any]:
        own = self.standbys.describe(self._clock.listened_s) if tenant is None else []
        head = self._describe() if tenant is None else None
        more = {"standbys": own, "lack": self.served.lack, "head": head}
        return self._live.frame(self._answers.ended.newest(), tenant) | more

    def is_stopping(self) -> bool:
        return self._leaving or self._stopping or self._views_end

    async def hot_prefixes(self, num_prefixes: int) -> list[dict[str, Any]]:
        return await self._live.hot.collect(num_prefixes)

    def note_refused(self, reason: str) -> None:
        if self.served.default is not None:
            self.served.default.note_refused(reason)

    def drop_cached_blocks(self) -> None:
        self._post(CacheDropRequested())

    def drain(self, instance_id: str, within_s: float, returns: bool = False) -> str:
        name = InstanceId(instance_id)
        attention = self._attention.find(instance_id)
        if attention is not None and returns:  # requests of the worker's owner are placed again
            self.succession.replace(name)
            attention.is_ordered = True
            attention.channel.send(Stop())
            return ""
        model = self.served.of(name)
        if model is None:
            return f"there is no instance {instance_id!r}"
        refusal = model.conductor.drains.why_not(name, returns)
        if not refusal:
            if returns:
                self.succession.replace(name)
            why = "another process takes its place" if returns else "a client requested it"
            self._post(DrainRequested(name, within_s, why, returns))
        return refusal

    def upgrade(self) -> None:
        self.succession.upgrade()

    def beliefs(self, name: str | None = None) -> dict[str, Any] | None:
        model = self.served.named(name)
        return None if model is None else model.beliefs()

    def server_info(self) -> dict[str, Any]:
        cards = [msgspec.to_builtins(model.card) for model in self.served]
        return describe_server(self.config) | {"model": next(iter(cards), None), "models": cards}

    def not_ready(self) -> str:
        if self.standbys.replaced:
            return "another head has replaced this one"
        if self._leaving:
            return "the server is stopping"
        lacks = [model.lack for model in self.served]
        return min(lacks, default=NO_SERVER)  # "" if at least one of the models is served

    # The end

    def end_views(self) -> None:
        """Ends the streams of the live page, which connect again."""
        self._views_end = True

    @property
    def num_answers(self) -> int:
        """Number of answers that clients wait for."""
        return len(self._answers)

    def refuse_new(self) -> None:
        """Refuses new requests from now on. Requests under way continue."""
        self._leaving = True

    def end_answers(self, reason: str, message: str) -> None:
        """Ends all answers with an error that their clients receive."""
        for request_id, answer in self._answers.all():
            answer.refuse(Refuse(request_id, Refusal(503, reason, message, STOPPING_RETRY_S)))
            self.abort(request_id, reason)

    def event_log(self, name: str | None = None) -> bytes | None:
        model = self.served.named(name)
        return None if model is None else model.event_log()

    def metrics_text(self) -> bytes:
        default = self.served.default
        if self._traces is not None and default is not None:
            default.observer.trace_spans(self._traces.num_sent, self._traces.num_lost)
        for model in self.served:
            model.observer.heads(self.num_restarts, self.num_upgrades, self.standbys.epoch)
        return metrics_text([each for model in self.served for each in model.collectors()])

    # Performs the Conductors' actions

    def _post(self, event: ConductorEvent, to: ServedModel | None = None) -> None:
        """Handles an event. `to`: the model whose Conductor gets it, if the event does not tell."""
        for model in (to,) if to is not None else self.served.route(event):
            actions = model.handle(event)
            if model.conductor.is_busy:
                self._ticks.note()
            self._perform(actions, model)

    def _perform(self, actions: Sequence[ConductorAction], model: ServedModel) -> None:
        for action in actions:
            match action:
                case Send():
                    link = self._links.get(action.instance_id)
                    if link is not None:
                        link.channel.send(self._answers.completed(action.command))
                case Deliver():
                    self._answers.deliver(action)
                case Refuse():
                    self._answers.refuse(action)
                case RequestEnded():
                    self._answers.on_ended(action, model.observer)
                case Announce():
                    log.log(WARNING if action.is_warning else INFO, "%s", action.text)
                case Relaunch():
                    self.succession.replace(action.instance_id, from_disk=False)
                case InstancesWanted():
                    log.info("wanted: %d prefill, %d decode", action.prefill, action.decode)
                    self._webhook.post(action)

    # Workers

    def on_connected(self, link: WorkerLink) -> None:
        if len(self._half_open) >= MAX_HALF_OPEN:
            oldest = next(iter(self._half_open))
            oldest.channel.abort("too many connections that have not proved the secret")
            self._half_open.pop(oldest, None)
        self.open_links.add(link)
        self._half_open[link] = None

    def listened_s(self) -> float:
        return self._clock.listened_s

    def on_proved(self, link: WorkerLink) -> None:
        self._half_open.pop(link, None)

    def admit(self, link: WorkerLink, joined: Joined) -> str | None:
        info = joined.info
        self._forget_former_link(info, link)
        unwanted = self._why_not(info, link)
        if unwanted is not None:
            return unwanted
        model = self.served.of(info.instance_id)
        assert model is not None
        self._links[info.instance_id] = link
        model.limit_context_to(info, self.served.offer(info.instance_id))
        self.served.note_present(info.instance_id)
        model.observer.instance_joined(info, info.instance_id in self._inherited)
        self._post(InstanceJoined(info), model)
        self._tell_instances()
        self._joined.set()
        return None

    def on_standby(self, link: WorkerLink, apply: ApplyStandby) -> None:
        if self.standbys.note(link, apply, self.open_links):
            link.channel.send(self.setup())
            self._lead()
        if self.standbys.replaced:
            self.refuse_new()
            self.end_answers("head_replaced", "Another head has replaced this one: ask it again.")

    def _lead(self) -> None:
        self.standbys.announce_leadership(self.open_links, self.served.expected, self.served.offers)

    def _tell_instances(self) -> None:
        self.on_instances(self.served.expected, self.served.offers)

    def on_apply(self, link: WorkerLink, apply: Apply) -> None:
        self.standbys.announce_to(link)
        if self.config.engine.kind == "vllm":
            self._vllm_setups.begin(link, apply.offer)
        else:
            self._attention.start(link, apply)

    def on_attention(self, link: WorkerLink, address: PeerAddress) -> None:
        if self.served.default is not None:
            self.served.default.observer.attention_joined(address.instance_id)
        self._attention.join(link, address)

    def on_start_failed(self, link: WorkerLink, message: str) -> None:
        link.has_failed = True
        if not self.start_failures.full():
            self.start_failures.put_nowait(f"{link.instance_id}: {message}")

    def on_report(self, link: WorkerLink, report: Report) -> None:
        model = self.served.of(link.instance_id)
        if self._links.get(link.instance_id) is not link or model is None:
            return  # the instance has not joined, or another connection has replaced this one
        model.note_report(link.instance_id, report)
        if isinstance(report, AdaptersLoaded):
            self.served.note_adapters(link.instance_id, report.adapters)
            self._tell_instances()
        with nullcontext() if self.fronts is None else self.fronts.hears(report):
            self._post(Reported(link.instance_id, report), model)

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self.open_links.discard(link)
        self._half_open.pop(link, None)
        default = self.served.default
        if self._attention.drop(link) and not (self._stopping or link.is_ordered) and default:
            default.observer.instance_lost(link.instance_id)
        if self.standbys.drop(link):
            self._lead()  # without a standby, workers wait for this head, which begins to lead now
        if not link.instance_id:
            log.warning("closed a control connection: %s", reason)
        elif not self._stopping and not (self._is_starting and link.has_failed):
            log.warning("lost %s: %s", link.instance_id, reason)
        self._unjoin(link, reason)

    def _unjoin(self, link: WorkerLink, reason: str) -> None:
        if self._links.get(link.instance_id) is link:
            del self._links[link.instance_id]
            model = self.served.of(link.instance_id)
            if model is not None and not self._is_leaving(link.instance_id):
                model.observer.instance_lost(link.instance_id)
            self._post(InstanceLost(link.instance_id, reason))
            self.served.note_lost(link.instance_id)
            self._tell_instances()

    def _is_leaving(self, instance_id: InstanceId) -> bool:
        """Whether the instance was ordered to leave, or the whole cluster ends."""
        state = self.served.state(instance_id)
        drain = None if state is None else state.drain
        return self._stopping or (drain is not None and drain.becomes is None)

    def _forget_former_link(self, info: InstanceInfo, link: WorkerLink) -> None:
        """Drops the old connection of a process that reconnects before the head saw its end."""
        former = self._links.get(link.instance_id)
        known = self.served.state(link.instance_id)
        if former is None or former is link or known is None:
            return
        if known.info.incarnation == info.incarnation:
            reason = "it came back over a new connection"
            self._unjoin(former, reason)
            former.channel.abort(reason)

    def _why_not(self, info: InstanceInfo, link: WorkerLink) -> str | None:
        """Returns why an instance cannot join, or None if it can."""
        if info.instance_id != link.instance_id:
            return "it joined under another name than that of its handshake"
        if self._links.get(info.instance_id, link) is not link:
            return f"an instance named {info.instance_id} exists already; choose another --name"
        model = self.served.of(info.instance_id)
        return NO_OFFER if model is None else model.why_not(info)

    def setup(self) -> Setup:
        return setup_of(self.config)

    async def tick_forever(self) -> None:
        while True:
            await self._ticks.next(self.served.is_busy, self.standbys.next_due_s)
            missed_s = self._clock.tick(self.now())
            if missed_s:
                log.warning("the head stood still for %.1f s; its workers get this time", missed_s)
                # messages are read first, and deadlines checked after that
                await asyncio.sleep(TICK_S)
            self._post(Tick())
            self._live.tick(self.now())
            self.on_tick()
            for model in self.served:
                model.checkpoints.renew()
            if self.standbys.are_due(self._clock.listened_s):
                self._lead()
            for link in list(self._links.values()):
                silent_s = self._clock.listened_s - link.heard_s
                if silent_s > SILENCE_S:
                    link.channel.abort(f"no message for {silent_s:.0f} s")
                    self.on_silent(link.instance_id)


def _do_nothing(*told: object) -> None:
    """The default without a supervisor: nobody restarts a worker, and no other head follows."""
