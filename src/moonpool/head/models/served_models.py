"""The models that one head serves, and which instance serves which model.

Moonpool's own engine has one model. In front of vLLM servers, there is one model for each that the
servers offer. A model is read when its first server joins, and stays when its last server leaves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from moonpool.conductor.actions import ConductorEvent, DrainRequested, InstanceCrashed, Reported
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.state import InstanceState
from moonpool.config.tables import ConfigError
from moonpool.head.cluster_error import ClusterError
from moonpool.head.explain import describe_cluster, describe_to_tenant
from moonpool.head.models.model_loading import ApiModel, load_offered
from moonpool.head.models.served_model import HeadSettings, ModelHost, ServedModel
from moonpool.head.worker_link import WorkerLink
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import Setup, TurnedAway
from moonpool.protocol.model_offer import ModelOffer, OfferedAdapter
from moonpool.text.model_folder import GGUF_SUFFIX
from moonpool.types import InstanceId, Role

log = limited_logger("moonpool.head")
MAX_MODELS = 64
NO_SERVER = "no vLLM server has joined yet"
FIRST_S = 30.0
"""How long the other servers wait for the first server."""


class ServedModels:
    """If `settings.config.model.name` is not empty, it is the only model that is accepted."""

    def __init__(self, host: ModelHost, settings: HeadSettings) -> None:
        self._host = host
        self._settings = settings
        self._models: list[ServedModel] = []
        self.conductors: list[Conductor] = []
        self._of: dict[InstanceId, ServedModel] = {}
        self._offers: dict[InstanceId, ModelOffer] = {}
        self._loading = asyncio.Lock()
        self._has_first = asyncio.Event()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def all(self) -> Sequence[ServedModel]:
        return self._models

    @property
    def default(self) -> ServedModel | None:
        """Returns the first model, which a call without a model means, or None while there is no
        model."""
        return self._models[0] if self._models else None

    @property
    def is_busy(self) -> bool:
        return any(model.conductor.is_busy for model in self._models)

    def of(self, instance_id: InstanceId) -> ServedModel | None:
        return self._of.get(instance_id, self.default)

    def offer(self, instance_id: InstanceId) -> ModelOffer | None:
        """Returns the offer of an instance, if it is a vLLM server."""
        return self._offers.get(instance_id)

    def state(self, instance_id: InstanceId) -> InstanceState | None:
        """Returns the state of the instance, if it is up."""
        model = self.of(instance_id)
        return None if model is None else model.conductor.instances.get(instance_id)

    @property
    def num_instances(self) -> int:
        return sum(len(model.conductor.instances) for model in self._models)

    @property
    def expected(self) -> dict[InstanceId, Role]:
        """Returns the instances that are up or should soon be."""
        return {
            name: role for model in self._models for name, role in model.conductor.expected.items()
        }

    @property
    def offers(self) -> dict[InstanceId, ModelOffer]:
        """Returns the offers of the expected instances, with the key of their model as the root."""
        expected = self.expected
        return {name: offer for name, offer in self._offers.items() if name in expected}

    def route(self, event: ConductorEvent) -> Sequence[ServedModel]:
        """Returns the model that an event is about. An event about a request or a lost instance
        goes to all models; a model that does not know the subject does nothing."""
        if isinstance(event, Reported | DrainRequested | InstanceCrashed):
            model = self.of(event.instance_id)
            return [] if model is None else [model]
        return self._models

    def add(self, key: str, loaded: ApiModel) -> ServedModel:
        """Raises ConfigError."""
        model = ServedModel(self._host, self._settings, key, loaded)
        self._models.append(model)
        self.conductors.append(model.conductor)
        self._host.on_new_model(model)
        return model

    def named(self, name: str | None) -> ServedModel | None:
        """Returns the model of this name; None means the default."""
        if name is None:
            return self.default
        return next((model for model in self if model.is_named(name)), None)

    def by_key(self, key: str) -> ServedModel | None:
        return next((model for model in self if model.key == key), None)

    @property
    def lack(self) -> str:
        """Returns why requests for some model are not served now, or "" if all are served."""
        if not self._models:
            return NO_SERVER
        found = next((model for model in self._models if model.lack), None)
        if found is None:
            return ""
        return found.lack if len(self._models) == 1 else f"{found.card.model_id}: {found.lack}"

    # vLLM servers

    async def of_offer(self, instance_id: InstanceId, offer: ModelOffer) -> ServedModel:
        """Returns the model that the server offers, and reads it first if it is new. Raises
        ClusterError, including for a model that this head does not accept, and ConfigError."""
        await self._let_first_come(instance_id)
        async with self._loading:
            model = self._known(offer)
            if model is None:
                self._check_wanted(offer)
                model = await self._load(offer, is_new=True)
                if len(self._models) > 1:
                    log.info("a further model: %s, at %s", ", ".join(offer.names), instance_id)
            self._bind(instance_id, model, offer)
            return model

    async def _load(self, offer: ModelOffer, is_new: bool) -> ServedModel:
        """Raises ClusterError and ConfigError."""
        config = self._settings.config
        loaded = await load_offered(config, offer, is_first=not self._models, is_new=is_new)
        model = self.add(offer.root, loaded)
        model.offer = offer
        return model

    async def _let_first_come(self, instance_id: InstanceId) -> None:
        """Makes the model of the first named server the default, whichever server answers first."""
        if self._settings.config.vllm.first in ("", instance_id):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self._has_first.wait()

    async def expect_offer(self, instance_id: InstanceId, offer: ModelOffer) -> ServedModel:
        """Like `of_offer`, for an offer that an earlier head has left. Must be called before any
        server joins."""
        model = self._known(offer)
        if model is None:
            model = await self._load(offer, is_new=False)
        self._bind(instance_id, model, offer)
        return model

    def _bind(self, instance_id: InstanceId, model: ServedModel, offer: ModelOffer) -> None:
        self._has_first.set()
        model.take_offer(offer)
        former = self._of.get(instance_id)
        self._of[instance_id] = model
        self._offers[instance_id] = msgspec.structs.replace(offer, root=model.key)
        self.note_present(instance_id)
        if former is not None and former is not model:
            self._host.on_moved(instance_id, former)
            self._follow_present(former)

    def note_present(self, instance_id: InstanceId) -> None:
        """Notes that a vLLM server is about to serve: the head parses for its model what the server
        cannot parse."""
        model = self._of.get(instance_id)
        if model is not None:
            self._set_offers(model, {*model.conductor.expected, instance_id})

    def note_adapters(self, instance_id: InstanceId, adapters: tuple[OfferedAdapter, ...]) -> None:
        """Notes that a vLLM server has loaded or unloaded adapters."""
        offer = self._offers.get(instance_id)
        if offer is not None:
            self._offers[instance_id] = msgspec.structs.replace(offer, adapters=adapters)
            self.note_present(instance_id)

    def note_lost(self, instance_id: InstanceId) -> None:
        """Notes that an instance was lost. If it does not come back, what only this instance had is
        gone, too."""
        model = self.of(instance_id)
        if model is not None:
            self._follow_present(model)

    def _follow_present(self, model: ServedModel) -> None:
        present = model.conductor.expected.keys()
        model.forget_limits(present)
        if model.has_offers:
            self._set_offers(model, present)

    def _set_offers(self, model: ServedModel, present: Collection[InstanceId]) -> None:
        """`present`: the instances of the model that are up or should soon be."""
        offers = [
            offer
            for name, offer in self._offers.items()
            if name in present and self._of.get(name) is model
        ]
        # without offers, calls wait for the next server in the form in which they were read
        if offers:
            model.set_parsing(offers)
        model.set_adapters(offers)

    def _known(self, offer: ModelOffer) -> ServedModel | None:
        if self._settings.config.model.name and offer.root.endswith(GGUF_SUFFIX):
            return self.default  # the file's name lacks the information that the named folder has
        return next((model for model in self._models if is_same_model(model, offer)), None)

    def _check_wanted(self, offer: ModelOffer) -> None:
        wanted = self._settings.config.model.name
        if wanted:
            raise ClusterError(
                f"vLLM serves {offer.root}, but the head serves {wanted}; start both with the same"
                " model, or the head without a model: it then serves those of its vLLM servers"
            )
        if len(self._models) >= MAX_MODELS:
            raise ClusterError(f"this head serves {MAX_MODELS} models already, the most it can")


def is_same_model(model: ServedModel, offer: ModelOffer) -> bool:
    """Whether the server may answer for the model, judged by what it computes, and by the model's
    name, its place, or the name of its folder, which may have another path on another machine."""
    card = model.card
    if model.has_offers and card.generates != offer.generates:
        return False
    names = {model.key, card.model_id, *card.other_names, *card.aliases}
    if names & {offer.root, *offer.names}:
        return True
    return _folder_name(model.key) == _folder_name(offer.root) and not _are_two(
        model.key, offer.root
    )


def _folder_name(root: str) -> str:
    return root.rstrip("/").rpartition("/")[2]


def _are_two(one: str, other: str) -> bool:
    """Whether both are different folders of this machine."""
    first, second = Path(one), Path(other)
    try:
        return first.is_dir() and second.is_dir() and not first.samefile(second)
    except OSError:
        return False


NO_OFFER = "it does not say which model it serves: its release is older than the head's"


class VllmSetups:
    """Sets up the workers of vLLM servers: the offered model is read before the worker gets its
    settings."""

    def __init__(
        self,
        served: ServedModels,
        setup: Callable[[], Setup],
        on_failed: Callable[[WorkerLink, str], None],
    ) -> None:
        self._served = served
        self._setup = setup
        self._on_failed = on_failed
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, link: WorkerLink, offer: ModelOffer | None) -> None:
        """Sends the settings to a worker that asks to join, or rejects it."""
        task = asyncio.create_task(self._set_up(link, offer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_up(self, link: WorkerLink, offer: ModelOffer | None) -> None:
        try:
            model = await self._model(link, offer)
        except (ClusterError, ConfigError) as error:
            self._turn_away(link, str(error))
            return
        except Exception as error:  # the model's files have a fault that no check foresaw
            log.exception("the model of %s cannot be read", link.instance_id)
            found = f"{type(error).__name__}: {error}"
            self._turn_away(link, f"its model cannot be read: {found}; the head's log has more")
            return
        setup = self._setup()
        named = msgspec.structs.replace(setup.model, name=model.key)
        link.channel.send(msgspec.structs.replace(setup, model=named))

    def _turn_away(self, link: WorkerLink, message: str) -> None:
        self._on_failed(link, message)
        link.channel.send(TurnedAway(message=message))
        link.channel.close(f"rejected: {message}")

    async def _model(self, link: WorkerLink, offer: ModelOffer | None) -> ServedModel:
        """Raises ClusterError and ConfigError."""
        if offer is not None:
            return await self._served.of_offer(link.instance_id, offer)
        if self._served.default is None:
            raise ClusterError(NO_OFFER)
        return self._served.default


_OF_MODEL = ("role_balance", "predictions", "longest_gaps_over_mean", "late_ttft_over_predicted")
"""The parts of the description that concern the instances of one model."""
_OF_EACH = ("lack", "requests_under_way", "requests_waiting", "programs")
_SUMS = ("answers_paused", "requests_under_way", "requests_waiting", "indexed_blocks")


def describe_models(models: Sequence[ServedModel], now: float) -> dict[str, Any]:
    """Like `describe_cluster`. Parts that concern one model are those of the first model; `models`
    has them for each."""
    each = [describe_cluster(model.conductor, now) for model in models]
    described = _together(models, each)
    described["drains"] = {
        name: sum(one["drains"][name] for one in each) for name in ("left", "handed_over_blocks")
    }
    programs: Counter[str] = Counter()
    for one in each:
        programs.update(one["programs"])  # keeps states with a count of 0
    described["programs"] = dict(programs)
    described |= {name: each[0][name] for name in _OF_MODEL} if each else {}
    described["models"] = [
        {"name": model.card.model_id, "root": model.card.root}
        | {name: one[name] for name in (*_OF_MODEL, *_OF_EACH)}
        for model, one in zip(models, each, strict=True)
    ]
    return described


def describe_models_to_tenant(models: Sequence[ServedModel], tenant: str) -> dict[str, Any]:
    return _together(models, [describe_to_tenant(model.conductor, tenant) for model in models])


def _together(models: Sequence[ServedModel], each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    instances = [
        instance | {"model": model.card.model_id}
        for model, one in zip(models, each, strict=True)
        for instance in one["instances"]
    ]
    sums = {name: sum(one.get(name, 0) for one in each) for name in _SUMS}
    return {"instances": instances} | {
        name: total for name, total in sums.items() if not each or name in each[0]
    }
