"""The head as a front sees it: a process at the other end of a channel, which may be replaced.

Requests whose head is gone begin again at the next head, with the tokens that have come. Questions
to the head are asked again, too. No other part of a front notices the change.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from moonpool.api.body_reading.client import BodyClient
from moonpool.api.connection.kept_stream import MAX_FRUITLESS
from moonpool.api.connection.poison import poison_error
from moonpool.api.keys import TenantLimits
from moonpool.api.rate_limits import RateLimits
from moonpool.api.serving_backend import ApiOptions, ModelCard, Output, RequestRefused
from moonpool.config.slo import SloConfig
from moonpool.config.tables import Config
from moonpool.head.fronts.channel import FrontChannel
from moonpool.head.fronts.messages import (
    TO_FRONT,
    AbortAnswer,
    AdmitCall,
    AnswerFetched,
    AnswerPlaced,
    AnswerRefused,
    AnswersGrown,
    AskHead,
    BeginAnswer,
    CloseAnswer,
    CountAnswered,
    CountRefused,
    FetchAnswer,
    FinishAnswer,
    ForgetAnswer,
    FrontListens,
    HeadState,
    HoldAnswer,
    ModelKnown,
    Question,
    SpendTokens,
    ToFront,
    Told,
    ToldRefusal,
)
from moonpool.head.fronts.remote_answer import RemoteAnswer
from moonpool.head.models.model_loading import ApiModel, load_model, load_offered, named_offer
from moonpool.log_limit import limited_logger
from moonpool.protocol.direct_tokens import DirectWork
from moonpool.protocol.messages import ForwardedCall
from moonpool.text.tokenizer import Tokenizer
from moonpool.types import FinishReason, Request, RequestId

log = limited_logger("moonpool.front")

LACK_S = 3.0
"""How long to wait for missing earlier tokens, which may arrive over another connection."""
NO_HEAD = "the head process is being replaced"


class AnswersHere(Protocol):
    """The answers that this front holds for clients that may come back."""

    def on_message(self, message: HoldAnswer | ForgetAnswer | FetchAnswer) -> None: ...

    def forget_others(self) -> None:
        """Forgets what other fronts hold, because the next head tells it again."""
        ...

    def tell_all(self) -> None: ...

    def copy(self, is_wanted: bool) -> None:
        """Sets whether a standby follows the answers."""
        ...


class RemoteHead:
    """The head, in another process, as `CallBackend` and `ClusterView`. `models` are those that the
    head has reported."""

    def __init__(self, models: RemoteModels) -> None:
        self.is_told = asyncio.Event()
        """Set when the head has said what it serves."""
        self.kept: AnswersHere | None = None
        self._models = models
        self._views_end = False
        self._state = HeadState("the head has not started yet", False)
        self._channel: FrontChannel[ToFront] | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, RemoteAnswer] = {}
        self._named: dict[RequestId, RemoteAnswer] = {}
        self.listens: FrontListens | None = None
        """The address to which instances may send tokens directly."""
        self._asked: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        self._spent: dict[str, int] = {}
        self._arrivals: asyncio.Queue[ModelKnown | HeadState] = asyncio.Queue()
        self._loading = asyncio.create_task(self._follow())

    async def connect(self, sock: socket.socket) -> None:
        """Connects to another head."""
        former, self._channel = self._channel, None
        if former is not None:
            former.close()
        if self.kept is not None:
            self.kept.forget_others()

        def on_end(reason: str) -> None:
            if self._channel is channel:
                self._channel = None
                log.warning("the head is gone: %s", reason)

        channel: FrontChannel[ToFront] = FrontChannel(
            TO_FRONT, self._on_message, on_end, self._send_spent
        )
        await channel.open(sock)
        self._channel = channel
        self._begin_again()

    def close(self) -> None:
        self._loading.cancel()
        if self._channel is not None:
            self._channel.close()

    # Methods that calls need

    def now(self) -> float:
        return time.monotonic()

    def models(self) -> Sequence[RemoteModel]:
        return self._models.all

    def is_stopping(self) -> bool:
        return self._state.is_stopping or self._views_end

    def end_views(self) -> None:
        """Ends the streams of the live page, which connect again."""
        self._views_end = True

    def not_ready(self) -> str:
        return self._state.not_ready if self._channel is not None else NO_HEAD

    def note_refused(self, reason: str) -> None:
        self.send(CountRefused(None, reason))

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._channel is None else self._channel.num_unsent_bytes

    def send(self, message: Any) -> None:
        """Sends a message; messages that are lost with the head need no repetition."""
        if self._channel is not None:
            self._channel.send(message)

    async def submit(
        self,
        model: str,
        request: Request,
        delivered: tuple[int, ...] | None,
        call: ForwardedCall | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Submits, as `ModelBackend.submit` does, to the model with this key."""
        number = next(self._numbers)
        answer = RemoteAnswer(BeginAnswer(number, model, request, delivered, call))
        self._answers[number] = self._named[request.request_id] = answer
        self.send(answer.begin)
        try:
            while True:
                output = await answer.next_output()
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._answers[answer.number]
            if self._named.get(request.request_id) is answer:
                del self._named[request.request_id]
            self.send(CloseAnswer(answer.number))

    def on_tokens(self, work: DirectWork) -> None:
        """Takes the tokens of an answer that an instance sends."""
        answer = self._answers.get(work.number)
        if answer is not None:
            answer.grow_directly(work.attempt, work.position, work.tokens)
            self._check(answer)

    def _check(self, answer: RemoteAnswer) -> None:
        """Begins an answer again that lacks tokens, or continues after others than its client
        has."""
        if answer.is_wrong:
            self.send(CloseAnswer(answer.number))
            self._restart(answer)
        elif answer.lacks_since_s is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(LACK_S, self._look_for, answer, answer.lacks_since_s)

    def _look_for(self, answer: RemoteAnswer, since_s: float) -> None:
        if answer.lacks_since_s == since_s and answer.number in self._answers:
            log.warning("tokens of an answer did not arrive: it goes on from those that did")
            self.send(CloseAnswer(answer.number))
            self._restart(answer)

    def _restart(self, answer: RemoteAnswer) -> None:
        """Begins a request again with the known tokens, at this head or its next one."""
        if answer.num_lost > MAX_FRUITLESS:
            poison = poison_error()
            answer.refuse(ToldRefusal(poison.status, "head_failed", str(poison)))
        elif answer.begin.call is not None and answer.has_begun:
            text = "The server was replaced in the middle of this answer. Send the request again."
            answer.refuse(ToldRefusal(503, "head_replaced", text))
        else:
            del self._answers[answer.number]
            self.send(answer.begin_again(next(self._numbers)))
            self._answers[answer.number] = answer

    def abort(self, request_id: RequestId, reason: str) -> None:
        answer = self._named.get(request_id)
        if answer is not None:
            self.send(AbortAnswer(answer.number, reason))

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int
    ) -> dict[str, float] | None:
        answer = self._named.get(request_id)
        if answer is None:
            return None
        self.send(FinishAnswer(answer.number, reason, num_tokens))
        return answer.timings_s

    def stage(self, request_id: RequestId) -> str:
        answer = self._named.get(request_id)
        return "" if answer is None else answer.stage

    # Questions

    async def tell(self, make: Any) -> Told:
        """Asks a question, which `make` builds with its number, and repeats it if the head is lost.
        Raises RequestRefused."""
        told: Told = await self._ask(make)
        if told.refusal is not None:
            raise RequestRefused.of(told.refusal, told.refusal.is_counted)
        return told

    async def fetch(self, make: Any) -> AnswerFetched:
        fetched: AnswerFetched = await self._ask(make)
        return fetched

    async def _ask(self, make: Any) -> Any:
        number = next(self._numbers)
        asked = make(number)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked, future
        self.send(asked)
        try:
            return await future
        finally:
            del self._asked[number]

    async def question(self, question: Question, *arguments: Any) -> Any:
        told = await self.tell(lambda number: AskHead(number, question, arguments))
        return msgspec.msgpack.decode(told.value)

    def spend(self, tenant: str, num_tokens: int) -> None:
        self._spent[tenant] = self._spent.get(tenant, 0) + num_tokens
        if self._channel is not None:
            self._channel.wake()

    def _send_spent(self) -> None:
        if self._spent:
            spent, self._spent = self._spent, {}
            self.send(SpendTokens(spent))

    # Messages

    def _on_message(self, message: ToFront) -> None:
        match message:
            case AnswersGrown():
                for part in message.parts:
                    answer = self._answers.get(part.number)
                    if answer is not None:
                        answer.grow(part)
                        self._check(answer)
            case AnswerPlaced():
                if message.number in self._answers:
                    self._answers[message.number].stage = message.stage
            case AnswerRefused():
                if message.number in self._answers:
                    self._answers[message.number].refuse(message.refusal)
            case Told() | AnswerFetched():
                _, future = self._asked.get(message.number, (None, None))
                if future is not None and not future.done():
                    future.set_result(message)
            case ModelKnown() | HeadState():
                self._arrivals.put_nowait(message)
            case HoldAnswer() | ForgetAnswer() | FetchAnswer():
                if self.kept is not None:
                    self.kept.on_message(message)

    async def _follow(self) -> None:
        """Handles the head's messages about itself, in order, because loading a model takes a
        while."""
        while True:
            message = await self._arrivals.get()
            if isinstance(message, HeadState):
                self._state = message
                if self.kept is not None:
                    self.kept.copy(message.wants_copies)
                self.is_told.set()
                continue
            try:
                await self._models.take(self, message)
            except Exception:
                log.exception("the model %s cannot be read here", message.card.model_id)

    def _begin_again(self) -> None:
        """Gives a new head the requests that an earlier head had not ended."""
        if self.listens is not None:
            self.send(self.listens)
        if self.kept is not None:
            self.kept.tell_all()
        for answer in list(self._answers.values()):
            if not answer.is_complete:
                answer.num_lost += 1
                self._restart(answer)
        for asked, _ in self._asked.values():
            self.send(asked)


class RemoteRates(RateLimits):
    """Rates of tenants: the head has the buckets, so that they apply to all fronts together."""

    def __init__(self, limits: Mapping[str, TenantLimits], head: RemoteHead) -> None:
        super().__init__(limits)
        self._head = head

    async def admit(self, tenant: str, now: float) -> None:
        if self.limits_calls(tenant):
            await self._head.tell(lambda number: AdmitCall(number, tenant, now))

    def spend(self, tenant: str, num_tokens: int) -> None:
        if self.counts(tenant) and num_tokens:
            self._head.spend(tenant, num_tokens)


class RemoteModel:
    """A model of the head, as a `ModelBackend`. `known` is replaced when the head reports a
    change."""

    def __init__(
        self, head: RemoteHead, config: Config, known: ModelKnown, loaded: ApiModel
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
    """The models of the head, in the head's order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._models: dict[str, RemoteModel] = {}

    @property
    def all(self) -> list[RemoteModel]:
        return sorted(self._models.values(), key=lambda model: model.known.place)

    async def take(self, head: RemoteHead, known: ModelKnown) -> None:
        """Adds a model, or replaces one that has changed. Raises ClusterError."""
        found = self._models.get(known.model)
        if found is None:
            loaded = await self._load(known)
            self._models[known.model] = RemoteModel(head, self._config, known, loaded)
        else:
            found.known = known

    async def _load(self, known: ModelKnown) -> ApiModel:
        """Loads a model that the head has already loaded."""
        config = self._config
        if config.engine.kind != "vllm":
            return await load_model(config, is_new=False)
        offer = known.offer or named_offer(config.model.name)
        return await load_offered(config, offer, is_first=not known.place, is_new=False)
