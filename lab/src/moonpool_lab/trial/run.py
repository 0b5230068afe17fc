"""Runs a trial against one server: references without load, then load and disturbances, then again
without load.

The reference of a question is the answer that the server gives when no other request runs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool_lab.replay.server import ServerFacts, ServerUnfitError, query_server
from moonpool_lab.trial.answer import Answer, AnswerReceiver
from moonpool_lab.trial.conversations import ConversationMaker, Question
from moonpool_lab.trial.disturbances import find_reset_path, reset_cache, restart
from moonpool_lab.trial.reference import Reference
from moonpool_lab.trial.tally import Phase, Tally

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
NUM_ALTERNATIVES = 5
CANCELLED_SHARE = 0.05
"""Number of additional requests whose client leaves in the middle of the answer, as a share of the
requests under load."""
MAX_RETRIES = 5
MAX_RETRY_AFTER_S = 10.0
WORDS_PER_TOKEN = 0.15
"""Words per token, at least, in any vocabulary. In the vocabulary of the built-in model, a token is
a byte."""


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The questions for a server, and the disturbances that its owner allows."""

    url: str
    model: str | None = None
    apis: tuple[str, ...] = ("chat", "completions")
    requests: int = 400
    concurrency: int = 16
    seconds: float = 600.0
    families: int = 6
    repeats: int = 3
    max_tokens: int = 48
    fill_words: int = 4000
    tie_nats: float = 0.5
    timeout_s: float = 60.0
    may_reset: bool = False
    restart_command: tuple[str, ...] = ()
    api_key: str = ""
    ca_file: str = ""
    seed: int = 0


Show = Callable[[int, int], None]


async def run_trial(plan: TrialPlan, show: Show = lambda done, total: None) -> dict[str, Any]:
    """Returns the figures of one server.

    Raises ServerUnfitError or DisturbanceError if the server cannot be tried as planned.
    """
    client = HttpClient(plan.url, plan.api_key, ca_file=plan.ca_file)
    try:
        facts = await query_server(client, plan.model)
        trial = _Trial(plan, client, facts)
        return await trial.run(show)
    finally:
        client.close()


class _Trial:
    def __init__(self, plan: TrialPlan, client: HttpClient, facts: ServerFacts) -> None:
        self._plan = plan
        self._client = client
        self._facts = facts
        self._rng = random.Random(f"order {plan.seed}")
        self._num_alternatives = NUM_ALTERNATIVES
        self._restarts = 0  # a request during a restart may fail
        self._restarting = False
        self._asked = asyncio.Event()
        self._is_up = asyncio.Event()
        self._is_up.set()
        self._disturbed: Counter[str] = Counter()
        self._restart_s: list[float] = []
        context = facts.max_model_tokens or 4096
        max_words = int((context - plan.max_tokens - 200) * WORDS_PER_TOKEN)
        if max_words < 20:
            raise ServerUnfitError(f"{plan.url}: a context of {context} tokens is too short")
        self._maker = ConversationMaker(plan.seed, plan.apis, plan.max_tokens, max_words)
        self._fill_words = min(plan.fill_words, 1000, max_words)

    async def run(self, show: Show) -> dict[str, Any]:
        started_s = time.monotonic()
        await self._probe()
        questions = self._maker.questions(self._plan.families)
        total = self._plan.requests + len(questions) * (self._plan.repeats + 1)
        reset_path = await find_reset_path(self._client) if self._plan.may_reset else ""
        before = await self._ask_in_quiet(questions, self._plan.repeats, show, 0, total)
        tally = Tally(self._references(questions, before))
        under_load = asyncio.create_task(self._load(questions, tally, show, len(before), total))
        disturber = asyncio.create_task(self._disturb(reset_path, tally))
        try:
            await asyncio.wait([under_load, disturber], return_when=asyncio.FIRST_COMPLETED)
            if disturber.done():
                disturber.result()  # an error in a disturbance ends the trial
            await under_load
            await self._is_up.wait()
        finally:
            for task in (under_load, disturber):
                task.cancel()
            await asyncio.gather(under_load, disturber, return_exceptions=True)
        after = await self._ask_in_quiet(questions, 1, show, total - len(questions), total)
        for question, answer in [*before, *after]:
            self._count(tally, tally.quiet, question, answer)
        return self._figures(tally, started_s)

    def _figures(self, tally: Tally, started_s: float) -> dict[str, Any]:
        plan = msgspec.to_builtins(self._plan)
        del plan["api_key"]
        return {
            "url": self._plan.url,
            "model": self._facts.model,
            "disturbances": dict(self._disturbed),
            "restart_s": self._restart_s,
            **tally.figures(),
            "seconds": time.monotonic() - started_s,
            "plan": plan,
        }

    async def _probe(self) -> None:
        """Finds out whether the server answers, and whether it gives logprobs."""
        for api in self._plan.apis:
            question = Question("probe", api, (("user", "Say yes."),), "-", 2)
            answer = await self._ask(question, streamed=False, logprobs=True)
            if answer.outcome == "error" and self._num_alternatives:
                plain = await self._ask(question, streamed=False, logprobs=False)
                if plain.outcome == "answered":
                    answer, self._num_alternatives = plain, 0
            if answer.outcome != "answered":
                raise ServerUnfitError(
                    f"{self._plan.url} does not answer {PATHS[api]} ({answer.detail}):"
                    " choose another --api"
                )

    async def _ask_in_quiet(
        self, questions: list[Question], repeats: int, show: Show, done: int, total: int
    ) -> list[tuple[Question, Answer]]:
        """Asks one question after another, `repeats` times each. Every other repeat is streamed,
        and every third is without logprobs."""
        found = []
        for repeat in range(repeats):
            for question in questions:
                answer = await self._ask_patiently(question, repeat % 2 == 1, repeat % 3 != 2)
                found.append((question, answer))
                show(done + len(found), total)
        return found

    def _references(
        self, questions: list[Question], asked: list[tuple[Question, Answer]]
    ) -> dict[str, Reference]:
        """Returns the reference of each question: the text that was given most often, from the
        first answer with logprobs if one has them."""
        found = {}
        for question in questions:
            answers = [a for q, a in asked if q is question and a.outcome == "answered"]
            if not answers:
                continue
            most, _ = Counter(a.text for a in answers).most_common(1)[0]
            same = [a for a in answers if a.text == most]
            best = next((a for a in same if a.tokens), same[0])
            found[question.name] = Reference(best, self._plan.tie_nats)
        if not found:
            details = Counter(answer.detail for _, answer in asked).most_common(1)[0][0]
            raise ServerUnfitError(f"{self._plan.url} answered none of the questions: {details}")
        return found

    # Load

    async def _load(
        self, questions: list[Question], tally: Tally, show: Show, done: int, total: int
    ) -> None:
        """Asks all questions repeatedly in random order, with fillers between them."""
        orders = self._orders(questions, tally)
        deadline_s = time.monotonic() + self._plan.seconds
        num_asked = 0

        async def ask_on() -> None:
            nonlocal num_asked
            for question in orders:
                if time.monotonic() > deadline_s:
                    return
                await self._ask_under_load(question, tally)
                if question.name in tally.names:
                    num_asked += 1
                    show(done + num_asked, total)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.concurrency):
                group.create_task(ask_on())

    def _orders(self, questions: list[Question], tally: Tally) -> Iterator[Question]:
        asked = [question for question in questions if question.name in tally.names]
        left = self._plan.requests
        while left > 0:
            self._rng.shuffle(asked)
            yield from asked[:left]
            left -= len(asked)
            words = self._plan.fill_words
            while words > 0:
                yield self._maker.filler(self._fill_words)
                words -= self._fill_words

    async def _ask_under_load(self, question: Question, tally: Tally) -> None:
        if self._rng.random() < CANCELLED_SHARE:
            await self._leave_early(question)
        restarts = self._restarts
        streamed, logprobs = self._rng.random() < 0.7, self._rng.random() < 0.3
        answer = await self._ask_patiently(question, streamed, logprobs)
        if answer.outcome != "answered" and (self._restarting or restarts != self._restarts):
            self._disturbed["requests lost by a restart"] += 1
            return
        self._count(tally, tally.load, question, answer)

    async def _leave_early(self, question: Question) -> None:
        self._disturbed["clients that left"] += 1
        with suppress(TimeoutError, ConnectionFailedError):
            async with asyncio.timeout(self._rng.uniform(0.01, 0.5)):
                body = question.body(self._facts.model, True, 0)
                await self._client.post(PATHS[question.api], body, AnswerReceiver(True))

    async def _disturb(self, reset_path: str, tally: Tally) -> None:
        """Resets the cache after one, two and three quarters of the requests, and restarts the
        server after one and two quarters."""
        if not reset_path and not self._plan.restart_command:
            await asyncio.Event().wait()
        step = max(1, self._plan.requests // 4)
        for quarter in (1, 2, 3):
            await self._until_asked(quarter * step, tally)
            if reset_path:
                done = await reset_cache(self._client, reset_path)
                self._disturbed["cache resets" if done else "cache resets refused"] += 1
            if self._plan.restart_command and quarter != 3:
                await self._restart()
        await asyncio.Event().wait()

    async def _until_asked(self, number: int, tally: Tally) -> None:
        while tally.load.asked < number:
            self._asked.clear()
            await self._asked.wait()

    async def _restart(self) -> None:
        self._restarting = True
        self._is_up.clear()
        try:
            self._restart_s.append(await restart(self._client, list(self._plan.restart_command)))
        finally:
            self._restarts += 1
            self._restarting = False
            self._is_up.set()
        self._disturbed["restarts"] += 1

    # One request

    def _count(self, tally: Tally, phase: Phase, question: Question, answer: Answer) -> None:
        tally.count(phase, question, answer, self._maker.foreign_to(question, answer.text))
        self._asked.set()

    async def _ask_patiently(self, question: Question, streamed: bool, logprobs: bool) -> Answer:
        """Asks a question, and asks again after Retry-After if the server refuses."""
        for _ in range(MAX_RETRIES):
            await self._is_up.wait()
            answer = await self._ask(question, streamed, logprobs)
            if answer.outcome != "refused":
                return answer
            self._disturbed["refusals"] += 1
            wait_s = min(max(answer.retry_after_s, 0.5), MAX_RETRY_AFTER_S)
            await asyncio.sleep(wait_s * self._rng.uniform(1, 1.5))
        return answer

    async def _ask(self, question: Question, streamed: bool, logprobs: bool) -> Answer:
        receiver = AnswerReceiver(streamed)
        num_alternatives = self._num_alternatives if logprobs else 0
        body = question.body(self._facts.model, streamed, num_alternatives)
        failure = ""
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._client.post(PATHS[question.api], body, receiver)
        except TimeoutError:
            answer = receiver.end(f"no end within {self._plan.timeout_s:g} s")
            answer.outcome = "hung"
            answer.detail = f"no end within {self._plan.timeout_s:g} s"
            return answer
        except ConnectionFailedError as error:
            failure = str(error)
        return receiver.end(failure)
