"""The models of a head, as a front has them: their tokenizers are here, their Conductors there."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from moonpool.api.body_reading.client import BodyClient
from moonpool.api.serving_backend import ApiOptions, ModelCard, Output
from moonpool.config.slo import SloConfig
from moonpool.config.tables import Config
from moonpool.head.fronts.messages import CountAnswered, CountRefused, ModelKnown
from moonpool.head.models.model_loading import ApiModel, load_model, load_offered, named_offer
from moonpool.protocol.messages import ForwardedCall
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import FinishReason, Request, RequestId


class AskedHead(Protocol):
    """The head as its models here see it."""

    def now(self) -> float: ...

    def send(self, message: CountAnswered | CountRefused) -> None: ...

    def submit(
        self,
        model: str,
        request: Request,
        delivered: tuple[int, ...] | None,
        call: ForwardedCall | None = None,
    ) -> AsyncGenerator[Output, None]: ...

    def abort(self, request_id: RequestId, reason: str) -> None: ...

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int
    ) -> dict[str, float] | None: ...

    def stage(self, request_id: RequestId) -> str: ...


class RemoteModel:
    """As `ModelBackend`. `known` is replaced when the head says so."""

    def __init__(
        self, head: AskedHead, config: Config, known: ModelKnown, loaded: ApiModel
    ) -> None:
        self.known = known
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.slo: SloConfig = config.slo
        self.request_timeout_s: float = config.api.request_timeout_s
        self._head = head
        self._loaded = loaded
        self._reader = loaded.reader

    @property
    def card(self) -> ModelCard:
        return self.known.card

    def now(self) -> float:
        return self._head.now()

    def options(self, shared: ApiOptions) -> ApiOptions:
        return self._loaded.options(shared)

    def take_reader(self) -> BodyClient | None:
        reader, self._reader = self._reader, None
        return reader

    def submit(
        self, request: Request, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        return self._head.submit(self.known.model, request, delivered)

    def forward(
        self, request: Request, call: ForwardedCall, delivered: tuple[int, ...] | None = None
    ) -> AsyncGenerator[Output, None]:
        return self._head.submit(self.known.model, request, delivered, call)

    def why_not_forwarded(self) -> str:
        return self.known.no_forwarding

    def abort(self, request_id: RequestId, reason: str = FinishReason.ABORT.value) -> None:
        self._head.abort(request_id, reason)

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int
    ) -> dict[str, float] | None:
        return self._head.finish(request_id, reason, num_tokens)

    def stage(self, request_id: RequestId) -> str:
        return self._head.stage(request_id)

    def note_refused(self, reason: str) -> None:
        self._head.send(CountRefused(self.known.model, reason))

    def note_answered(self, lengths: Sequence[int]) -> None:
        self._head.send(CountAnswered(self.known.model, tuple(lengths)))


class RemoteModels:
    """The head's models, in its order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._models: dict[str, RemoteModel] = {}

    @property
    def all(self) -> list[RemoteModel]:
        return sorted(self._models.values(), key=lambda model: model.known.place)

    async def take(self, head: AskedHead, known: ModelKnown) -> None:
        """Adds a model, or replaces one that has changed. Raises ClusterError."""
        found = self._models.get(known.model)
        if found is None:
            loaded = await self._load(known)
            self._models[known.model] = RemoteModel(head, self._config, known, loaded)
        else:
            found.known = known

    async def _load(self, known: ModelKnown) -> ApiModel:
        """The head has loaded it before."""
        config = self._config
        if config.engine.kind != "vllm":
            return await load_model(config, is_new=False)
        offer = known.offer or named_offer(config.model.name)
        return await load_offered(config, offer, is_first=not known.place, is_new=False)
