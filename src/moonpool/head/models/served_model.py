"""One model that the head serves: its card and tokenizer, its Conductor, its metrics and its event
log. A model's instances serve no other model, so each decision concerns only one model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import msgspec
from prometheus_client.registry import Collector

from moonpool import __version__
from moonpool.api.body_reading.client import BodyClient
from moonpool.api.metrics.labels import FAILURES, REFUSALS
from moonpool.api.metrics.server_metrics import ServerMetrics
from moonpool.api.models.metrics_text import EngineCaches
from moonpool.api.serving_backend import AdapterCard, ApiOptions, ModelCard, Output
from moonpool.conductor.actions import ConductorAction, ConductorEvent, RequestArrived
from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import Config
from moonpool.head.checkpoint import Checkpoints
from moonpool.head.explain import stage_of
from moonpool.head.models.model_loading import UNKNOWN_TOKENS, ApiModel
from moonpool.head.watch.metrics_collector import MetricsCollector
from moonpool.log_limit import limited_logger
from moonpool.plugins.policies import load_policies, own_classes
from moonpool.protocol.messages import (
    ForwardedCall,
    InstanceInfo,
    InstanceLoad,
    Report,
    TransferDone,
)
from moonpool.protocol.model_offer import (
    COMPLETIONS,
    MEDIA_PATHS,
    POOLING_PATHS,
    ModelOffer,
    Parsing,
)
from moonpool.request_record import RequestRecord
from moonpool.rewind.event_log import EventLog, write_file
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Role

log = limited_logger("moonpool.head")


@dataclass(frozen=True)
class HeadSettings:
    """The settings that all models of a head share."""

    config: Config
    incarnation: str
    tenant_shares: Mapping[str, float]
    tenant_caches: Mapping[str, float]


class ModelHost(Protocol):
    """The head as its models see it."""

    def now(self) -> float: ...

    def submit(
        self,
        model: ServedModel,
        request: Request,
        delivered: tuple[int, ...] | None,
        call: ForwardedCall | None = None,
    ) -> AsyncGenerator[Output, None]: ...

    def abort(self, request_id: RequestId, reason: str, model: ServedModel) -> None: ...

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int, model: ServedModel
    ) -> dict[str, float] | None: ...

    def unsettled(self, model: ServedModel) -> list[RequestRecord]:
        """Returns the records of the model's requests that have ended and are not counted yet."""
        ...

    def on_new_model(self, model: ServedModel) -> None:
        """Called when the head begins to serve a model."""
        ...

    def on_moved(self, instance_id: InstanceId, former: ServedModel) -> None:
        """Called when an instance that was lost comes back with another model than before."""
        ...


class ServedModel:
    """A model as the `ModelBackend` of the HTTP layer. `key` names the model to its instances."""

    def __init__(
        self,
        host: ModelHost,
        settings: HeadSettings,
        key: str,
        loaded: ApiModel,
    ) -> None:
        """Raises ConfigError."""
        config = settings.config
        self.key = key
        self.card: ModelCard = loaded.card
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.slo = config.slo
        self.request_timeout_s = config.api.request_timeout_s
        self.metrics = ServerMetrics(loaded.card.model_id)
        self.observer = MetricsCollector(self.metrics, config.slo.class_names)
        self._engine_caches = EngineCaches()
        policies = load_policies(config.conductor)
        self.conductor = Conductor(
            config.for_conductor(),
            incarnation=settings.incarnation,
            default_slo=config.slo.usual,
            policies=policies,
            tenant_weights=settings.tenant_shares,
            tenant_caches=settings.tenant_caches,
        )
        self._events = EventLog(config.api.event_log_bytes)
        self.checkpoints = Checkpoints(self._events, self.conductor, own_classes(policies))
        self._host = host
        self._settings = settings
        self._loaded = loaded
        self._reader = loaded.reader
        # limit of the context by instance, and the reason for it
        self._limits: dict[InstanceId, tuple[Role, int, str]] = {}
        self.has_offers = False  # if False, the model is known by the configuration alone
        self.offer: ModelOffer | None = None
        """The offer from which the model was read, or None for the own engine, which is
        configured."""

    def is_named(self, name: str) -> bool:
        return name in (self.key, self.card.model_id, *self.card.other_names)

    def now(self) -> float:
        return self._host.now()

    def options(self, shared: ApiOptions) -> ApiOptions:
        return self._loaded.options(shared)

    def take_reader(self) -> BodyClient | None:
        reader, self._reader = self._reader, None
        return reader

    def submit(
        self, request: Request, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        return self._host.submit(self, request, delivered)

    def forward(
        self, request: Request, call: ForwardedCall, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        return self._host.submit(self, request, delivered, call)

    def why_not_forwarded(self) -> str:
        states = self.conductor.instances.values()
        if any(state.info.role is not Role.MIXED for state in states):
            return "prefill and decode run on separate vLLM servers, which take token ids only"
        return ""

    def abort(self, request_id: RequestId, reason: str = FinishReason.ABORT.value) -> None:
        self._host.abort(request_id, reason, self)

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int
    ) -> dict[str, float] | None:
        return self._host.finish(request_id, reason, num_tokens, self)

    def stage(self, request_id: RequestId) -> str:
        tracked = self.conductor.requests.get(request_id)
        return stage_of(None if tracked is None else tracked.record)

    def note_refused(self, reason: str) -> None:
        if reason in REFUSALS or reason not in FAILURES:
            self.observer.note_refused(reason)
        else:
            self.observer.note_failed(reason)

    def note_answered(self, lengths: Sequence[int]) -> None:
        self.observer.prompt_answered(lengths)

    def collectors(self) -> list[Collector]:
        """Returns what `metrics_text` takes, with the present gauges."""
        conductor = self.conductor
        unsettled = self._host.unsettled(self)
        self.observer.gauges(conductor, unsettled, self.card.max_model_tokens, self.now())
        loads = {name: state.load for name, state in conductor.instances.items()}
        views = {
            name: load.cache_view
            for name, load in loads.items()
            if load is not None and load.cache_view is not None
        }
        self._engine_caches.set(self.card.model_id, views)
        return [self.metrics, self._engine_caches]

    # Decisions

    def arrival(self, request: Request, delivered: tuple[int, ...] | None) -> RequestArrived:
        """Returns the event of a request's arrival. If our instances cache no prefixes, the request
        uses no cache, so that the Conductor expects no hits."""
        config = self._settings.config
        if config.engine.kind != "vllm" and not config.pool.prefix_caching:
            request = msgspec.structs.replace(request, use_cache=False)
        return RequestArrived(request, delivered)

    def handle(self, event: ConductorEvent) -> list[ConductorAction]:
        """Passes an event to the Conductor, and records it in the event log."""
        now = self.now()
        actions: list[ConductorAction] = []
        try:
            actions = self.conductor.handle(event, now)
        finally:  # an event that raises is the most important one in the log
            self._events.note(event, now, actions)
        return actions

    def note_report(self, instance_id: InstanceId, report: Report) -> None:
        """Counts the contents of an instance's report. Call this method before the Conductor
        handles the report."""
        state = self.conductor.instances.get(instance_id)
        if isinstance(report, InstanceLoad) and state is not None:
            self.observer.instance_load(state, report)
        elif isinstance(report, TransferDone):
            self.observer.transfer_done(report)

    def event_log(self) -> bytes:
        return write_file(
            self._events,
            __version__,
            self._settings.incarnation,
            self._settings.config.for_conductor(),
            self.slo.usual,
            self._settings.tenant_shares,
            self._settings.tenant_caches,
            time.time() - self.now(),
        )

    def beliefs(self) -> dict[str, Any]:
        conductor = self.conductor
        record = conductor.cost_estimator.record(list(conductor.instances.values()))
        described: dict[str, Any] = msgspec.to_builtins(record)
        return described

    @property
    def lack(self) -> str:
        """Returns why requests are not served now, or "" if they are."""
        roles = [state.role for state in self.conductor.instances.values()]
        if not self.card.generates and any(role.prefills for role in roles):
            return ""
        return self.conductor.lack

    # Methods about the model's vLLM servers

    def take_offer(self, offer: ModelOffer) -> None:
        """Adds a vLLM server of this model: its names, adapters and endpoints become the model's,
        too."""
        card = self.card
        if card.model_id == self._settings.config.model.served_name:
            names: tuple[str, ...] = ()
        elif self.has_offers:
            names = (*card.other_names, *offer.names)
        else:  # until a server comes, the configuration alone describes the model
            card = msgspec.structs.replace(card, model_id=offer.names[0])
            names = offer.names
        others = dict.fromkeys(name for name in names if name != card.model_id)
        adapters = {one.name for one in card.adapters} | {one.name for one in offer.adapters}
        aliases = dict.fromkeys((*card.aliases, self.key, offer.root))
        taken = {card.model_id, *others, *adapters}
        self.card = msgspec.structs.replace(
            card,
            other_names=tuple(others),
            aliases=tuple(alias for alias in aliases if alias not in taken),
            generates=offer.generates,
            scores_prompts=offer.generates,
            forwards=self._forwards(offer),
        )
        self.metrics.rename(self.card.model_id)
        self.has_offers = True

    def _forwards(self, offer: ModelOffer) -> tuple[str, ...]:
        known = self.card.forwards if self.has_offers else ()
        paths: tuple[str, ...] = (*MEDIA_PATHS, *POOLING_PATHS)
        if offer.takes != "tokens":
            paths = (COMPLETIONS, *paths)
        return tuple(path for path in paths if path in known or path in offer.paths)

    def set_parsing(self, offers: Iterable[ModelOffer]) -> None:
        """Forwards calls with tools or reasoning if all servers parse these, and all calls if some
        server takes no token ids."""
        shared: set[Parsing] = set(get_args(Parsing))
        forwards_all = not self.card.knows_tokens
        for offer in offers:
            shared &= set(offer.parses)
            forwards_all = forwards_all or offer.takes == "text"
        if forwards_all != self.card.forwards_all:
            self.card = msgspec.structs.replace(self.card, forwards_all=forwards_all)
        if not self.has_offers or self._settings.config.vllm.parsers == "moonpool":
            shared = set()
        parses = tuple(one for one in get_args(Parsing) if one in shared)
        if parses != self.card.parses:
            self.card = msgspec.structs.replace(self.card, parses=parses)

    def set_adapters(self, offers: Iterable[ModelOffer]) -> None:
        """Lists the adapters of the present servers, after the adapters of the configuration."""
        found = {one.name: one for one in self._loaded.card.adapters}
        for offer in offers:
            for one in offer.adapters:
                card = AdapterCard(name=one.name, adapter=one.name, root=one.root)
                found.setdefault(one.name, card)
        adapters = tuple(found.values())
        if adapters != self.card.adapters:
            self.card = msgspec.structs.replace(self.card, adapters=adapters)

    def why_not(self, info: InstanceInfo) -> str | None:
        """Returns why an instance cannot serve this model, or None if it can."""
        wanted = tuple(card.adapter for card in self.card.adapters)
        if self._settings.config.engine.kind != "vllm" and info.adapters != wanted:
            return "its LoRA adapters differ from the head's: give all machines the same folders"
        others = [state.info for state in self.conductor.instances.values()]
        if others and others[0].layout.fingerprint != info.layout.fingerprint:
            return (
                "its blocks differ from the cluster's: it has another model, dtype, block size,"
                " moonpool release or kind of CPU"
            )
        return None

    def limit_context_to(self, info: InstanceInfo, offer: ModelOffer | None) -> None:
        """Notes that an instance joins, whose context limits the model's. `offer`: the offer, if
        the instance is a vLLM server."""
        room_tokens = (info.largest_blocks or info.num_blocks) * info.layout.block_tokens
        limit = info.role, room_tokens, f"the size of the pool of {info.instance_id}"
        if offer is not None and offer.max_model_tokens <= room_tokens:
            why = f"the max_model_len of the vLLM server at {info.instance_id}"
            limit = info.role, offer.max_model_tokens, why
        self._limits[info.instance_id] = limit
        self._limit_context()

    def forget_limits(self, present: Collection[InstanceId]) -> None:
        """Drops the limits of all instances but these, because the others have left for good."""
        if self._limits.keys() - present:
            self._limits = {name: self._limits[name] for name in self._limits if name in present}
            self._limit_context()

    def _limit_context(self) -> None:
        """Limits prompt plus output, because an instance that prefills and an instance that decodes
        must have room for both."""
        if not self._limits:
            return  # the limits of the last instances are the best guess
        before, own = self.card.max_model_tokens, self._loaded.card.max_model_tokens
        known = self._limits.values()
        prefilling = [(tokens, why) for role, tokens, why in known if role.prefills]
        decoding = [(tokens, why) for role, tokens, why in known if role.decodes]
        least, why = min(max(limits) for limits in (prefilling, decoding) if limits)
        if min(least, own) == before:
            return
        if least < before < UNKNOWN_TOKENS:
            log.warning("the context length is limited to %d tokens, %s", least, why)
        elif before < least:
            log.info("the context length is %d tokens again", min(least, own))
        self.card = msgspec.structs.replace(self.card, max_model_tokens=min(least, own))
