"""The load of a trial of the pool: conversations of several tenants and models, repeatedly, by
clients that ask again after an answer was cut off."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.suite.pool_in_vllm.judge import PATH, TokenAnswer
from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool.types import Struct
from moonpool_lab.trial.answer import AnswerReceiver
from moonpool_lab.trial.conversations import ConversationMaker, Question

PATIENCE_S = 900.0
"""A client asks again for this long, because a vLLM may be killed while it starts."""
RETRY_S = 0.5
STREAMED_SHARE = 0.5


class TrialCall(msgspec.Struct, frozen=True):
    """One question, with its prompt in the tokens of its model."""

    question: Question
    model: str
    tenant: str
    prompt: list[int]

    def body(self, streamed: bool) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": self.prompt,
                "max_tokens": self.question.max_tokens,
                "temperature": 0,
                "stream": streamed,
                "cache_salt": self.tenant,
                "return_token_ids": True,
            }
        )


class TokenReceiver(AnswerReceiver):
    """Keeps the token ids of the answer."""

    def __init__(self, streamed: bool) -> None:
        super().__init__(streamed)
        self.tokens: list[int] = []

    def _take_choice(self, choice: dict[str, Any]) -> None:
        super()._take_choice(choice)
        self.tokens += choice.get("token_ids") or ()


class LoadShape(Struct, frozen=True):
    """Lengths are in words. Each tenant has `sessions` conversations with each model."""

    requests: int
    concurrency: int
    tenants: int = 3
    sessions: int = 3
    turns: int = 4
    opening_words: int = 120
    turn_words: int = 50
    answer_tokens: int = 24
    timeout_s: float = 120.0

    @property
    def longest_words(self) -> int:
        """The most words of a prompt, with its codes and questions."""
        return self.opening_words + self.turns * (self.turn_words + 40)


Tokenize = Callable[[str, str], list[int]]


def make_calls(
    shape: LoadShape, models: Sequence[str], tokenize: Tokenize, seed: int
) -> tuple[list[TrialCall], ConversationMaker]:
    """Returns all questions, and an object that knows which codes are foreign to each question."""
    maker = ConversationMaker(seed, ("completions",), shape.answer_tokens, 1 << 30)
    calls = []
    for number, model in enumerate(models):
        for tenant in range(shape.tenants):
            for session in range(shape.sessions):
                name = f"model-{number}-tenant-{tenant}-session-{session}"
                turns = maker.session(name, "", shape.opening_words, shape.turn_words, shape.turns)
                calls += [
                    TrialCall(turn, model, f"tenant-{tenant}", tokenize(model, turn.text))
                    for turn in turns
                ]
    return calls, maker


class TrialLoad:
    """Asks `requests` questions in rounds, each round in another order."""

    def __init__(
        self,
        shape: LoadShape,
        calls: Sequence[TrialCall],
        foreign_to: Callable[[Question, str], set[str]],
        seed: int,
    ) -> None:
        self._shape, self._calls, self._foreign_to = shape, calls, foreign_to
        self._seed = seed
        self._rng = random.Random(f"trial load {seed}")
        self.answers: list[TokenAnswer] = []
        self.retried = Counter[str]()
        """Number of tries without a whole answer, by how they ended."""
        self.given_up: list[str] = []
        self.seconds = 0.0

    @property
    def num_done(self) -> int:
        return len(self.answers) + len(self.given_up)

    def anew(self) -> TrialLoad:
        """Returns the same load for other servers."""
        return TrialLoad(self._shape, self._calls, self._foreign_to, self._seed)

    def again(self, count: int) -> TrialLoad:
        """Sends the longest prompts once more, one at a time."""
        calls = sorted(self._calls, key=lambda call: -len(call.prompt))[:count]
        shape = msgspec.structs.replace(self._shape, requests=count, concurrency=1)
        return TrialLoad(shape, calls, self._foreign_to, self._seed)

    async def run(self, urls: Mapping[str, str]) -> None:
        began_s = time.monotonic()
        orders = iter(self._orders())

        async def ask_on() -> None:
            for call in orders:
                await self._ask_patiently(urls[call.model], call)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._shape.concurrency):
                group.create_task(ask_on())
        self.seconds = time.monotonic() - began_s

    def _orders(self) -> list[TrialCall]:
        found: list[TrialCall] = []
        while len(found) < self._shape.requests:
            found += self._rng.sample(self._calls, len(self._calls))
        return found[: self._shape.requests]

    async def _ask_patiently(self, url: str, call: TrialCall) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            receiver, outcome, detail = await self._ask(url, call)
            if outcome == "answered":
                text = receiver.answer.text
                self.answers.append(
                    TokenAnswer(
                        call.question.name,
                        call.model,
                        call.prompt,
                        receiver.tokens,
                        text,
                        sorted(self._foreign_to(call.question, text)),
                    )
                )
                return
            self.retried[outcome] += 1
            await asyncio.sleep(RETRY_S)
        self.given_up.append(f"{call.question.name}: {outcome}: {detail}")

    async def _ask(self, url: str, call: TrialCall) -> tuple[TokenReceiver, str, str]:
        streamed = self._rng.random() < STREAMED_SHARE
        receiver, client, failure = TokenReceiver(streamed), HttpClient(url), ""
        try:
            async with asyncio.timeout(self._shape.timeout_s):
                await client.post(PATH, call.body(streamed), receiver)
        except TimeoutError:
            return receiver, "hung", f"no end within {self._shape.timeout_s:g} s"
        except ConnectionFailedError as error:
            failure = str(error)
        finally:
            client.close()
        answer = receiver.end(failure)
        return receiver, answer.outcome, answer.detail
