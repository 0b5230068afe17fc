"""The head's side of its fronts: passes their requests to the Conductor, and tokens back to
them."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from moonpool.api.cluster_view import own_view
from moonpool.api.keys import TenantLimits
from moonpool.api.rate_limits import RateLimits
from moonpool.api.serving_backend import ApiOptions, RequestRefused
from moonpool.conductor.actions import Deliver, Refuse
from moonpool.head.answers import ResponseStream
from moonpool.head.fronts.channel import FrontChannel
from moonpool.head.fronts.messages import (
    FROM_FRONT,
    AbortAnswer,
    AdmitCall,
    AnswerFetched,
    AnswerName,
    AnswerPart,
    AnswerPlaced,
    AnswerRefused,
    AnswersGrown,
    AskHead,
    BeginAnswer,
    CloseAnswer,
    CopyAnswers,
    CountAnswered,
    CountRefused,
    FetchAnswer,
    FinishAnswer,
    ForgetAnswer,
    FromFront,
    FrontListens,
    HeadState,
    HoldAnswer,
    ModelKnown,
    SpendTokens,
    Told,
    ToldRefusal,
)
from moonpool.head.head import ClusterHead
from moonpool.head.models.served_model import ServedModel
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import AnswersCopied
from moonpool.protocol.messages import AttemptId, Report, StepTokens, TokenRoute, request_of
from moonpool.protocol.model_offer import ModelOffer
from moonpool.types import InstanceId, RequestId, Role

if TYPE_CHECKING:
    from moonpool.head.head import ClusterHead

log = limited_logger("moonpool.head")

_encode = msgspec.msgpack.Encoder().encode


class FrontAnswer(ResponseStream):
    """An answer whose client waits at a front. `position`: number of tokens that the Conductor
    knows."""

    def __init__(self, link: FrontLink, number: int, model: ServedModel, position: int) -> None:
        super().__init__()
        self.front_number = number
        self.model = model
        self.request_id = RequestId("")
        self.stage = ""
        self.is_silent = True
        self._link = link
        self._position = position
        self._parts: list[AnswerPart] = []
        self._attempts: list[AttemptId] = []

    def deliver(self, action: Deliver) -> None:
        """Passes output to the front, which may have got the first tokens of it directly."""
        self.is_silent = False
        num_direct = self._link.num_direct(action.request_id)
        position = self._position + num_direct
        self._link.num_tokens += len(action.tokens)
        self._link.num_direct_tokens += num_direct
        self._position += len(action.tokens)
        tokens = action.tokens[num_direct:] if num_direct else action.tokens
        if tokens or action.finish is not None:
            told = action.finish, action.cached_tokens
            self._parts.append(AnswerPart(self.front_number, position, tokens, *told))
            self._link.note_grown(self)

    def refuse(self, action: Refuse) -> None:
        super().refuse(action)
        self._link.note_grown(self)

    def take_parts(self) -> list[AnswerPart]:
        """Returns the tokens that the front does not have yet."""
        parts, self._parts = self._parts, []
        if parts and parts[-1].finish is not None:
            parts[-1] = msgspec.structs.replace(parts[-1], timings_s=self.timings_s)
        return parts

    def route(self, attempt_id: AttemptId) -> TokenRoute | None:
        """Returns the address to which the tokens of an attempt go directly, or None if they go to
        the head."""
        if attempt_id not in self._attempts:
            self._attempts.append(attempt_id)
        return self._link.route(self.front_number, self._attempts.index(attempt_id) + 1)


class FrontLink:
    """One front's connection, from `open` until the front is gone."""

    def __init__(
        self,
        head: ClusterHead,
        fronts: FrontLinks,
        number: int,
        spawn: Callable[[Any], None],
    ) -> None:
        """`number`: the place of the front among all fronts. `spawn`: runs a coroutine in the
        background."""
        self.number = number
        self.held: dict[AnswerName, None] = {}
        self.num_tokens = self.num_direct_tokens = 0
        """Number of tokens of the front's answers, and how many of them instances sent to it
        directly."""
        self._head = head
        self._fronts = fronts
        self._spawn = spawn
        self._answers: dict[int, FrontAnswer] = {}
        self._grown: dict[int, FrontAnswer] = {}
        self._silent: dict[int, FrontAnswer] = {}  # answers that have no token so far
        self._models: list[tuple[object, str]] = []
        self._state: HeadState | None = None
        self._listens: FrontListens | None = None
        self._channel: FrontChannel[FromFront] = FrontChannel(
            FROM_FRONT, self._on_message, self._on_end, self._send_grown
        )

    async def open(self, sock: socket.socket) -> None:
        await self._channel.open(sock)
        self.tell_state()

    def send(self, message: Any) -> None:
        self._channel.send(message)

    def close(self) -> None:
        self._channel.close()

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    @property
    def num_calls(self) -> int:
        """Returns the number of calls, of which each may have several answers."""
        names = (answer.request_id.partition("~")[0] for answer in self._answers.values())
        return len(set(names))

    # Messages that the front gets without asking

    def tell_state(self) -> None:
        """Tells the front what has changed of the models and the head."""
        for place, model in enumerate(self._head.models()):
            known = model.card, model.why_not_forwarded()
            if place < len(self._models) and self._models[place] == known:
                continue
            self._models[place:] = [known, *self._models[place + 1 :]]
            self.send(ModelKnown(model.key, place, model.card, model.offer, known[1]))
        head = self._head
        copies = head.standbys.wants_copies
        state = HeadState(head.not_ready(), head.is_stopping(), copies)
        if state != self._state:
            self._state = state
            self.send(state)

    def tell_stages(self) -> None:
        """Tells the front what requests without a token do now, for streams that report it."""
        self._silent = {n: answer for n, answer in self._silent.items() if answer.is_silent}
        for number, answer in self._silent.items():
            stage = answer.model.stage(answer.request_id)
            if stage != answer.stage:
                answer.stage = stage
                self.send(AnswerPlaced(number, stage))

    def num_direct(self, request_id: RequestId) -> int:
        """Returns how many of the tokens that are delivered now the front has got directly."""
        return self._fronts.num_direct.get(request_id, 0)

    def route(self, number: int, attempt: int) -> TokenRoute | None:
        listens = self._listens
        if listens is None:
            return None
        return TokenRoute(front=listens.front, port=listens.port, number=number, attempt=attempt)

    def note_grown(self, answer: FrontAnswer) -> None:
        self._grown[answer.front_number] = answer
        self._channel.wake()

    def _send_grown(self) -> None:
        """Sends the front the tokens that its answers got in this turn of the loop."""
        if not self._grown:
            return
        grown, self._grown = self._grown, {}
        parts: list[AnswerPart] = []
        ends: list[AnswerRefused] = []
        for number, answer in grown.items():
            if number not in self._answers:
                continue
            parts += answer.take_parts()
            if answer.refused:
                ends.append(AnswerRefused(number, refusal_of(answer.refusal())))
        if parts:
            self.send(AnswersGrown(tuple(parts)))
        for end in ends:
            self.send(end)

    # Messages

    def _on_message(self, message: FromFront) -> None:
        match message:
            case FrontListens():
                self._listens = message
            case BeginAnswer():
                self._begin(message)
            case CloseAnswer():
                self._close(message.number)
            case FinishAnswer():
                answer = self._answers.get(message.number)
                if answer is not None:
                    made = message.reason, message.num_tokens, answer.model
                    self._head.finish(answer.request_id, *made)
            case AbortAnswer():
                answer = self._answers.get(message.number)
                if answer is not None:
                    self._head.abort(answer.request_id, message.reason, answer.model)
            case AdmitCall():
                self._admit(message)
            case SpendTokens():
                for tenant, num_tokens in message.spent.items():
                    self._fronts.rates.spend(tenant, num_tokens)
            case CountRefused() | CountAnswered():
                self._count(message)
            case CopyAnswers():
                self._fronts.copy(self.number, message.copied)
            case AskHead():
                self._spawn(self._answer(message))
            case _:
                self._on_held(message)

    def _on_held(self, message: HoldAnswer | ForgetAnswer | FetchAnswer | AnswerFetched) -> None:
        """Handles messages that concern other fronts."""
        match message:
            case HoldAnswer():
                self.held[message.name] = None
            case ForgetAnswer():
                self.held.pop(message.name, None)
            case FetchAnswer():
                self._fronts.fetch(self, message)
                return
            case AnswerFetched():
                self._fronts.on_fetched(message)
                return
        for other in self._fronts.others(self):
            other.send(message)

    def _begin(self, message: BeginAnswer) -> None:
        model = self._head.served.by_key(message.model)
        if message.number in self._answers or model is None:
            text = "The server was replaced, and does not have this model yet. Send it again."
            refusal = ToldRefusal(503, "head_replaced", text, 1.0)
            self.send(AnswerRefused(message.number, refusal))
            return
        request = message.request
        answer = FrontAnswer(self, message.number, model, len(message.delivered or ()))
        if request.request_id in self._fronts.names:
            # Clients of two fronts may give the same X-Request-Id, but requests may not share it.
            name = f"{request.request_id}-{self.number}.{message.number}"
            request = msgspec.structs.replace(request, request_id=RequestId(name))
        answer.request_id = request.request_id
        self._fronts.names.add(request.request_id)
        self._answers[message.number] = self._silent[message.number] = answer
        try:
            told = message.delivered, message.call
            self._head.begin(answer.model, request, *told, answer=answer)
        except RequestRefused as refused:
            self._forget(message.number)
            self.send(AnswerRefused(message.number, refusal_of(refused)))
        except Exception:
            log.exception("the request %s failed", request.request_id)
            self._forget(message.number)
            text = "The server failed on this request; its log has the details."
            self.send(AnswerRefused(message.number, ToldRefusal(500, "internal_error", text)))

    def _forget(self, number: int) -> FrontAnswer | None:
        self._silent.pop(number, None)
        answer = self._answers.pop(number, None)
        if answer is not None:
            self._fronts.names.discard(answer.request_id)
        return answer

    def _close(self, number: int) -> None:
        answer = self._forget(number)
        if answer is not None:
            self._head.close(answer.model, answer.request_id)

    def _admit(self, message: AdmitCall) -> None:
        refusal = None
        try:
            self._fronts.rates.begin(message.tenant, message.arrived_s)
        except RequestRefused as refused:
            refusal = refusal_of(refused)
        self.send(Told(message.number, refusal=refusal))

    def _count(self, message: CountRefused | CountAnswered) -> None:
        model = None if message.model is None else self._head.served.by_key(message.model)
        if isinstance(message, CountAnswered):
            if model is not None:
                model.note_answered(message.lengths)
        elif model is not None:
            model.note_refused(message.reason)
        else:
            self._head.note_refused(message.reason)

    async def _answer(self, question: AskHead) -> None:
        try:
            value = _encode(await self._fronts.ask(question))
        except Exception:
            log.exception("cannot answer %s", question.question)
            text = "The head could not answer this; its log has the details."
            self.send(Told(question.number, refusal=ToldRefusal(500, "internal_error", text)))
        else:
            self.send(Told(question.number, value))

    def _on_end(self, reason: str) -> None:
        """Handles that the front is gone; the next front begins its answers again."""
        for number in list(self._answers):
            self._close(number)
        self._fronts.on_gone(self)
        log.info("front %d: %s", self.number, reason)


def refusal_of(refused: RequestRefused) -> ToldRefusal:
    why = refused.refusal
    told = why.status, why.reason, why.message, why.retry_after_s, why.projection
    return ToldRefusal(*told, refused.is_counted)


if TYPE_CHECKING:
    from moonpool.head.head import ClusterHead

STAGES_S = 1.0
"""How often fronts are told what requests without a token do."""
MAX_FRONTS = 64
FETCH_S = 5.0
"""How long another front may take to give up an answer."""


class FrontLinks:
    """All fronts of one head, with the state that they share. `limits`: the limits of tenants,
    which apply to all fronts together."""

    def __init__(self, head: ClusterHead, limits: Mapping[str, TenantLimits]) -> None:
        self.rates = RateLimits(limits)
        self.names: set[RequestId] = set()
        """The requests of all answers under way."""
        self.num_direct: dict[RequestId, int] = {}
        """Directly sent tokens by request, in the report that is handled now."""
        self._head = head
        self._view = own_view(head)
        self._links: dict[int, FrontLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # requests for answers of other fronts that have no reply yet
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count()
        # numbers of the answers that a standby follows, by front
        self._copied: dict[int, set[int]] = {}
        self._stages_s = time.monotonic()

    async def add(self, number: int, sock: socket.socket) -> None:
        """Adds a front. `number`: the place of the front; an earlier front in that place has
        ended."""
        link = FrontLink(self._head, self, number, self._spawn)
        before = self._links.get(number)
        if before is not None:
            before.close()
        self._links[number] = link
        await link.open(sock)
        for other in self.others(link):
            for name in other.held:
                link.send(HoldAnswer(name))

    def tick(self) -> None:
        """Tells the fronts the state that changes with time."""
        self.tell()
        now = time.monotonic()
        if now - self._stages_s >= STAGES_S:
            self._stages_s = now
            for link in self._links.values():
                link.tell_stages()

    def tell(self) -> None:
        """Tells the fronts when something of the models or of the head may have changed."""
        for link in self._links.values():
            link.tell_state()

    @contextmanager
    def hears(self, report: Report) -> Iterator[None]:
        """A context in which the report of an instance is handled, so that the head does not send
        tokens that fronts have received directly."""
        if isinstance(report, StepTokens):
            self.num_direct = {
                request_of(work.attempt_id): work.num_direct
                for work in report.attempts
                if work.num_direct
            }
        try:
            yield
        finally:
            self.num_direct = {}

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "front": number,
                "requests_under_way": link.num_answers,
                "tokens": link.num_tokens,
                "direct_tokens": link.num_direct_tokens,
            }
            for number, link in sorted(self._links.items())
        ]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Questions of a front

    def on_gone(self, link: FrontLink) -> None:
        if self._links.get(link.number) is link:
            del self._links[link.number]

    def others(self, link: FrontLink) -> list[FrontLink]:
        return [other for other in self._links.values() if other is not link]

    def holder(self, name: AnswerName) -> FrontLink | None:
        return next((link for link in self._links.values() if name in link.held), None)

    def fetch(self, link: FrontLink, fetch: FetchAnswer) -> None:
        """Asks the front that holds the answer, or with `displaces` the fronts that may run it."""
        holder = self.holder(fetch.name)
        asked = [holder] if holder is not None else self.others(link) if fetch.displaces else []
        asked = [each for each in asked if each is not link]
        if not asked:
            link.send(AnswerFetched(fetch.number, b""))
            return
        self._spawn(self._fetch(link, fetch, asked))

    async def _fetch(self, link: FrontLink, fetch: FetchAnswer, asked: list[FrontLink]) -> None:
        """Asks one front after another: at most one of them has the answer."""
        known = b""
        for each in asked:
            number = next(self._numbers)
            found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._waiting[number] = found
            each.send(FetchAnswer(number, fetch.name, fetch.displaces))
            try:
                async with asyncio.timeout(FETCH_S):
                    known = await found
            except TimeoutError:
                known = b""
            finally:
                del self._waiting[number]
            if known:
                break
        link.send(AnswerFetched(fetch.number, known))

    def copy(self, number: int, copied: AnswersCopied) -> None:
        """Sends the standby what is new in a front's answers, under the head's own numbers."""

        def own(answer: int) -> int:
            return answer * MAX_FRONTS + number

        begun = tuple(replace(each, number=own(each.number)) for each in copied.begun)
        ended = [own(answer) for answer in copied.ended]
        known = self._copied.setdefault(number, set())
        # with the first copy of this front, answers that are missing in it are over
        if copied.is_first:
            ended += known - {each.number for each in begun}
        known.update(each.number for each in begun)
        known.difference_update(ended)
        grown = tuple((own(answer), data) for answer, data in copied.grown)
        self._head.standbys.copy(AnswersCopied(begun=begun, grown=grown, ended=tuple(ended)))

    def on_fetched(self, fetched: AnswerFetched) -> None:
        found = self._waiting.get(fetched.number)
        if found is not None and not found.done():
            found.set_result(fetched.known)

    async def ask(self, question: AskHead) -> Any:
        """Answers a question of a front as `ClusterView` does."""
        if question.question == "num_calls":
            return sum(link.num_calls for link in self._links.values())
        # the decoder accepts only the names of `Question`
        answer = getattr(self._view, question.question)
        return await answer(*question.arguments)


class FrontCalls:
    """The calls of fronts, each from `begin` until `hand_over` or `end`. The supervisor starts and
    ends the front processes."""

    def __init__(self, link: SupervisorLink, head: ClusterHead, options: ApiOptions) -> None:
        self._link = link
        self._links = FrontLinks(head, options.limits)
        head.fronts = self._links
        head.on_tick = self._links.tick
        know = head.on_instances

        def on_instances(
            roles: dict[InstanceId, Role], offers: dict[InstanceId, ModelOffer]
        ) -> None:
            know(roles, offers)
            self._links.tell()

        head.on_instances = on_instances

    async def begin(self) -> asyncio.Task[None]:
        """Starts to answer calls, and returns the task that runs."""
        self._adding = asyncio.create_task(self._add_fronts())
        return self._adding

    async def hand_over(self, calls_s: float) -> None:
        """Must be called when the fronts have ended."""

    async def end(self) -> None:
        self._links.close()
        self._adding.cancel()

    async def _add_fronts(self) -> None:
        while True:
            number, sock = await self._link.fronts.get()
            await self._links.add(number, sock)
